"""Opens picture files. Only the usual formats are read, whatever the file's name says: Pillow knows others too, and for
some of them (EPS) it starts another program.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import struct
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, BinaryIO

from .regular_file import require_regular

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "AVIF", "GIF", "BMP", "TIFF")  # Pillow's names; JPEG includes MPO
_WIDTH, _HEIGHT, _ORIENTATION = 0x0100, 0x0101, 0x0112  # tags of TIFF and EXIF
_ON_THEIR_SIDE = (5, 6, 7, 8)  # orientations that swap width and height
_EXIF_ITEM = re.compile(rb"(infe(?:\x02.{3}.{2}|\x03.{3}.{4}).{2})Exif", re.DOTALL)  # of an AVIF file


def open_picture(file: str | os.PathLike[str] | BinaryIO) -> Image.Image:
    """The picture in a file, as Pillow's `Image.open` gives it: its pixels are not read yet.

    Raises PIL.UnidentifiedImageError when it is of none of `FORMATS`, one of `picture_errors` when it is damaged, and
    NotAFile when it is a folder or a pipe.
    """
    from PIL import Image

    if isinstance(file, str | os.PathLike):
        require_regular(file)  # Pillow would wait for a pipe
    Image.init()  # registers the formats that this Pillow can read; AVIF may be missing
    formats = [name for name in FORMATS if name in Image.OPEN]
    try:
        return Image.open(file, formats=formats)
    except picture_errors():
        without_exif = _avif_without_exif(file)
        if without_exif is None:
            raise
    return Image.open(without_exif, formats=formats)


def _avif_without_exif(file: str | os.PathLike[str] | BinaryIO) -> BinaryIO | None:
    """An AVIF file whose EXIF has another name, so that the decoder does not refuse the whole picture for it. None for
    a file of another kind or without EXIF.
    """
    if isinstance(file, (str, os.PathLike)):
        with open(file, "rb") as opened:
            return _avif_without_exif(opened)
    file.seek(0)
    head = file.read(12)
    file.seek(0)
    if head[4:] not in (b"ftypavif", b"ftypavis", b"ftypmif1"):
        return None
    content, found = _EXIF_ITEM.subn(rb"\1skip", file.read())
    file.seek(0)
    return io.BytesIO(content) if found else None


def turn_upright(picture: Image.Image) -> Image.Image:
    """A copy of the picture with its pixels read, turned as its EXIF says.

    What is wrong with the EXIF is not an error: the pixels are whole without it, and viewers show them.
    """
    from PIL import Image

    picture.load()
    turn = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }.get(_orientation(picture))
    if turn is None:
        return picture.copy()
    return picture.transpose(turn)


def upright_size(picture: Image.Image) -> tuple[int, int]:
    """(width, height) of `upright`, without reading the pixels."""
    width, height = picture.size
    tags = getattr(picture, "tag_v2", {})  # of a TIFF, whose size newer Pillows give as it is turned
    is_turned = (width, height) != (tags.get(_WIDTH, width), tags.get(_HEIGHT, height))
    if _orientation(picture) in _ON_THEIR_SIDE and not is_turned:
        return height, width
    return width, height


def _orientation(picture: Image.Image) -> int:
    """EXIF's orientation, from 1 to 8; 1 where there is none that can be read."""
    from PIL import Image

    try:
        # A PNG's own `getexif` reads all pixels first.
        found = Image.Image.getexif(picture).get(_ORIENTATION)
    except picture_errors():
        return 1
    if isinstance(found, int) and 1 <= found <= 8:
        return found
    return 1


MOST_PIXELS = 64_000_000  # that are read to draw a small picture
AT_ONCE = 2  # threads that draw pictures, each of which may take hundreds of MB meanwhile
DRAWING = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="graft-pictures")  # threads start with the first picture
_LARGE = 16_000_000  # pixels; pictures with more are drawn one at a time
_ROWS = 256  # that are scaled at a time
_drawing_large = threading.Lock()


def shrink(picture: Image.Image, side: int) -> Image.Image:
    """An open picture as an image that fits into a square: of its own mode, 16 bit as 8 bit.

    A JPEG is read at a fraction of its size. Raises ValueError when more than `MOST_PIXELS` would have to be read.
    """
    from PIL import Image

    picture.draft("RGB", (side, side))
    pixels = picture.width * picture.height
    if pixels > MOST_PIXELS:
        raise ValueError(f"{picture.width}x{picture.height} is too large for a thumbnail")
    with _drawing_large if pixels > _LARGE else contextlib.nullcontext():
        image = to_eight_bit(picture) if picture.mode.startswith("I") else picture
        image.thumbnail((side, side), Image.Resampling.BILINEAR)
    return image


def to_eight_bit(image: Image.Image) -> Image.Image:
    """16 bit gray as 8 bit, some rows at a time: Pillow's own conversion clips instead of scaling."""
    import numpy as np
    from PIL import Image

    scaled = Image.new("L", image.size)
    for top in range(0, image.height, _ROWS):
        rows = np.asarray(image.crop((0, top, image.width, min(top + _ROWS, image.height))), dtype=np.float64)
        scaled.paste(Image.fromarray((rows / 257).round().clip(0, 255).astype(np.uint8)), (0, top))
    return scaled


def picture_errors() -> tuple[type[Exception], ...]:
    """What Pillow and its plugins raise for a damaged or too large picture, AVIF's a RuntimeError."""
    from PIL import Image

    return (
        OSError,
        ValueError,
        SyntaxError,
        EOFError,
        RuntimeError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        OverflowError,
        struct.error,
        zlib.error,
        ZeroDivisionError,
        Image.DecompressionBombError,
    )
