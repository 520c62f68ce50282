"""The editor's server on a disk that fails: what the user saved is there as it was, or as it is now, and the answer
says why.
"""

import asyncio
import errno
import json
import types

import pytest
from graft_nodes.storage import atomic
from graft_nodes.storage.disk_errors import NEXT_STEPS
from graft_nodes.tests.faults.disk import Disk, fails

pytest.importorskip("aiohttp")

from graft_nodes.comfyui_api_stubs.editor import guard


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_file_that_a_user_saves_is_replaced_whole_or_not_at_all(tmp_path, number):
    path = tmp_path / "mine.json"

    def save(body):
        atomic.write_whole(str(path), [body], shared=True)

    save(b"old")
    with Disk(tmp_path).installed() as disk:
        save(b"new")
    assert {one.split()[0] for one in disk.asked} >= {"open", "fsync", "replace"}
    for at in range(1, len(disk.asked) + 1):
        save(b"old")
        with Disk(tmp_path, at, fails(number)).installed(), pytest.raises(OSError) as caught:
            save(b"new")
        assert (
            caught.value.errno == number
            and str(tmp_path) in str(caught.value.filename)
            and NEXT_STEPS[number] in str(caught.value)
        )
        assert [one.name for one in tmp_path.iterdir()] == ["mine.json"] and path.read_bytes() == b"old"


@pytest.mark.parametrize(("number", "status"), [(errno.ENOSPC, 507), (errno.EIO, 500), (errno.EROFS, 500)])
def test_the_answer_says_why_and_no_folder(number, status):
    async def handler(request):
        raise OSError(number, "why it is", "/home/somebody/secret/mine.json")

    request = types.SimpleNamespace(match_info={}, method="POST", path="/userdata/mine.json")
    answer = asyncio.run(guard.explained(request, handler))
    assert answer.status == status and json.loads(answer.body) == {
        "error": f"mine.json: why it is ({NEXT_STEPS[number]})"
    }
