"""Picture files as pixels: found, turned as EXIF says, converted to RGB, cut to a bucket; masks from alpha or from a
file beside.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .buckets import Framing

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = (".png", ".jpg", ".jpeg", ".jfif", ".webp", ".avif", ".gif", ".bmp")
MASK_FOLDER, MASK_ENDING = "masks", ".mask"


def find(folder: Path) -> list[Path]:
    """Every picture file below the folder, in the order of its relative path; hidden folders and masks are left out."""
    found = (p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    shown = (p for p in found if not any(part.startswith(".") for part in p.relative_to(folder).parts))
    own = (p for p in shown if not p.stem.endswith(MASK_ENDING) and MASK_FOLDER not in p.relative_to(folder).parts[:-1])
    return sorted(own, key=lambda p: p.relative_to(folder).as_posix())


def mask_file(picture: Path, folder: Path) -> Path | None:
    """The mask of a picture: `name.mask.png` beside it, or of its name in a `masks` folder beside it or beside its
    folder.
    """
    places = [picture.parent / f"{picture.stem}{MASK_ENDING}{suffix}" for suffix in SUFFIXES]
    if picture.parent == folder:
        above = [picture.parent]
    else:
        above = [picture.parent, picture.parent.parent]
    places += [place / MASK_FOLDER / f"{picture.stem}{suffix}" for place in above for suffix in SUFFIXES]
    return next((place for place in places if os.path.isfile(place)), None)


# What Pillow and its plugins raise on damaged files, AVIF's a RuntimeError.
_DAMAGED = (
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
)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Errors of Pillow inside the block come out as ValueError with what is wrong."""
    from PIL import Image, UnidentifiedImageError

    try:
        yield
    except UnidentifiedImageError as error:
        without = path.suffix.lower() == ".avif" and ".avif" not in Image.registered_extensions()
        raise ValueError(
            "this Pillow cannot read AVIF; install a newer one" if without else "not a picture that can be read"
        ) from error
    except (*_DAMAGED, Image.DecompressionBombError) as error:
        raise ValueError(str(error) or type(error).__name__) from error


def open_picture(path: Path) -> tuple[Image.Image, Image.Image | None]:
    """(picture as RGB, its alpha as L or None): the first frame, turned as its EXIF says, transparency over white.

    Raises ValueError when it cannot be read to its end.
    """
    from PIL import Image, ImageOps

    with reading(path):
        with Image.open(path) as file:
            file.load()
            picture = ImageOps.exif_transpose(file)
        if picture.mode.startswith("I"):
            picture = _eight_bit(picture)
        alpha = None
        if picture.has_transparency_data if hasattr(picture, "has_transparency_data") else "A" in picture.getbands():
            picture = picture.convert("RGBA")
            alpha = picture.getchannel("A")
            picture = Image.alpha_composite(Image.new("RGBA", picture.size, (255, 255, 255, 255)), picture)
        return picture.convert("RGB"), alpha


def open_mask(path: Path) -> Image.Image:
    """A mask file as L, turned as its EXIF says; white is what counts. Raises ValueError when it cannot be read."""
    from PIL import Image, ImageOps

    with reading(path):
        with Image.open(path) as file:
            file.load()
            mask = ImageOps.exif_transpose(file)
        return (_eight_bit(mask) if mask.mode.startswith("I") else mask).convert("L")


def _eight_bit(picture: Image.Image) -> Image.Image:
    """16 bit grey as 8 bit: Pillow's own conversion clips instead of scaling."""
    import numpy as np
    from PIL import Image

    return Image.fromarray((np.asarray(picture, dtype=np.float64) / 257).round().clip(0, 255).astype(np.uint8))


def fitted(picture: Image.Image, framing: Framing) -> Image.Image:
    """The picture scaled (Lanczos) and cut as the framing says."""
    from PIL import Image

    if framing.scaled == picture.size:
        scaled = picture
    else:
        scaled = picture.resize(framing.scaled, Image.Resampling.LANCZOS)
    return scaled.crop(framing.box)


def latent_mask(mask: Image.Image, framing: Framing, size: tuple[int, int]) -> Tensor:
    """A mask (L) cut like its picture, as (1, h, w) in 0..1 for latents of `size` (h, w): each value is the mean of its
    pixels.
    """
    import numpy as np
    from PIL import Image

    if framing.scaled == mask.size:
        scaled = mask
    else:
        scaled = mask.resize(framing.scaled, Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.asarray(scaled.crop(framing.box), dtype=np.float32) / 255.0)
    return torch.nn.functional.adaptive_avg_pool2d(pixels[None], size)


def pixels_of(picture: Image.Image) -> Tensor:
    """A picture as (1, H, W, 3) in 0..1, float32."""
    import numpy as np

    return torch.from_numpy(np.asarray(picture, dtype=np.float32) / 255.0)[None]


def contact_sheet(pictures: list[Image.Image], columns: int = 6, side: int = 160) -> Image.Image:
    """Up to 36 pictures on one sheet, each fitted into a square of `side` pixels."""
    from PIL import Image

    shown = pictures[:36]
    columns = min(columns, len(shown))
    rows = -(-len(shown) // columns)
    sheet = Image.new("RGB", (columns * side, rows * side), (32, 32, 32))
    for index, picture in enumerate(shown):
        small = picture.copy()
        small.thumbnail((side - 4, side - 4))
        x, y = index % columns * side + (side - small.width) // 2, index // columns * side + (side - small.height) // 2
        sheet.paste(small, (x, y))
    return sheet
