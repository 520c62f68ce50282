"""Image files as pixels: finds and opens them (EXIF rotation, RGB), crops them to a bucket, reads masks."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...storage.file_list import files_below
from .buckets import Framing

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

SUFFIXES = (".png", ".jpg", ".jpeg", ".jfif", ".webp", ".avif", ".gif", ".bmp")
OTHER_SUFFIXES = (".tif", ".tiff", ".heic", ".heif", ".jxl", ".jp2", ".tga", ".psd", ".svg")  # named in the report
ENDINGS = (*SUFFIXES, *map(str.upper, SUFFIXES))  # as files have them: cameras write capitals
MASK_FOLDER, MASK_ENDING = "masks", ".mask"
SHEET_IMAGES = 36  # on a contact sheet
_BACKGROUND = 32  # of a contact sheet, from 0 to 255
MOST_SCALED = 64_000_000  # pixels that a picture is scaled to before it is cropped
_ORIENTATION, _ON_ITS_SIDE = 0x0112, (5, 6, 7, 8)  # EXIF's tag, and its values that swap width and height


def is_image(name: str) -> bool:
    """Whether a file of this name is read as an image, by its ending; masks are not."""
    if not name.lower().endswith(SUFFIXES):  # the quick answer for most other files
        return False
    stem, suffix = os.path.splitext(name)
    return suffix != "" and not stem.lower().endswith(MASK_ENDING)


def find_images(folder: Path) -> list[Path]:
    """Every image file below the folder, in the order of its relative path; without hidden folders and masks."""
    return find_files(folder, is_image)


def find_files(folder: Path, wanted: Callable[[str], bool]) -> list[Path]:
    """The same for files of other names."""
    by_name: dict[str, Path] = {}
    begin = len(folder.parts)
    for path, _ in files_below(folder, wanted):
        parts = path.parts[begin:]
        hidden = any(part.startswith(".") for part in parts)
        if not hidden and MASK_FOLDER not in map(str.lower, parts[:-1]):
            by_name["/".join(parts)] = path
    return [path for _, path in sorted(by_name.items())]


def ignored(folder: Path, suffixes: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """(linked folders, files of other formats) below a folder, which a dataset leaves out; relative paths in order."""
    links: list[str] = []
    others: list[str] = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        place = Path(parent).relative_to(folder)
        links += [(place / name).as_posix() for name in folders if (Path(parent) / name).is_symlink()]
        others += [(place / name).as_posix() for name in files if name.lower().endswith(suffixes)]
    return sorted(links), sorted(others)


def has_masks(folder: Path) -> bool:
    """Whether `mask_file` can find something for the images below a folder."""
    for _, folders, files in os.walk(folder):
        if MASK_FOLDER in map(str.lower, folders) or any(MASK_ENDING in name.lower() for name in files):
            return True
    return False


def mask_file(image: Path, folder: Path) -> Path | None:
    """The mask of an image: `name.mask.png` beside it, or of its name in a `masks` folder beside it or beside its
    folder. "Masks" and capitals throughout are taken too.
    """
    beside = f"{image.parent}{os.sep}{image.stem}"
    places = [beside + MASK_ENDING, beside + MASK_ENDING.upper()]
    parents = [image.parent]
    if image.parent != folder:
        parents.append(image.parent.parent)
    for parent in parents:
        for name in (MASK_FOLDER, MASK_FOLDER.capitalize(), MASK_FOLDER.upper()):
            masks = f"{parent}{os.sep}{name}"
            if os.path.isdir(masks):
                places.append(f"{masks}{os.sep}{image.stem}")
    for place in places:
        for suffix in ENDINGS:
            if os.path.isfile(place + suffix):  # False for names too long, too
                return Path(place + suffix)
    return None


@contextlib.contextmanager
def pillow_errors(path: Path) -> Iterator[None]:
    """Turns Pillow's errors inside the block into ValueError that says what is wrong."""
    from PIL import Image, UnidentifiedImageError

    from ...storage.pictures import picture_errors

    try:
        yield
    except UnidentifiedImageError as error:
        message = "not a picture that can be read"
        if path.suffix.lower() == ".avif" and ".avif" not in Image.registered_extensions():
            message = "this Pillow cannot read AVIF; install a newer one"
        raise ValueError(message) from error
    except picture_errors() as error:
        raise ValueError(str(error) or type(error).__name__) from error


@contextlib.contextmanager
def errors_of(name: str) -> Iterator[None]:
    """Errors about a picture inside the block have its name in front."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


@contextlib.contextmanager
def errors_name(name: str) -> Iterator[None]:
    """Errors about a picture inside the block name its file."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"Dataset: {name}: {error}.") from error


def open_image(path: Path) -> tuple[Image.Image, Image.Image | None]:
    """(image as RGB, its alpha as L or None): the first frame, turned as its EXIF says, transparency over white.

    Raises ValueError when it cannot be read to its end.
    """
    from PIL import ImageOps

    from ...storage.pictures import eight_bit, open_picture

    with pillow_errors(path):
        with open_picture(path) as file:
            file.load()
            image = ImageOps.exif_transpose(file)
        if image.mode.startswith("I"):
            image = eight_bit(image)
        return over_white(image)


