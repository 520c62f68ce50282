"""Opens picture files. Only the usual formats are read, whatever the file's name says: Pillow knows others too, and for
some of them (EPS) it starts another program.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "AVIF", "GIF", "BMP", "TIFF")  # Pillow's names; JPEG includes MPO


def open_picture(file: str | os.PathLike[str] | BinaryIO) -> Image.Image:
    """The picture in a file, as Pillow's `Image.open` gives it: its pixels are not read yet.

    Raises PIL.UnidentifiedImageError when it is of none of `FORMATS`, and one of `picture_errors` when it is damaged.
    """
    from PIL import Image

    Image.init()  # registers the formats that this Pillow can read; AVIF may be missing
    return Image.open(file, formats=[name for name in FORMATS if name in Image.OPEN])


MOST_PIXELS = 64_000_000  # that are read to draw a small picture
AT_ONCE = 2  # threads that draw pictures, each of which may take hundreds of MB meanwhile
DRAWING = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="graft-pictures")  # threads start with the first picture
_LARGE = 16_000_000  # pixels; pictures with more are drawn one at a time
_ROWS = 256  # that are scaled at a time
_drawing_large = threading.Lock()


def shrunk(picture: Image.Image, side: int) -> Image.Image:
    """An open picture as an image that fits into a square: of its own mode, 16 bit as 8 bit.

    A JPEG is read at a fraction of its size. Raises ValueError when more than `MOST_PIXELS` would have to be read.
    """
    from PIL import Image

    picture.draft("RGB", (side, side))
    pixels = picture.width * picture.height
    if pixels > MOST_PIXELS:
        raise ValueError(f"{picture.width}x{picture.height} is too large for a thumbnail")
    with _drawing_large if pixels > _LARGE else contextlib.nullcontext():
        image = eight_bit(picture) if picture.mode.startswith("I") else picture
        image.thumbnail((side, side), Image.Resampling.BILINEAR)
    return image


def eight_bit(image: Image.Image) -> Image.Image:
    """16 bit grey as 8 bit, some rows at a time: Pillow's own conversion clips instead of scaling."""
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
