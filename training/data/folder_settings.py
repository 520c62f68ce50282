"""How a dataset folder is read: the settings of GraftDataset, and their validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from . import buckets, clip_parts, control_methods
from .control_methods import NODES_SIZE, ControlSize
from .filters import Filters
from .layouts import registry
from .musubi_jsonl import ListedPicture
from .yaml_values import shorten

NO_CLIPS = "0"
MOST_LENGTH = 1_000  # frames of one part of a clip
MOST_RATE = 240.0


@dataclass(frozen=True)
class ConfigSubset:
    """What only a subset of kohya's `dataset_config.toml` says: the caption of images that have none, the ending of the
    caption files, the path of its metadata JSON, and the folders and size of its control pictures; "" or none where it
    does not.
    `listed` are the pictures of musubi-tuner's JSONL file `listed_in`; `resolution` is (width, height) where they
    differ.

    Its images lie directly in the folder, but for listed ones, and the names of folders mean nothing.
    """

    class_tokens: str = ""
    caption_extension: str = ""
    metadata_file: str = ""
    control_folders: tuple[str, ...] = ()
    listed: tuple[ListedPicture, ...] = ()
    listed_in: str = ""
    control_size: ControlSize = NODES_SIZE
    resolution: tuple[int, int] | None = None


@dataclass(frozen=True)
class FolderSettings:
    """How a folder is read; plain values, checked on creation."""

    resolution: int = 512
    buckets: bool = True
    bucket_step: int = 64
    captions: str = registry.AUTO
    repeats: int = 1
    flip: float = 0.0
    validation: float = 0.1
    shuffle_tags: bool = False
    keep_tags: int = 0
    tag_dropout: float = 0.0
    filters: Filters = field(default_factory=Filters)
    no_upscale: bool = False
    min_side: int = 0
    max_side: int = 0
    subset: ConfigSubset | None = None
    control_pictures: str = control_methods.AUTO
    frames: str = NO_CLIPS
    frame_rate: float = 0.0
    clip_part: str = clip_parts.HEAD
    frame_step: int = 1  # of the VAE: it takes multiples of this and one more; 0: pictures only

    def __post_init__(self) -> None:
        errors = [*self._errors(), *self._bucket_errors(), *self._caption_errors(), *self._clip_errors()]
        if errors:
            raise ValueError("Dataset: " + "; ".join(errors) + ".")
        self.bucket_choices()  # raises ValueError where resolution and bucket_step do not fit

    def _errors(self) -> list[str]:
        errors: list[str] = []
        if self.repeats < 1:
            errors.append(f"repeats is {self.repeats}, expected 1 or more")
        if self.keep_tags < 0:
            errors.append(f"keep first tags is {self.keep_tags}, expected 0 or more")
        for label, chance in (("flip probability", self.flip), ("tag dropout", self.tag_dropout)):
            if not 0.0 <= chance <= 1.0:
                errors.append(f"{label} is {chance}, expected from 0 to 1")
        if not 0.0 <= self.validation < 1.0:
            errors.append(f"validation split is {self.validation}, expected at least 0 and below 1")
        methods = control_methods.options()
        if self.control_pictures not in methods:
            errors.append(f"control pictures is {shorten(self.control_pictures)}, expected one of {', '.join(methods)}")
        for width, height in self.resolutions:
            if not self.buckets and (width % 8 or height % 8):
                errors.append(f"resolution is {buckets.name_of((width, height))}, expected a multiple of 8")
        return errors

    def _bucket_errors(self) -> list[str]:
        """Settings of buckets that would do nothing beside others."""
        errors: list[str] = []
        has_sides = bool(self.min_side or self.max_side)
        if self.no_upscale and not self.buckets:
            errors.append("no upscale has no effect without aspect ratio buckets; switch one of them")
        if has_sides and not self.buckets:
            errors.append("minimum and maximum bucket side have no effect without aspect ratio buckets; set them to 0")
        if has_sides and self.no_upscale:
            errors.append(
                "minimum and maximum bucket side have no effect with no upscale, which takes each image's own size; set"
                " them to 0"
            )
        for label, side in (("minimum", self.min_side), ("maximum", self.max_side)):
            if not 0 <= side <= buckets.LONGEST_SIDE:
                errors.append(f"{label} bucket side is {side}, expected from 0 to {buckets.LONGEST_SIDE}")
        if self.max_side and self.min_side > self.max_side:
            errors.append(f"minimum bucket side is {self.min_side}, larger than maximum bucket side ({self.max_side})")
        if self.no_upscale and self.filters.small == "skip":
            errors.append("small: skip of filters has no effect with no upscale, which enlarges no image")
        return errors

    def _caption_errors(self) -> list[str]:
        errors: list[str] = []
        try:
            registry.selected(self.captions)
        except ValueError as error:
            errors.append(str(error))
        if self.shuffle_tags and self.filters.shuffle_tag_p is not None:
            errors.append("shuffle tags shuffles always and shuffle_tag_p of filters now and then; set one of them")
        options = registry.names_where_scores_are_read()
        if self.filters.needs_scores and self.captions not in options:
            errors.append(
                "abs_min_score, min_score and score_tags need scores from JSON files; caption source"
                f" {self.captions} reads none, {' and '.join(options)} do"
            )
        return errors

    def _clip_errors(self) -> list[str]:
        errors: list[str] = []
        try:
            takes_clips = bool(read_frames(self.frames))
        except ValueError as error:
            return [f"frames of clips is {shorten(self.frames)}, expected {error}"]
        if not 0.0 <= self.frame_rate <= MOST_RATE:
            errors.append(f"frame rate is {self.frame_rate}, expected from 0 to {MOST_RATE}")
        if self.clip_part not in clip_parts.WAYS:
            ways = ", ".join(clip_parts.WAYS)
            errors.append(f"part of clips is {shorten(self.clip_part)}, expected one of {ways}")
        for name, way in (("frame_sample", "uniform"), ("frame_stride", "slide")):
            if getattr(self.filters, name) != getattr(Filters, name) and self.clip_part != way:
                errors.append(f"{name} of filters has no effect with part of clips {self.clip_part}; set it to {way}")
        if not takes_clips and (self.frame_rate or self.clip_part != clip_parts.HEAD):
            errors.append(
                "frame rate and part of clips have no effect with frames of clips 0; set it to 17, for example, or"
                f" frame rate to 0 and part of clips to {clip_parts.HEAD}"
            )
        return errors

    @property
    def takes_clips(self) -> bool:
        """Whether clips are read."""
        return bool(read_frames(self.frames))

    @property
    def frame_counts(self) -> list[int]:
        """How many frames the parts of clips have, as the VAE takes them, fewest first."""
        return sorted({clip_parts.rounded(count, max(1, self.frame_step)) for count in read_frames(self.frames)})

    @property
    def own_resolution(self) -> tuple[int, int]:
        """(width, height) of the resolution; `resolution` is a side of the square with its area."""
        if self.subset is not None and self.subset.resolution is not None:
            return self.subset.resolution
        return self.resolution, self.resolution

    @property
    def resolutions(self) -> tuple[tuple[int, int], ...]:
        """(width, height) of every base resolution that images are trained at."""
        squares = ((side, side) for side in self.filters.resolutions)
        return tuple(dict.fromkeys((self.own_resolution, *squares)))

    def bucket_choices(self) -> list[list[tuple[int, int]]]:
        """(width, height) of the buckets of each resolution; its own size without buckets. Raises ValueError where the
        resolution and bucket_step do not fit.
        """
        choices: list[list[tuple[int, int]]] = []
        for resolution in self.resolutions:
            sizes = buckets.bucket_sizes(resolution, self.bucket_step, self.min_side, self.max_side)
            if not self.buckets:
                sizes = [resolution]
            choices.append(sizes)
        return choices


def read_frames(text: str) -> tuple[int, ...]:
    """The numbers in `frames`, none where clips are left out. Raises ValueError that says what was expected."""
    words = [word.strip() for word in text.split(",")]
    if words in ([""], [NO_CLIPS]):
        return ()
    if not all(word.isdecimal() and 1 <= int(word[:9]) <= MOST_LENGTH for word in words):
        raise ValueError(f"numbers from 1 to {MOST_LENGTH:,}, as 17 or 1, 17, 33; 0 leaves clips out")
    return tuple(map(int, words))


@dataclass(frozen=True)
class FolderSource:
    """A folder with settings of its own, one of those that a dataset is made of. `batch_size` 0 is that of the run."""

    folder: Path
    settings: FolderSettings
    caption_dropout: float = 0.0
    batch_size: int = 0
    is_regularisation: bool = False
    is_validation: bool = False


def parse_settings(filters: str, other_errors: Sequence[str], **plain: Any) -> FolderSettings:
    """The settings of a node's inputs. Raises one ValueError for `other_errors`, those of the YAML of `filters`, and
    those of the other inputs.
    """
    errors = list(other_errors)
    parsed = Filters()
    try:
        parsed = Filters.parse(filters)
    except ValueError as error:
        errors.append(str(error))
    settings = None
    try:
        settings = FolderSettings(**plain, filters=parsed)
    except ValueError as error:
        errors.append(str(error).removeprefix("Dataset: ").rstrip("."))
    if errors or settings is None:
        raise ValueError("Dataset: " + "; ".join(errors) + ".")
    return settings


def read_settings(values: Mapping[str, Any]) -> FolderSettings:
    """The settings in a node's inputs as the editor sends them, what is missing at its default; other inputs are left
    alone. Raises ValueError for what is wrong with them.
    """
    plain: dict[str, Any] = {}
    errors: list[str] = []
    for setting in fields(FolderSettings):
        if setting.name in values and setting.name != "filters":
            value = values[setting.name]
            kind = type(setting.default)
            if kind is float and type(value) is int:
                value = float(value)
            if type(value) is not kind:
                errors.append(f"{setting.name} is {shorten(value)}, expected {_KINDS[kind]}")
                continue
            plain[setting.name] = value
    return parse_settings(str(values.get("filters") or ""), errors, **plain)


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
