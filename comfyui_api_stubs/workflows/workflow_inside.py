"""Finds the workflow that ComfyUI wrote into a file: a picture, a clip, a sound, a 3D model, or a model's weights.

ComfyUI writes two texts of JSON: `prompt`, the API graph that ran, and `workflow`, the editor's file. Where each format
keeps them is in ComfyUI's own savers (nodes.py, comfy_api/latest/_ui.py, comfy_extras/nodes_*.py).
"""

from __future__ import annotations

import json
import re
import struct
import sys
import zlib
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

MB = 1 << 20
MOST_BYTES = 100 * MB  # of the texts in a file
NAMES = ("prompt", "workflow")
_CDATA = re.compile(rb"<metadata>\s*<!\[CDATA\[(.*?)\]\]>", re.DOTALL)


def workflow_inside(file: BinaryIO) -> Any:
    """The JSON of the workflow in an open file: the graph that ran, else the editor's. None when the file is of no
    format that ComfyUI writes a workflow into.

    Raises ValueError, which says why, when it is of such a format and holds none, or is damaged.
    """
    start = file.read(4096)
    for fits, read in _FORMATS:
        if fits(start):
            file.seek(0)
            try:
                texts = read(file)
            except (struct.error, zlib.error, EOFError) as error:
                raise ValueError(f"it is damaged ({error}); save it again") from error
            return _chosen(texts)
    return None


def _chosen(texts: Mapping[str, Any]) -> Any:
    """The graph that ran, else the editor's file; texts are read as JSON."""
    for name in NAMES:
        found = texts.get(name)
        if isinstance(found, str):
            try:
                found = json.loads(found)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"its '{name}' is not JSON ({error})") from error
        if found:
            return found
    raise ValueError(
        "it holds no workflow: it was saved without one (--disable-metadata), or another program has written it again"
    )


