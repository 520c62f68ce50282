"""What a file is by its first bytes: those of real files of each kind, as their formats define them."""

import io

import pytest
from graft_nodes.storage.file_kinds import PICTURES, READ, kind_of
from PIL import Image

Image.init()


def _box(brand, *compatible):
    content = b"ftyp" + brand + b"\0\0\0\0" + b"".join(compatible)
    return (len(content) + 4).to_bytes(4, "big") + content + b"\0\0\0\x08meta"


CONTENTS = {
    "HEIC of a phone": (_box(b"heic", b"mif1", b"heic"), "HEIC"),
    "HEIC of another one": (_box(b"mif1", b"mif1", b"heic", b"hevc"), "HEIC"),
    "HEIF": (_box(b"mif1", b"mif1", b"miaf"), "HEIF"),
    "AVIF": (_box(b"avif", b"mif1", b"miaf"), "AVIF"),
    "AVIF that calls itself HEIF": (_box(b"mif1", b"mif1", b"avif"), "AVIF"),
    "CR3": (_box(b"crx ", b"crx ", b"isom"), "RAW of a camera"),
    "MP4": (_box(b"isom", b"iso2", b"mp41"), "a video"),
    "a box that is cut": (b"\0\0\xff\xffftyphei", "a video"),
    "PSD": (b"8BPS\0\1" + bytes(20), "PSD"),
    "JPEG XL, bare": (b"\xff\x0a\xfa\x1f", "JPEG XL"),
    "JPEG XL": (b"\0\0\0\x0cJXL \r\n\x87\n\0\0\0\x14ftypjxl ", "JPEG XL"),
    "SVG": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "SVG"),
    "SVG with a head": (b'\xef\xbb\xbf<?xml version="1.0"?>\n<!-- a -->\n<svg/>', "SVG"),
    "web page": (b"\n<!DOCTYPE html><html><head>", "a web page"),
    "answer of a server": (b'{"error": "not found"}', "JSON"),
    "LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "a pointer of Git LFS"),
    "ZIP": (b"PK\3\4" + bytes(20), "a ZIP archive"),
    "WebM": (b"\x1a\x45\xdf\xa3" + bytes(20), "a video"),
    "AVI": (b"RIFF\0\0\0\0AVI LIST", "a video"),
    "WebP": (b"RIFF\0\0\0\0WEBPVP8 ", "WebP"),
    "empty": (b"", "empty"),
    "words": (b"no picture at all", ""),
}


@pytest.mark.parametrize(("content", "kind"), CONTENTS.values(), ids=CONTENTS)
def test_the_first_bytes_tell_what_a_file_is(tmp_path, content, kind):
    (tmp_path / "a.jpg").write_bytes(content)
    found = kind_of(tmp_path / "a.jpg")
    assert found.startswith(kind) and bool(found) == bool(kind)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("PNG", "PNG"), ("JPEG", "JPEG"), ("GIF", "GIF"), ("BMP", "BMP"), ("TIFF", "TIFF"), ("WEBP", "WebP")),
        *(("JPEG2000", "JPEG 2000"), ("ICO", "ICO"), ("EPS", "EPS"), ("PDF", "PDF"), ("PPM", "PPM"), ("DDS", "DDS")),
    ],
)
def test_what_pillow_writes_is_told(tmp_path, name, kind):
    content = io.BytesIO()
    Image.new("RGB", (16, 16), (1, 200, 3)).save(content, format=name)
    (tmp_path / "a").write_bytes(content.getvalue())
    assert kind_of(tmp_path / "a") == kind and (kind in READ) != (kind in PICTURES)
