"""Image files as pixels: finds and opens them (EXIF rotation, RGB), crops them to a bucket, reads masks."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...storage import file_kinds
from ...storage.file_list import files_below
from .buckets import Framing
from .file_names import FolderNames, drop_thumbnails, is_of_system

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".webp", ".avif", ".gif", ".bmp"),
    *(".jfif", ".jpe", ".jif", ".jfi", ".mpo", ".apng", ".avifs", ".dib"),  # other names of the same formats
)
OTHER_SUFFIXES = (  # named in the report
    *(".tif", ".tiff", ".heic", ".heif", ".heics", ".heifs", ".hif", ".jxl", ".tga", ".psd", ".psb", ".svg", ".svgz"),
    *(".jp2", ".j2k", ".j2c", ".jpc", ".jpf", ".jpx", ".jpm", ".jxr", ".wdp", ".qoi", ".ico", ".icns", ".cur", ".dds"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".pfm", ".pam", ".pcx", ".sgi", ".ras", ".xbm", ".xpm", ".exr", ".hdr", ".eps"),
    *(".ai", ".pdf", ".wmf", ".emf", ".xcf", ".kra", ".clip", ".ora", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf"),
    *(".rw2", ".raf", ".pef", ".srw"),
)
MASK_FOLDER, MASK_ENDINGS = "masks", (".mask", "-masklabel")  # the second one is OneTrainer's
_MASK = re.compile(r".*(?:\.mask|-masklabel([-_]?\d+)?)", re.IGNORECASE)
_CONDITION = re.compile(r".+-condlabel(?:[-_]?\d+)?", re.IGNORECASE)  # OneTrainer's too
SHEET_IMAGES = 36  # on a contact sheet
_VARIES = 8  # of 255: a smaller difference in brightness is rounding of a lossy format
LEAST_WHITE = 8  # of 255: a mask without a brighter pixel looks black, as one with the classes 0 and 1 does
_BACKGROUND = 32  # of a contact sheet, from 0 to 255
MOST_SCALED = 64_000_000  # pixels that a picture is scaled to before it is cropped


def is_image(name: str) -> bool:
    """Whether a file of this name is read as an image, by its ending; masks are not."""
    if not name.lower().endswith(SUFFIXES):  # the quick answer for most other files
        return False
    stem, suffix = os.path.splitext(name)
    return suffix != "" and not _MASK.fullmatch(stem)


def is_condition(path: Path) -> bool:
    """Whether a picture is OneTrainer's conditioning picture `name-condlabel.png` by its name."""
    return _CONDITION.fullmatch(path.stem) is not None


def find_images(folder: Path) -> list[Path]:
    """Every image file below the folder, in the order of its relative path; without hidden folders and masks."""
    return find_files(folder, is_image)


def find_files(folder: Path, wanted: Callable[[str], bool]) -> list[Path]:
    """The same for files of other names."""
    by_name: dict[str, Path] = {}
    begin = len(folder.parts)
    for path, _ in files_below(folder, wanted):
        parts = path.parts[begin:]
        if not any(map(is_of_system, parts)) and MASK_FOLDER not in map(str.lower, parts[:-1]):
            by_name["/".join(parts)] = path
    return drop_thumbnails(path for _, path in sorted(by_name.items()))


def others_pictures(folder: Path) -> list[str]:
    """Pictures below a folder that are none of the dataset's: thumbnails, and those in folders of the system that are
    not hidden. Relative paths in order.
    """
    found: list[str] = []
    pictures = [path for path, _ in files_below(folder, is_image)]
    kept = set(drop_thumbnails(pictures))
    for path in pictures:
        parts = path.relative_to(folder).parts
        hidden = any(part.startswith(".") for part in parts)
        if not hidden and (path not in kept or any(map(is_of_system, parts))):
            found.append("/".join(parts))
    return sorted(found)


def find_ignored(folder: Path, suffixes: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """(linked folders, files of other formats) below a folder, which a dataset leaves out; relative paths in order."""
    links: list[str] = []
    others: list[str] = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not is_of_system(name)]
        place = Path(parent).relative_to(folder)
        links += [(place / name).as_posix() for name in folders if (Path(parent) / name).is_symlink()]
        others += [(place / name).as_posix() for name in files if name.lower().endswith(suffixes)]
    return sorted(links), sorted(others)


def closed_folders(folder: Path) -> list[str]:
    """The folder and those below it that this user may not open, or that cannot be read, each with the reason."""
    found: list[str] = []

    def note(error: OSError) -> None:
        if isinstance(error, FileNotFoundError):
            return
        name = Path(str(error.filename)).relative_to(folder)
        found.append(f"{folder.name if name == Path() else name.as_posix()} ({error.strerror})")

    for _ in os.walk(folder, onerror=note):
        pass
    return sorted(found)


def numbered_masks(folder: Path) -> list[str]:
    """OneTrainer's masks `name-masklabel-2.png` below a folder, of which a picture has one only; relative paths."""
    found: list[str] = []
    for path, _ in files_below(folder, lambda name: name.lower().endswith(SUFFIXES)):
        match = _MASK.fullmatch(path.stem)
        if match is not None and match[1]:
            found.append(path.relative_to(folder).as_posix())
    return sorted(found)


def has_masks(folder: Path) -> bool:
    """Whether `mask_file` can find something for the images below a folder."""
    for _, folders, files in os.walk(folder):
        if MASK_FOLDER in map(str.lower, folders) or any(_MASK.fullmatch(os.path.splitext(name)[0]) for name in files):
            return True
    return False


