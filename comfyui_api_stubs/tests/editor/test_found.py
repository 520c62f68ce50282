"""What broke the server once: requests, addresses and pictures that were made up."""

import asyncio
import types

import pytest
from PIL import Image

from comfyui_api_stubs.host_error import HostError

pytest.importorskip("aiohttp")

from comfyui_api_stubs.editor import answers
from comfyui_api_stubs.editor.files import preview
from comfyui_api_stubs.editor.pictures import DAMAGED
from comfyui_api_stubs.editor.serve import listen

DEEP, HUGE = "[" * 5000 + "]" * 5000, "9" * 5000


@pytest.mark.parametrize("address", ["a\0b", "x" * 300, "\udcff"])
def test_an_address_that_no_machine_has_is_said(address):
    with pytest.raises(HostError, match="cannot listen on"):
        listen(address, 0)


def request(body, charset="utf-8"):
    async def text():
        return body.encode().decode(charset)

    return types.SimpleNamespace(text=text)


@pytest.mark.parametrize(
    ("body", "charset"), [(DEEP, "utf-8"), (f'{{"a": {HUGE}}}', "utf-8"), ("{}", "none"), ("{", "utf-8")]
)
def test_a_body_that_no_reader_takes_is_refused(body, charset):
    with pytest.raises(answers.NotJson, match="the body is not JSON"):
        asyncio.run(answers.asked(request(body, charset)))


def test_pictures_that_are_too_large_or_damaged_are_refused_by_view_and_upload(tmp_path):
    path = tmp_path / "a.png"
    Image.new("1", (30_000, 30_000)).save(path)
    with pytest.raises(DAMAGED):
        preview(str(path), "webp", "")
    Image.effect_noise((64, 64), 90).save(path, format="JPEG")
    path.write_bytes(path.read_bytes()[:-900])
    with pytest.raises(DAMAGED):
        preview(str(path), "webp", "")
