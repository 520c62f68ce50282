"""Opens pictures for /view and /upload/mask."""

from __future__ import annotations

import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

from PIL import Image

# Whatever a file's name says: Pillow knows other formats too, and for some of them (EPS) it starts another program.
FORMATS = ("PNG", "JPEG", "WEBP", "AVIF", "GIF", "BMP", "TIFF")
# What Pillow and its plugins raise for a file that is damaged or too large.
DAMAGED = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    SyntaxError,
    EOFError,
    RuntimeError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
DRAWING = ThreadPoolExecutor(2, thread_name_prefix="pictures")  # each may take hundreds of MB meanwhile


def open_picture(file: str | BinaryIO) -> Image.Image:
    """The picture in a file; its pixels are not read yet. Raises one of `DAMAGED`."""
    Image.init()  # registers the formats that this Pillow can read; AVIF may be missing
    return Image.open(file, formats=[name for name in FORMATS if name in Image.OPEN])