def mask_file(image: Path, folder: Path, names: FolderNames | None = None) -> Path | None:
    """The mask of an image: `name.mask.png` or OneTrainer's `name-masklabel.png` beside it, or of its name in a `masks`
    folder beside it or beside its folder, in small letters or capitals. `names` knows what lies in the folders.
    """
    beside = f"{image.parent}{os.sep}{image.stem}"
    places = [beside + ending for ending in MASK_ENDINGS]
    places.append(f"{image.parent}{os.sep}{MASK_FOLDER}{os.sep}{image.stem}")
    if image.parent != folder:
        places.append(f"{image.parent.parent}{os.sep}{MASK_FOLDER}{os.sep}{image.stem}")
    names = names or FolderNames()
    return names.first(place + suffix for place in places for suffix in SUFFIXES)


@contextlib.contextmanager
def pillow_errors(path: Path) -> Iterator[None]:
    """Turns Pillow's errors inside the block into ValueError that says what is wrong."""
    from PIL import Image, UnidentifiedImageError

    from ...storage.pictures import picture_errors

    try:
        yield
    except UnidentifiedImageError as error:
        message = "not a picture that can be read"
        kind = file_kinds.kind_of(path)
        if kind in file_kinds.READ:
            message += f": it is a damaged {kind}"
        elif kind:
            message += f": it is {kind}, whatever its name says"
        if kind in file_kinds.PICTURES:
            message += "; save it as PNG"
        if kind == "AVIF" and ".avif" not in Image.registered_extensions():
            message = "it is AVIF, and this Pillow cannot read AVIF; install a newer one"
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
    from ...storage.pictures import open_picture, to_eight_bit, turn_upright

    with pillow_errors(path):
        with open_picture(path) as file:
            image = turn_upright(file)
        if image.mode.startswith("I"):
            image = to_eight_bit(image)
        return lay_over_white(image)


def lay_over_white(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
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
    are not read, so damage further down is not seen. Raises ValueError when it is not a picture.
    """
    from ...storage.pictures import open_picture, upright_size

    with pillow_errors(path), open_picture(path) as file:
        return upright_size(file), _has_transparency(file)


def thumbnail(path: Path, side: int) -> bytes:
    """A picture as WebP that fits into a square. Raises ValueError when it cannot be read or has too many pixels."""

    from ...storage.pictures import open_picture, shrink, turn_upright

    with pillow_errors(path), open_picture(path) as file:
        return small_webp(turn_upright(shrink(file, side)), side)


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


def open_mask(path: Path) -> tuple[Image.Image, bool]:
    """(a mask file as L, turned as its EXIF says; whether it is the file's transparency). White is what counts.

    The transparency is the mask where what is visible of the file has one color: a shape drawn on an empty layer.
    Raises ValueError when it cannot be read.
    """
    from ...storage.pictures import open_picture, to_eight_bit, turn_upright

    with pillow_errors(path):
        with open_picture(path) as file:
            mask = turn_upright(file)
        if mask.mode.startswith("I"):
            mask = to_eight_bit(mask)
        if _has_transparency(mask):
            mask = mask.convert("RGBA")
            alpha = mask.getchannel("A")
            if _has_one_color(mask, alpha):
                return alpha, True
            mask = mask.convert("RGB")
        return mask.convert("L"), False


def _has_one_color(mask: Image.Image, alpha: Image.Image) -> bool:
    """Whether the visible part of a mask has one brightness while its transparency varies."""
    used = [value for value, count in enumerate(alpha.histogram()) if count]
    if used[-1] - used[0] < _VARIES:
        return False
    counts = mask.convert("L").histogram(alpha.point(lambda value: 255 if value else 0))
    used = [value for value, count in enumerate(counts) if count]
    return used[-1] - used[0] < _VARIES


def brightest(mask: Image.Image, framing: Framing | None = None) -> int:
    """The largest value, from 0 to 255, of a mask (L), or of what a crop shows of it."""
    if framing is not None:
        across, down = mask.width / framing.scaled[0], mask.height / framing.scaled[1]
        left, top, right, bottom = framing.box
        mask = mask.crop(
            (int(left * across), int(top * down), math.ceil(right * across), math.ceil(bottom * down)),
        )
    return max((value for value, count in enumerate(mask.histogram()) if count), default=0)


def crop_image(image: Image.Image, framing: Framing) -> Image.Image:
    """The image scaled (Lanczos) and cropped as the framing says."""
    from PIL import Image

    return _scale_and_crop(image, framing, Image.Resampling.LANCZOS)


def _scale_and_crop(image: Image.Image, framing: Framing, resampling: Image.Resampling) -> Image.Image:
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

    mask = _scale_and_crop(mask, framing, Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.asarray(mask, dtype=np.float32) / 255.0)
    return torch.nn.functional.adaptive_avg_pool2d(pixels[None], size)


def image_tensor(image: Image.Image) -> Tensor:
    """An image as (1, H, W, 3) in 0..1, float32."""
    import numpy as np

    return torch.from_numpy(np.asarray(image, dtype=np.float32) / 255.0)[None]


def frames_tensor(frames: np.ndarray[Any, Any]) -> Tensor:
    """Frames (T, H, W, 3) of 8 bit in 0..1, float32."""
    return torch.from_numpy(frames).to(torch.float32) / 255.0


def stack_sheets(sheets: Sequence[Tensor]) -> Tensor:
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
