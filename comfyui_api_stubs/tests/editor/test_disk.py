"""Files on a disk that fails: what the user saved is there as it was, or as it is now, and the answer says why."""

import asyncio
import errno
import json
import os
import types

import pytest

from comfyui_api_stubs.editor import disk

pytest.importorskip("aiohttp")

from comfyui_api_stubs.editor import guard


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_file_that_a_user_saves_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch, number, call):
    path = tmp_path / "mine.json"

    def fail(*_):
        raise OSError(number, os.strerror(number), "of the draft")

    disk.replace(str(path), [b"o", b"ld"])
    assert path.read_bytes() == b"old"
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match=os.strerror(number)) as caught:
            disk.replace(str(path), [b"new"])
    assert caught.value.errno == number and caught.value.filename == str(path)
    assert [one.name for one in tmp_path.iterdir()] == ["mine.json"] and path.read_bytes() == b"old"
    path.chmod(0o600)
    disk.replace(str(path), [b"new"])
    assert path.read_bytes() == b"new" and path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("links", [True, False])
def test_a_new_file_takes_no_other_ones_name(tmp_path, monkeypatch, links):
    def no_link(*_):
        raise OSError(errno.EPERM, "no links")

    if not links:
        monkeypatch.setattr(os, "link", no_link)
    path = tmp_path / "new.json"
    disk.create(str(path), [b"first"])
    with pytest.raises(FileExistsError):
        disk.create(str(path), [b"second"])
    assert [one.name for one in tmp_path.iterdir()] == ["new.json"] and path.read_bytes() == b"first"


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    assert disk.read(tmp_path / "a", 5) == b"12345"
    with pytest.raises(ValueError, match="it is larger than"):
        disk.read(tmp_path / "a", 4)


@pytest.mark.parametrize(
    ("number", "status"), [(errno.ENOSPC, 507), (errno.EDQUOT, 507), (errno.EIO, 500), (errno.EROFS, 500)]
)
def test_the_answer_says_why_and_no_folder(number, status):
    async def handler(request):
        raise OSError(number, "why it is", "/home/somebody/secret/mine.json")

    request = types.SimpleNamespace(match_info={}, method="POST", path="/userdata/mine.json")
    answer = asyncio.run(guard.explained(request, handler))
    assert answer.status == status and json.loads(answer.body) == {
        "error": f"mine.json: why it is ({guard.NEXT_STEPS[number]})"
    }
