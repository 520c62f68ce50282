"""A folder of captioned pictures as pixels: read, checked, scaled and cropped to buckets, split into training and held-out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import buckets, captions
from .dataset import Conditioning, Dataset, Picture

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True)
class FolderSettings:
    """How a folder is read; plain values, checked on creation."""

    resolution: int = 512
    buckets: bool = True
    bucket_step: int = 64
    captions: str = "auto"
    repeats: int = 1
    flip: float = 0.0
    validation: float = 0.1

    def __post_init__(self) -> None:
        wrong = []
        if self.repeats < 1:
            wrong.append(f"repeats is {self.repeats}, expected 1 or more")
        if not 0.0 <= self.flip <= 1.0:
            wrong.append(f"flip is {self.flip}, expected from 0 to 1")
        if not 0.0 <= self.validation < 1.0:
            wrong.append(f"validation is {self.validation}, expected at least 0 and below 1")
        if wrong:
            raise ValueError("GraftDataset: " + "; ".join(wrong) + ".")
        captions.caption_files(Path("x.png"), self.captions)
        buckets.sizes(self.resolution, self.bucket_step)


@dataclass(frozen=True)
class Entry:
    """One picture that can be read: path relative to the folder, content hash, caption, bucket (width, height) and repeats."""

    name: str
    sha256: str
    caption: str
    bucket: tuple[int, int]
    repeats: int
    size: tuple[int, int]
    captioned: bool


@dataclass(frozen=True)
class Listing:
    """What a folder holds: pictures to train on, pictures held out, and what is wrong with the others."""

    folder: Path
    train: tuple[Entry, ...]
    held_out: tuple[Entry, ...]
    problems: tuple[str, ...] = ()
    settings: FolderSettings = field(default_factory=FolderSettings)

    @property
    def digest(self) -> str:
        """Over contents and settings; file names and places do not count."""

        def row(entry: Entry) -> list[Any]:
            return [entry.sha256, entry.caption, entry.bucket, entry.repeats]

        body = {"train": [row(e) for e in self.train], "held out": [row(e) for e in self.held_out], "flip": self.settings.flip}
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def open_picture(path: Path) -> Image.Image:
    """A picture as RGB: turned as its EXIF says, colours converted, transparency over white. Raises OSError or ValueError when damaged."""
    from PIL import Image, ImageOps

    with Image.open(path) as file:
        file.load()
        picture = ImageOps.exif_transpose(file)
    if picture.mode.startswith("I"):  # 16 bit grey: Pillow's own conversion clips instead of scaling
        import numpy as np

        picture = Image.fromarray((np.asarray(picture, dtype=np.float64) / 257).round().clip(0, 255).astype(np.uint8))
    if picture.has_transparency_data if hasattr(picture, "has_transparency_data") else "A" in picture.getbands():
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, (255, 255, 255, 255)), picture)
    return picture.convert("RGB")


def fitted(picture: Image.Image, bucket: tuple[int, int]) -> Image.Image:
    """The picture scaled (Lanczos) and centre-cropped to the bucket's (width, height)."""
    from PIL import Image

    size, box = buckets.cover(*picture.size, bucket)
    scaled = picture if size == picture.size else picture.resize(size, Image.Resampling.LANCZOS)
    return scaled.crop(box)


def read_folder(folder: Path, settings: FolderSettings) -> Listing:
    """List a folder; unreadable pictures are problems, not errors. Raises ValueError when no picture can be read.

    The held-out share is chosen by content hash, so it does not depend on names or order: at least one picture of two, never all.
    """
    choices = buckets.sizes(settings.resolution, settings.bucket_step) if settings.buckets else [(settings.resolution, settings.resolution)]
    if not settings.buckets and settings.resolution % 8:
        raise ValueError(f"GraftDataset: resolution is {settings.resolution}, expected a multiple of 8.")
    paths = captions.find_pictures(folder)
    if not paths:
        raise ValueError(f"GraftDataset: folder {folder.name!r} has no pictures (expected {', '.join(captions.PICTURES)}).")
    entries: list[Entry] = []
    problems: list[str] = []
    for path in paths:
        entry = _entry(path, folder, settings, choices, problems)
        if entry is not None:
            entries.append(entry)
    if not entries:
        listed = "\n  ".join(problems)
        raise ValueError(f"GraftDataset: none of the {len(paths)} pictures in folder {folder.name!r} can be used:\n  {listed}")
    count = min(len(entries) - 1, max(1, round(len(entries) * settings.validation))) if settings.validation else 0
    kept = {id(entry) for entry in sorted(entries, key=lambda e: (hashlib.sha256(e.sha256.encode()).hexdigest(), e.name))[:count]}
    train = tuple(e for e in entries if id(e) not in kept)
    return Listing(folder, train, tuple(e for e in entries if id(e) in kept), tuple(problems), settings)


