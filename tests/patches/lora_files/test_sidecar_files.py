"""Preview pictures and trigger words beside a LoRA file; the routes' tests have the whole way."""

import base64
import io
import json

import pytest
import torch
from graft_nodes.patches.lora_files import sidecar_files
from PIL import Image
from safetensors.torch import save_file


def png(size):
    out = io.BytesIO()
    Image.new("RGBA", size, (1, 200, 3, 100)).save(out, "PNG", pnginfo=None)
    return out.getvalue()


def stored(tmp_path, metadata=None):
    path = tmp_path / "a.v1.safetensors"
    save_file({"x": torch.zeros(1)}, path, metadata)
    return str(path)


def size_of(url):
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).size


def test_a_picture_beside_the_file_comes_first_then_its_own_thumbnail(tmp_path):
    cover = json.dumps([base64.b64encode(png((5, 4))).decode()])
    path = stored(tmp_path, {"ssmd_cover_images": cover})
    assert size_of(sidecar_files.preview_url(path)) == (5, 4)
    thumbnail = "data:image/png;base64," + base64.b64encode(png((8, 4))).decode()
    path = stored(tmp_path, {"ssmd_cover_images": cover, "modelspec.thumbnail": thumbnail})
    assert size_of(sidecar_files.preview_url(path)) == (8, 4)
    (tmp_path / "a.v1.preview.png").write_bytes(png((9, 4)))
    assert size_of(sidecar_files.preview_url(path)) == (9, 4)
    (tmp_path / "a.v1.png").write_bytes(png((10, 4)))
    assert size_of(sidecar_files.preview_url(path)) == (10, 4)


@pytest.mark.parametrize("covers", ["", "[]", "{", "[3]", '"x"', "[" * 10_000])
def test_metadata_without_a_picture_give_none(tmp_path, covers):
    assert sidecar_files.preview_url(stored(tmp_path, {"ssmd_cover_images": covers})) == ""


@pytest.mark.parametrize("thumbnail", ["data:image/png;base64,§", "data:image/png;base64,AAAA", "%%%"])
def test_a_thumbnail_that_is_no_picture_is_said(tmp_path, thumbnail):
    with pytest.raises(sidecar_files.NoPicture, match="the thumbnail in the file"):
        sidecar_files.preview_url(stored(tmp_path, {"modelspec.thumbnail": thumbnail}))


@pytest.mark.parametrize("notes", ["", "[1]", '{"activation text": 3, "trainedWords": {"a": 1}}', "\xff", "[" * 10_000])
def test_notes_of_another_form_give_no_words(tmp_path, notes):
    path = stored(tmp_path)
    for name in ("a.v1.json", "a.v1.civitai.info"):
        (tmp_path / name).write_text(notes, encoding="latin-1")
    assert sidecar_files.trigger_words(path) == []


@pytest.mark.parametrize("text", ["äö", "a*b=", "abc"])
def test_a_thumbnail_that_is_not_base64_is_named(tmp_path, text):
    with pytest.raises(sidecar_files.NoPicture, match="the thumbnail in the file is not base64 text"):
        sidecar_files.preview_url(stored(tmp_path, {"modelspec.thumbnail": text}))
