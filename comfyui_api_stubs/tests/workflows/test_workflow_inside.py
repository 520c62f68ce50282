"""Workflows inside of pictures, clips, sounds, 3D models and weights: what the libraries that ComfyUI saves with write
is found; a file without one says so.
"""

import io
import json
import struct
import zlib

import av
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.torch import save_file

from comfyui_api_stubs.workflows import workflow, workflow_inside

GRAPH = {"1": {"class_type": "OddSource", "inputs": {"text": "ä 漢", "number": 3}}}
EDITOR = {"nodes": [{"id": 4, "type": "OddSource"}], "links": []}
TEXTS = {"prompt": json.dumps(GRAPH), "workflow": json.dumps(EDITOR)}


def png(path, texts):
    info = PngInfo()
    for name, text in texts.items():
        info.add_text(name, text)
    Image.new("RGB", (8, 8)).save(path, format="PNG", pnginfo=info)


def packed_png(path, texts):
    info = PngInfo()
    for name, text in texts.items():
        info.add_itxt(name, text, zip=name == "workflow")
    Image.new("RGB", (8, 8)).save(path, format="PNG", pnginfo=info)


def zipped_png(path, texts):
    info = PngInfo()
    for name, text in texts.items():
        info.add_text(name, text, zip=True)
    Image.new("RGB", (8, 8)).save(path, format="PNG", pnginfo=info)


def animation(path, texts):
    info = PngInfo()
    for name, text in texts.items():
        content = name.encode("latin-1") + b"\0" + text.encode("latin-1")
        info.add(b"comf", content, after_idat=True)
    frames = [Image.new("RGB", (8, 8), (shade, 0, 0)) for shade in (0, 200)]
    frames[0].save(path, format="PNG", pnginfo=info, save_all=True, append_images=frames[1:])


def webp(path, texts):
    image = Image.new("RGB", (8, 8))
    exif = image.getexif()
    for tag, name in zip((0x0110, 0x010F), ("prompt", "workflow"), strict=True):
        if name in texts:
            exif[tag] = f"{name}:{texts[name]}"
    image.save(path, format="WEBP", exif=exif, lossless=True)


def tagged(kind, codec, options=None):
    def write(path, texts):
        with av.open(str(path), "w", format=kind, options=options or {}) as output:
            for name, text in texts.items():
                output.metadata[name] = text
            if codec in ("mpeg4", "libvpx"):
                stream = output.add_stream(codec, rate=8)
                stream.width = stream.height = 32
                stream.pix_fmt = "yuv420p"
                frame = av.VideoFrame(32, 32, "yuv420p")
            else:
                stream = output.add_stream(codec, rate=48000, layout="mono")
                frame = av.AudioFrame(format=stream.codec_context.format.name, layout="mono", samples=1152)
                frame.sample_rate = 48000
            for packet in [*stream.encode(frame), *stream.encode(None)]:
                output.mux(packet)

    return write


def svg(path, texts):
    content = json.dumps({name: json.loads(text) for name, text in texts.items()}, indent=2)
    meta = f"<metadata>\n <![CDATA[\n{content}\n]]>\n</metadata>" if texts else ""
    path.write_text(f'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg">{meta}<path/></svg>')


def glb(path, texts):
    asset = {"version": "2.0", **({"extras": texts} if texts else {})}
    content = json.dumps({"asset": asset}).encode()
    content += b" " * (-len(content) % 4)
    chunk = struct.pack("<I4s", len(content), b"JSON") + content
    path.write_bytes(b"glTF" + struct.pack("<II", 2, 12 + len(chunk)) + chunk)


def exr(path, texts):
    content = b"\x76\x2f\x31\x01" + struct.pack("<I", 2) + b"compression\0compression\0" + struct.pack("<I", 1) + b"\0"
    for name, text in texts.items():
        content += name.encode() + b"\0string\0" + struct.pack("<I", len(text.encode())) + text.encode()
    path.write_bytes(content + b"\0" + bytes(64))


def weights(path, texts):
    save_file({"a": torch.zeros(3)}, path, metadata=texts or {"format": "pt"})


def read(path):
    with open(path, "rb") as file:
        found = workflow_inside.workflow_inside(file)
    return workflow.parse(found, path)


WRITERS = {
    "png": png,
    "zTXt.png": zipped_png,
    "iTXt.png": packed_png,
    "animated.png": animation,
    "webp": webp,
    "flac": tagged("flac", "flac"),
    "mp4": tagged("mp4", "mpeg4", {"movflags": "use_metadata_tags"}),
    "webm": tagged("webm", "libvpx"),
    "opus": tagged("ogg", "libopus"),
    "mp3": tagged("mp3", "libmp3lame"),
    "svg": svg,
    "glb": glb,
    "exr": exr,
    "safetensors": weights,
    "latent": weights,
}


@pytest.mark.parametrize("ending", WRITERS)
def test_the_graph_that_ran_is_found_else_the_editor_s_file(tmp_path, ending):
    path = tmp_path / f"file.{ending}"
    WRITERS[ending](path, TEXTS)
    document = read(str(path))
    assert not document.is_editor and document.data == GRAPH
    WRITERS[ending](path, {"workflow": TEXTS["workflow"]})
    document = read(str(path))
    assert document.is_editor and document.data == EDITOR
    WRITERS[ending](path, {})
    with pytest.raises(ValueError, match="it holds no workflow"):
        read(str(path))


@pytest.mark.parametrize("ending", [ending for ending in WRITERS if ending != "svg"])
def test_a_file_that_was_cut_short_is_refused_or_read(tmp_path, ending):
    path = tmp_path / f"file.{ending}"
    WRITERS[ending](path, TEXTS)
    content = path.read_bytes()
    refused = 0
    for size in range(16, len(content), max(1, len(content) // 40)):
        path.write_bytes(content[:size])
        try:
            assert read(str(path)).data in (GRAPH, EDITOR)
        except ValueError:
            refused += 1
    assert refused


def test_texts_larger_than_a_workflow_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(workflow_inside, "MOST_BYTES", 1000)
    path = tmp_path / "a.png"
    for write in (png, zipped_png, packed_png):
        write(path, {"prompt": json.dumps(GRAPH | {"x": "y" * 2000})})
        with pytest.raises(ValueError, match="its texts are larger than"):
            read(str(path))


def test_what_is_no_json_is_named(tmp_path):
    png(tmp_path / "a.png", {"prompt": "{"})
    with pytest.raises(ValueError, match="its 'prompt' is not JSON"):
        read(str(tmp_path / "a.png"))


def test_other_files_are_not_looked_into():
    for content in (b'{"1": {}}', b"\xff\xd8\xff\xe0 a JPEG", b"", b"PK\x03\x04", zlib.compress(b"a")):
        assert workflow_inside.workflow_inside(io.BytesIO(content)) is None