def over_white(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """(an image as RGB with its transparency over white, its alpha as L or None)."""
    from PIL import Image

    alpha = None
    if _has_transparency(image):
        image = image.convert("RGBA")
        alpha = image.getchannel("A")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return image.convert("RGB"), alpha


def open_header(path: Path) -> tuple[tuple[int, int], bool]:
    """((width, height) as `open_image` turns it, whether it has transparency) from the file's first bytes: its pixels
    are not read, so damage further down is not seen. Raises ValueError when it is no picture.
    """
    from PIL import Image

    from ...storage.pictures import open_picture

    with pillow_errors(path), open_picture(path) as file:
        width, height = file.size
        # A PNG's own `getexif` reads all pixels first.
        if Image.Image.getexif(file).get(_ORIENTATION) in _ON_ITS_SIDE:
            width, height = height, width
        return (width, height), _has_transparency(file)


def thumbnail(path: Path, side: int) -> bytes:
    """A picture as WebP that fits into a square. Raises ValueError when it cannot be read or has too many pixels."""
    from PIL import ImageOps

    from ...storage.pictures import open_picture, shrunk

    with pillow_errors(path), open_picture(path) as file:
        return small_webp(ImageOps.exif_transpose(shrunk(file, side)), side)


def small_webp(image: Image.Image, side: int) -> bytes:
    """An image as WebP that fits into a square."""
    from PIL import Image

    image.thumbnail((side, side), Image.Resampling.BILINEAR)
    content = io.BytesIO()
    image.convert("RGBA").save(content, format="WEBP", quality=75)
    return content.getvalue()


def _has_transparency(image: Image.Image) -> bool:
    if hasattr(image, "has_transparency_data"):  # Pillow 10.1 and later
        return bool(image.has_transparency_data)
    return "A" in image.getbands()


def open_mask(path: Path) -> Image.Image:
    """A mask file as L, turned as its EXIF says; white is what counts. Raises ValueError when it cannot be read."""
    from PIL import ImageOps

    from ...storage.pictures import eight_bit, open_picture

    with pillow_errors(path):
        with open_picture(path) as file:
            file.load()
            mask = ImageOps.exif_transpose(file)
        if mask.mode.startswith("I"):
            mask = eight_bit(mask)
        return mask.convert("L")


def crop_image(image: Image.Image, framing: Framing) -> Image.Image:
    """The image scaled (Lanczos) and cropped as the framing says."""
    from PIL import Image

    return _scaled_and_cropped(image, framing, Image.Resampling.LANCZOS)


def _scaled_and_cropped(image: Image.Image, framing: Framing, resampling: Image.Resampling) -> Image.Image:
    width, height = framing.scaled
    left, top, right, bottom = framing.box
    if width * height > MOST_SCALED:  # a long strip, of which the crop takes little: the same but for rounding
        across, down = image.width / width, image.height / height
        box = (left * across, top * down, min(right * across, image.width), min(bottom * down, image.height))
        return image.resize(framing.target, resampling, box)
    if framing.scaled != image.size:
        image = image.resize(framing.scaled, resampling)
    return image.crop(framing.box)


def latent_mask(mask: Image.Image, framing: Framing, size: tuple[int, int]) -> Tensor:
    """A mask (L) cropped like its image, as (1, h, w) in 0..1 for latents of `size` (h, w): each value is the mean of
    its pixels.
    """
    import numpy as np
    from PIL import Image

    mask = _scaled_and_cropped(mask, framing, Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.asarray(mask, dtype=np.float32) / 255.0)
    return torch.nn.functional.adaptive_avg_pool2d(pixels[None], size)


def image_tensor(image: Image.Image) -> Tensor:
    """An image as (1, H, W, 3) in 0..1, float32."""
    import numpy as np

    return torch.from_numpy(np.asarray(image, dtype=np.float32) / 255.0)[None]


def frames_tensor(frames: np.ndarray[Any, Any]) -> Tensor:
    """Frames (T, H, W, 3) of 8 bit in 0..1, float32."""
    return torch.from_numpy(frames).to(torch.float32) / 255.0


def stacked(sheets: Sequence[Tensor]) -> Tensor:
    """Several sheets (1, H, W, 3) below each other as one, with their background beside the narrower ones."""
    width = max(sheet.shape[2] for sheet in sheets)
    rows: list[Tensor] = []
    for sheet in sheets:
        rows.append(torch.nn.functional.pad(sheet, (0, 0, 0, width - sheet.shape[2]), value=_BACKGROUND / 255.0))
    return torch.cat(rows, 1)


def contact_sheet(images: list[Image.Image], columns: int = 6, side: int = 160) -> Image.Image:
    """The first 36 images on one sheet, each fitted into a square of `side` pixels."""
    from PIL import Image

    images = images[:SHEET_IMAGES]
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * side, rows * side), (_BACKGROUND,) * 3)
    for index, image in enumerate(images):
        thumbnail = image.copy()
        thumbnail.thumbnail((side - 4, side - 4))
        row, column = divmod(index, columns)
        x = column * side + (side - thumbnail.width) // 2
        y = row * side + (side - thumbnail.height) // 2
        sheet.paste(thumbnail, (x, y))
    return sheet
