"""Tells what a file is by its first bytes, for messages about files that are not what their names say."""

from __future__ import annotations

import os

_READ = 4096  # bytes from the beginning
_STARTS = (  # (first bytes, what the file is)
    (b"8BPS", "PSD"),
    (b"\xff\x0a", "JPEG XL"),
    (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
    (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"\x89PNG", "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF8", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"IIU\0", "RAW of a camera"),
    (b"IIRO", "RAW of a camera"),
    (b"FUJIFILMCCD-RAW", "RAW of a camera"),
    (b"II\xbc\x01", "JPEG XR"),
    (b"gimp xcf", "XCF of GIMP"),
    (b"v/1\x01", "OpenEXR"),
    (b"#?RADIANCE", "Radiance HDR"),
    (b"DDS ", "DDS"),
    (b"qoif", "QOI"),
    (b"\0\0\1\0", "ICO"),
    (b"icns", "ICNS"),
    (b"%!PS", "EPS"),
    (b"\xc5\xd0\xd3\xc6", "EPS"),
    (b"%PDF", "PDF"),
    *((b"P%d" % number + space, "PPM") for number in range(1, 8) for space in (b"\n", b" ")),
    (b"\x1a\x45\xdf\xa3", "a video"),
    (b"PK\3\4", "a ZIP archive"),
    (b"Rar!", "a RAR archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"version https://git-lfs", "a pointer of Git LFS, without the file itself (git lfs pull fetches it)"),
)
_BRANDS = {  # of ISO base media files
    **dict.fromkeys((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"), "HEIC"),
    **dict.fromkeys((b"avif", b"avis"), "AVIF"),
    b"crx ": "RAW of a camera",
    b"jxl ": "JPEG XL",
}
READ = frozenset(("PNG", "JPEG", "GIF", "BMP", "WebP", "TIFF"))
PICTURES = frozenset(
    (
        *("PSD", "JPEG XL", "JPEG 2000", "RAW of a camera", "JPEG XR", "XCF of GIMP", "OpenEXR", "DDS", "QOI"),
        *("Radiance HDR", "ICO", "ICNS", "EPS", "PDF", "PPM", "HEIC", "HEIF", "SVG"),
    )
)


def kind_of(path: str | os.PathLike[str]) -> str:
    """What a file is, as a message says it: "HEIC", "a web page"; "" where its first bytes tell nothing."""
    with open(path, "rb") as file:
        start = file.read(_READ)
    if not start:
        return "empty"
    if start[4:8] == b"ftyp":
        return _kind_of_brands(start)
    if start[:4] == b"RIFF":
        return {b"WEBP": "WebP", b"AVI ": "a video"}.get(start[8:12], "")
    for first, kind in _STARTS:
        if start.startswith(first):
            return kind
    return _kind_of_text(start)


def _kind_of_brands(start: bytes) -> str:
    """The same of an ISO base media file: its main brand counts, and those that it is compatible with."""
    length = min(int.from_bytes(start[:4], "big"), len(start))
    brands = [start[8:12], *(start[at : at + 4] for at in range(16, length - 3, 4))]
    for brand in brands:
        if brand in _BRANDS:
            return _BRANDS[brand]
    if b"mif1" in brands or b"msf1" in brands:
        return "HEIF"
    return "a video"


def _kind_of_text(start: bytes) -> str:
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith(b"<svg") or (text.startswith((b"<?xml", b"<!doctype svg", b"<!--")) and b"<svg" in text):
        return "SVG"
    if text.startswith((b"<!doctype html", b"<html", b"<head")):
        return "a web page"
    if text.startswith((b'{"', b"[{", b"{\n")):
        return "JSON"
    return ""