def _png(file: BinaryIO) -> dict[str, str]:
    """tEXt, zTXt and iTXt; of an animation `comf`, a name and a text like tEXt."""
    file.seek(8)
    texts: dict[str, str] = {}
    left = MOST_BYTES
    while len(head := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", head)
        if kind not in (b"tEXt", b"zTXt", b"iTXt", b"comf"):
            file.seek(length + 4, 1)
            continue
        left -= length
        if left < 0:
            raise ValueError(f"its texts are larger than {MOST_BYTES / MB:g} MB")
        name, _, content = file.read(length).partition(b"\0")
        file.seek(4, 1)  # the checksum
        if kind == b"zTXt":
            content = _unpacked(content[1:])
        elif kind == b"iTXt":
            packed = content[:1] == b"\1"
            content = content[2:].split(b"\0", 2)[-1]
            content = _unpacked(content) if packed else content
        encoding = "utf-8" if kind == b"iTXt" else "latin-1"
        texts.setdefault(name.decode("latin-1"), content.decode(encoding, "replace"))
    return texts


def _unpacked(content: bytes) -> bytes:
    unpacker = zlib.decompressobj()
    text = unpacker.decompress(content, MOST_BYTES)
    if unpacker.unconsumed_tail:
        raise ValueError(f"its texts are larger than {MOST_BYTES / MB:g} MB")
    return text


def _webp(file: BinaryIO) -> dict[str, str]:
    """Texts `prompt:{…}` and `workflow:{…}` in the EXIF chunk."""
    file.seek(12)
    while len(head := file.read(8)) == 8:
        kind, length = struct.unpack("<4sI", head)
        if kind == b"EXIF":
            return _named_texts(_bounded(file, length))
        file.seek(length + length % 2, 1)
    return {}


def _named_texts(exif: bytes) -> dict[str, str]:
    """The texts of EXIF end with a NUL; each says itself what it is."""
    texts = {}
    for text in exif.split(b"\0"):
        for name in NAMES:
            _, found, content = text.partition(f"{name}:".encode())
            if found and content.lstrip()[:1] in (b"{", b"["):
                texts[name] = content.decode("utf-8", "replace")
    return texts


def _flac(file: BinaryIO) -> dict[str, str]:
    """Vorbis comments NAME=text in a block of their own."""
    file.seek(4)
    is_last = False
    while not is_last:
        head = file.read(4)
        if len(head) < 4:
            break
        is_last, kind, length = bool(head[0] & 0x80), head[0] & 0x7F, int.from_bytes(head[1:], "big")
        if kind == 4:
            return _vorbis(_bounded(file, length))
        file.seek(length, 1)
    return {}


def _vorbis(block: bytes) -> dict[str, str]:
    """The comments of a Vorbis comment block."""
    (vendor,) = struct.unpack_from("<I", block)
    (count,) = struct.unpack_from("<I", block, 4 + vendor)
    at, texts = 8 + vendor, {}
    for _ in range(count):
        (length,) = struct.unpack_from("<I", block, at)
        name, _, content = block[at + 4 : at + 4 + length].partition(b"=")
        texts[name.decode("ascii", "replace").lower()] = content.decode("utf-8", "replace")
        at += 4 + length
    return texts


def _svg(file: BinaryIO) -> dict[str, Any]:
    """One JSON object with both in <metadata>."""
    found = _CDATA.search(_bounded(file, MOST_BYTES, whole=True))
    if found is None:
        return {}
    try:
        content = json.loads(found[1])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its <metadata> is not JSON ({error})") from error
    return content if isinstance(content, dict) else {}


def _safetensors(file: BinaryIO) -> dict[str, Any]:
    """The metadata of the header: weights and latents."""
    (length,) = struct.unpack("<Q", file.read(8))
    return _object(_bounded(file, length), "__metadata__")


def _glb(file: BinaryIO) -> dict[str, Any]:
    """`asset.extras` in the JSON chunk."""
    file.seek(12)
    length, kind = struct.unpack("<I4s", file.read(8))
    if kind != b"JSON":
        return {}
    return _object(_bounded(file, length), "asset", "extras")


def _exr(file: BinaryIO) -> dict[str, str]:
    """Text attributes of the header."""
    file.seek(8)
    texts: dict[str, str] = {}
    while name := _until_nul(file):
        kind = _until_nul(file)
        (length,) = struct.unpack("<I", file.read(4))
        content = _bounded(file, length)
        if kind == b"string":
            texts[name.decode("latin-1")] = content.decode("utf-8", "replace")
    return texts


def _until_nul(file: BinaryIO) -> bytes:
    name = b""
    while (one := file.read(1)) not in (b"\0", b"") and len(name) < 256:
        name += one
    return name


def _container(kind: str) -> Callable[[BinaryIO], dict[str, str]]:
    """A reader of the tags of a clip or a sound, by PyAV, and only as this format."""

    def read(file: BinaryIO) -> dict[str, str]:
        try:
            import av
        except ImportError as error:
            raise ValueError(
                f"reading a workflow out of clips and sounds needs PyAV: {sys.executable} -m pip install av"
            ) from error
        try:
            # The demuxer has no protocol to open another file with.
            options = {"protocol_whitelist": "none"}
            with av.open(file, format=kind, options=options, metadata_errors="replace") as container:
                tags = [container.metadata, *(stream.metadata for stream in container.streams)]
        except av.error.FFmpegError as error:
            raise ValueError(f"it is damaged ({error.strerror}); save it again") from error
        return {name.lower(): text for found in reversed(tags) for name, text in found.items()}

    return read


def _object(content: bytes, *path: str) -> dict[str, Any]:
    """The object at a path in an object of JSON; empty where there is none."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is damaged: its header is not JSON ({error})") from error
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def _bounded(file: BinaryIO, length: int, whole: bool = False) -> bytes:
    """The next bytes of a file, as many as it says; `whole`: up to that many, and no more may be there."""
    if length > MOST_BYTES:
        raise ValueError(f"its texts are larger than {MOST_BYTES / MB:g} MB")
    content = file.read(length + whole)
    if whole and len(content) > length:
        raise ValueError(f"it is larger than {MOST_BYTES / MB:g} MB")
    if not whole and len(content) < length:
        raise EOFError("it ends early")
    return content


def _starts(*starts: bytes) -> Callable[[bytes], bool]:
    return lambda start: start.startswith(starts)


def _is_mp3(start: bytes) -> bool:
    return start.startswith(b"ID3") or (start[:1] == b"\xff" and start[1:2] in (b"\xfb", b"\xf3", b"\xf2"))


_FORMATS: tuple[tuple[Callable[[bytes], bool], Callable[[BinaryIO], Mapping[str, Any]]], ...] = (
    (_starts(b"\x89PNG\r\n\x1a\n"), _png),
    (lambda start: start[:4] == b"RIFF" and start[8:12] == b"WEBP", _webp),
    (_starts(b"fLaC"), _flac),
    (_starts(b"glTF"), _glb),
    (_starts(b"\x76\x2f\x31\x01"), _exr),
    (lambda start: start[4:8] == b"ftyp", _container("mp4")),
    (_starts(b"\x1a\x45\xdf\xa3"), _container("matroska")),
    (_starts(b"OggS"), _container("ogg")),
    (_is_mp3, _container("mp3")),
    (lambda start: start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= MOST_BYTES, _safetensors),
    (lambda start: b"<svg" in start and start.lstrip(b"\xef\xbb\xbf \r\n\t").startswith(b"<"), _svg),
)