def _entry(path: Path, folder: Path, settings: FolderSettings, choices: list[tuple[int, int]], problems: list[str]) -> Entry | None:
    name = path.relative_to(folder).as_posix()
    try:
        caption = captions.read_caption(path, settings.captions)
        size = open_picture(path).size
    except (OSError, ValueError, SyntaxError, EOFError) as error:  # what Pillow raises on damaged files
        problems.append(f"{name}: {str(error) or type(error).__name__}")
        return None
    return Entry(
        name,
        hashlib.sha256(path.read_bytes()).hexdigest(),
        caption or "",
        buckets.nearest(*size, choices),
        settings.repeats * captions.repeats_of(path, folder),
        size,
        caption is not None,
    )


def report(listing: Listing, regularisation: Dataset | None = None, share: float = 0.0) -> str:
    """What was read, in a few lines."""
    every = listing.train + listing.held_out
    lines = [f"{len(every)} pictures: {len(listing.train)} to train on, {len(listing.held_out)} held out for validation"]
    repeated = sum(entry.repeats for entry in listing.train)
    if repeated != len(listing.train):
        lines.append(f"{repeated} a round with repeats")
    counts: dict[tuple[int, int], int] = {}
    for entry in every:
        counts[entry.bucket] = counts.get(entry.bucket, 0) + 1
    lines.append("buckets: " + ", ".join(f"{w}x{h} ({count})" for (w, h), count in sorted(counts.items())))
    small = [entry.name for entry in every if entry.size[0] < entry.bucket[0] or entry.size[1] < entry.bucket[1]]
    if small:
        lines.append(f"{len(small)} smaller than their bucket, enlarged: {_some(small)}")
    missing = [entry.name for entry in every if not entry.captioned]
    lines.append(f"captions: {len(every) - len(missing)} found, {len({e.caption for e in every})} different")
    if missing:
        lines.append(f"{len(missing)} without a caption, the empty caption is used: {_some(missing)}")
    if listing.problems:
        lines.append(f"{len(listing.problems)} left out:")
        lines += [f"  {problem}" for problem in listing.problems]
    if regularisation is not None:
        lines.append(f"regularisation: {len(regularisation.pictures)} pictures, {share:.0%} of each batch")
    return "\n".join(lines)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (" …" if len(names) > 5 else "")


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


def pixels_of(picture: Image.Image) -> Tensor:
    """A picture as (1, H, W, 3) in 0..1, float32."""
    import numpy as np

    return torch.from_numpy(np.asarray(picture, dtype=np.float32) / 255.0)[None]


def encode(
    listing: Listing,
    encode_pixels: Callable[[Tensor], Tensor],
    encode_captions: Callable[[Sequence[str]], Mapping[str, Conditioning]],
    encoders: str,
    encoded: Callable[[int], object] = lambda done: None,
    **settings: Any,
) -> tuple[Dataset, Tensor]:
    """The dataset of a listing, and its contact sheet (1, H, W, 3) in 0..1.

    `encode_pixels` turns (1, H, W, 3) into latents (1, C, h, w); `encoders` identifies it and the text encoder; `encoded` hears how many
    pictures are done; `settings` are further fields of Dataset. Captions are encoded once each, and the empty one always.
    """
    every = listing.train + listing.held_out
    shown: list[Image.Image] = []
    made: dict[str, Picture] = {}
    for entry in every:
        picture = fitted(open_picture(listing.folder / entry.name), entry.bucket)
        if len(shown) < 36:
            shown.append(picture)
        pixels = pixels_of(picture)
        flipped = encode_pixels(pixels.flip(2))[0].clone() if listing.settings.flip else None
        made[entry.name] = Picture(entry.name, entry.caption, encode_pixels(pixels)[0].clone(), flipped, entry.repeats)
        encoded(len(made))
    conditionings = encode_captions(sorted({entry.caption for entry in every} | {""}))
    regularisation = settings.get("regularisation")
    plain = {key: value for key, value in settings.items() if key not in ("regularisation", "report", "unhashed")}
    body = [listing.digest, encoders, plain, None if regularisation is None else regularisation.digest]
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    train, held_out = (tuple(made[entry.name] for entry in part) for part in (listing.train, listing.held_out))
    dataset = Dataset(train, dict(conditionings), digest, held_out, listing.settings.flip, **settings)
    return dataset, pixels_of(contact_sheet(shown))
