"""Opens picture files. Only the usual formats are read, whatever the file's name says: Pillow knows others too, and for
some of them (EPS) it starts another program.
"""

from __future__ import annotations

import os
import struct
import zlib
from typing import TYPE_CHECKING, BinaryIO

from .regular_file import require_regular

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "AVIF", "GIF", "BMP", "TIFF")  # Pillow's names; JPEG includes MPO


def open_picture(file: str | os.PathLike[str] | BinaryIO) -> Image.Image:
    """The picture in a file, as Pillow's `Image.open` gives it: its pixels are not read yet.

    Raises PIL.UnidentifiedImageError when it is of none of `FORMATS`, one of `picture_errors` when it is damaged, and
    NotAFile when it is a folder or a pipe.
    """
    from PIL import Image

    if isinstance(file, str | os.PathLike):
        require_regular(file)  # Pillow would wait for a pipe
    Image.init()  # registers the formats that this Pillow can read; AVIF may be missing
    return Image.open(file, formats=[name for name in FORMATS if name in Image.OPEN])


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
