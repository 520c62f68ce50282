"""kohya's `dataset_config.toml` (sd-scripts, docs/config_README-en.md): several folders with settings of their own. Of
musubi-tuner's it reads datasets with `image_directory` or `video_directory`, and `control_directory`, or with a JSONL
file (`musubi_jsonl`).

What a subset does not say, its dataset says, then `[general]`, then the node's inputs. Unknown keys and what Graft does
not do are refused; what only kohya's own caches need is named in the report.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from ...storage.bounded_read import MB, read_bounded
from ...storage.printable import pip_install
from . import clip_parts
from .buckets import LONGEST_SIDE
from .control_files import MOST_CONTROLS
from .control_methods import ControlSize
from .file_names import FolderNames
from .filters import Filters
from .folder_settings import MOST_LENGTH, NO_CLIPS, ConfigSubset, FolderSettings, FolderSource
from .musubi_jsonl import PATH_KEYS, control_folders_of, folder_of, read_jsonl
from .yaml_values import (
    read_chance,
    read_choice,
    read_flag,
    read_number_from,
    read_text,
    read_whole_number,
    read_whole_numbers,
    shorten,
    unknown_key,
)

NAME = "dataset_config.toml"
_MOST_BYTES = 4 * MB
_EXTENSIONS = (".txt", ".caption")


@dataclass(frozen=True)
class _Key:
    """One key of the file: its reader, and at which tables it may stand."""

    read: Callable[[Any], Any]
    tables: tuple[str, ...]


def _read_resolution(value: Any) -> tuple[int, int]:
    """(width, height): a side of a square, or both in a list."""
    sides = value
    if not isinstance(value, list):
        sides = [value, value]
    if len(sides) != 2:
        raise ValueError("one number, or width and height in a list")
    width, height = (read_whole_number(64, 8192)(side) for side in sides)
    return width, height


def _read_area(value: object) -> int:
    """The same as pixels."""
    return math.prod(_read_resolution(value))


def _read_extension(value: object) -> str:
    if value not in _EXTENSIONS:
        raise ValueError(f"{' or '.join(_EXTENSIONS)}; rename the caption files")
    return str(value)


def _read_comma(value: object) -> str:
    if not isinstance(value, str) or value.strip() != ",":
        raise ValueError("a comma, which separates tags here")
    return value


def _read_folders(value: object) -> tuple[str, ...]:
    """One path, or a list of up to three."""
    paths = value
    if isinstance(value, str):
        paths = [value]
    if not isinstance(paths, list) or not 1 <= len(paths) <= MOST_CONTROLS:
        raise ValueError(f"a folder, or a list of up to {MOST_CONTROLS}")
    return tuple(read_text(path) for path in paths)


def _read_target_frames(value: object) -> str:
    """A list of numbers of frames, as the text of the node's input."""
    numbers = read_whole_numbers(1, MOST_LENGTH)(value)
    if not numbers:
        raise ValueError("a list with at least one number of frames")
    return ", ".join(map(str, numbers))


def _read_only(*neutral: Any) -> Callable[[Any], Any]:
    """A setting that Graft does not do: only the values that switch it off."""
    return _read_without("Graft does not do this; take the key out", *neutral)


def _read_without(reason: str, *neutral: Any) -> Callable[[Any], Any]:
    """The same, with the reason."""

    def read(value: object) -> Any:
        if value not in neutral:
            raise ValueError(f"{shorten(neutral[0]).lower()}, as {reason}")
        return value

    return read


def _read_framepack(value: object) -> Any:
    raise ValueError("nothing: it is for FramePack, which Graft does not train; take the key out")


_LAYERED = (
    "several targets are the layers of Qwen-Image-Layered, which Graft does not train; take the key and the pictures of"
    " layers out"
)
_FRAMEPACK = ("fp_latent_window_size", "fp_1f_clean_indices", "fp_1f_target_index", "fp_1f_no_post")
_EARLIER_NAMES = {  # of musubi-tuner's keys
    "flux_kontext_no_resize_control": "no_resize_control",
    "qwen_image_edit_no_resize_control": "no_resize_control",
    "qwen_image_edit_control_resolution": "control_resolution",
}
_DATASET, _SUBSET = ("general", "datasets"), ("general", "datasets", "subsets")
_KEYS: dict[str, _Key] = {
    "resolution": _Key(_read_resolution, _DATASET),
    "batch_size": _Key(read_whole_number(1, 4096), _DATASET),
    "enable_bucket": _Key(read_flag, _DATASET),
    "min_bucket_reso": _Key(read_whole_number(1, LONGEST_SIDE), _DATASET),
    "max_bucket_reso": _Key(read_whole_number(1, LONGEST_SIDE), _DATASET),
    "bucket_reso_steps": _Key(read_whole_number(8, 512), _DATASET),
    "bucket_no_upscale": _Key(read_flag, _DATASET),
    "validation_split": _Key(read_chance, _DATASET),
    "validation_seed": _Key(read_whole_number(0), _DATASET),
    "skip_image_resolution": _Key(_read_only(0), _DATASET),
    "network_multiplier": _Key(_read_only(1), _DATASET),
    "num_repeats": _Key(read_whole_number(1, 10_000), _SUBSET),
    "shuffle_caption": _Key(read_flag, _SUBSET),
    "keep_tokens": _Key(read_whole_number(0), _SUBSET),
    "keep_tokens_separator": _Key(read_text, _SUBSET),
    "caption_separator": _Key(_read_comma, _SUBSET),
    "secondary_separator": _Key(_read_only(""), _SUBSET),
    "enable_wildcard": _Key(read_flag, _SUBSET),
    "caption_prefix": _Key(read_text, _SUBSET),
    "caption_suffix": _Key(read_text, _SUBSET),
    "caption_extension": _Key(_read_extension, _SUBSET),
    "caption_dropout_rate": _Key(read_chance, _SUBSET),
    "caption_dropout_every_n_epochs": _Key(_read_only(0), _SUBSET),
    "caption_tag_dropout_rate": _Key(read_chance, _SUBSET),
    "token_warmup_min": _Key(_read_only(1), _SUBSET),
    "token_warmup_step": _Key(_read_only(0), _SUBSET),
    "flip_aug": _Key(read_flag, _SUBSET),
    "color_aug": _Key(_read_only(False), _SUBSET),
    "random_crop": _Key(read_flag, _SUBSET),
    "face_crop_aug_range": _Key(_read_only([]), _SUBSET),
    "alpha_mask": _Key(read_flag, _SUBSET),
    "resize_interpolation": _Key(_read_only("lanczos"), _SUBSET),
    "cache_info": _Key(read_flag, _SUBSET),
    "class_tokens": _Key(read_text, _SUBSET),
    "is_reg": _Key(read_flag, ("subsets",)),
    "image_dir": _Key(read_text, ("subsets",)),
    "metadata_file": _Key(read_text, ("subsets",)),
    "control_directory": _Key(_read_folders, ("datasets", "subsets")),  # musubi-tuner's
    "control_path": _Key(_read_folders, ("datasets", "subsets")),  # AI-Toolkit's
    "image_directory": _Key(read_text, ("datasets",)),  # musubi-tuner's dataset of one folder
    "cache_directory": _Key(read_text, _DATASET),
    "video_directory": _Key(read_text, ("datasets",)),
    "image_jsonl_file": _Key(read_text, ("datasets",)),
    "video_jsonl_file": _Key(read_text, ("datasets",)),
    "multiple_target": _Key(_read_without(_LAYERED, False), _DATASET),
    "no_resize_control": _Key(read_flag, _DATASET),
    "control_resolution": _Key(_read_area, _DATASET),
    **dict.fromkeys(_FRAMEPACK, _Key(_read_framepack, _DATASET)),
    "target_frames": _Key(_read_target_frames, _SUBSET),
    "frame_extraction": _Key(read_choice(*clip_parts.WAYS), _SUBSET),
    "frame_sample": _Key(read_whole_number(1, 1_000), _SUBSET),
    "frame_stride": _Key(read_whole_number(1, clip_parts.MOST_FRAMES), _SUBSET),
    "max_frames": _Key(read_whole_number(1, MOST_LENGTH), _SUBSET),
    "source_fps": _Key(read_number_from(0.001), _SUBSET),
}
_WHERE = {
    "general": "[general]",
    "datasets": "[[datasets]]",
    "subsets": "[[datasets.subsets]]",
}


@dataclass
class _Config:
    """What is gathered while a file is read."""

    file: Path
    root: Path  # ComfyUI's input folder
    base: FolderSource
    errors: list[str] = field(default_factory=list)
    names: FolderNames = field(default_factory=FolderNames)
    notes: list[str] = field(default_factory=list)
    sources: list[FolderSource] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Keep a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def read_file(self) -> None:
        """The sources of all datasets."""
        content = load_config(self.file)
        for name in content.keys() - {"general", "datasets"}:
            self.errors.append(unknown_key(str(name)[:80], ["general", "datasets"]))
        general = self._table(content.get("general", {}), "general", "[general]")
        datasets = content.get("datasets")
        if not isinstance(datasets, list) or not datasets:
            self.errors.append("it has no [[datasets]]; write one with a [[datasets.subsets]] for each folder")
            return
        for number, dataset in enumerate(datasets, 1):
            self._read_dataset(dataset, general, f"[[datasets]] {number}")

    def _read_dataset(self, dataset: Any, general: Mapping[str, Any], place: str) -> None:
        if not isinstance(dataset, dict):
            self.errors.append(f"{place} is {shorten(dataset)}, expected a table")
            return
        own = self._table({key: value for key, value in dataset.items() if key != "subsets"}, "datasets", place)
        subsets = dataset.get("subsets")
        named = [key for key in _MUSUBIS_SOURCES if key in own]
        if len(named) + (subsets is not None) > 1:
            both = " and ".join([*named, "[[datasets.subsets]]"][:2])
            self.errors.append(f"{place} has {both}; write one of them")
            return
        if named and named[0] in PATH_KEYS:
            self._read_subset({**general, **own}, place)
            return
        if named:
            subsets = [{"image_dir": own[named[0]]}]
        if not isinstance(subsets, list) or not subsets:
            self.errors.append(f"{place} has no [[datasets.subsets]]; write one for each of its folders")
            return
        known: dict[tuple[Any, Any], int] = {}
        for number, subset in enumerate(subsets, 1):
            values = self._table(subset, "subsets", f"{place} subset {number}")
            same = values.get("image_dir"), values.get("metadata_file")
            if same in known:
                self.note(
                    f"{place} subset {number} has the images of subset {known[same]} and is left out, as in kohya's"
                    " scripts"
                )
                continue
            known[same] = number
            self._read_subset({**general, **own, **values}, f"{place} subset {number}")

    def _table(self, table: object, kind: str, place: str) -> dict[str, Any]:
        """The checked values of a table."""
        if not isinstance(table, dict):
            self.errors.append(f"{place} is {shorten(table)}, expected a table")
            return {}
        values: dict[str, Any] = {}
        for written, value in table.items():
            name = _EARLIER_NAMES.get(written, written)
            if name != written and name in table:
                self.note(f"{place}: {written} does nothing beside {name}, as in musubi-tuner")
            elif name not in _KEYS:
                self.errors.append(f"{place}: {unknown_key(str(name)[:80], _KEYS)}")
            elif kind not in _KEYS[name].tables:
                allowed = " or ".join(_WHERE[table] for table in _KEYS[name].tables)
                self.errors.append(f"{place}: {name} belongs to {allowed}")
            else:
                try:
                    values[name] = _KEYS[name].read(value)
                except ValueError as error:
                    self.errors.append(f"{place}: {name} is {shorten(value)}, expected {error}")
        return values

    def _read_subset(self, values: Mapping[str, Any], place: str) -> None:
        listing = next((key for key in PATH_KEYS if key in values), None)
        if listing is None and "image_dir" not in values:
            self.errors.append(f"{place}: image_dir is missing; name the folder of its images")
            return
        try:
            if listing is None:
                folder, subset = self._subset(values)
            else:
                folder, subset = self._listed_subset(listing, values)
            settings = self._settings(values, subset, place)
        except (ValueError, FileNotFoundError) as error:
            self.errors.append(f"{place}: {_with_keys(str(error))}")
            return
        is_regularization = values.get("is_reg", False)
        if is_regularization:
            settings = replace(settings, batch_size=0, validation=0.0)
            self.note("is_reg: regularization share of the node says how many of each batch these images are")
        self.sources.append(FolderSource(folder, settings, is_regularization))

    def _subset(self, values: Mapping[str, Any]) -> tuple[Path, ConfigSubset]:
        """(the folder of the images, what only the file says of them)."""
        folder = self._below_input("image_dir", values["image_dir"])
        metadata_file = ""
        if "metadata_file" in values:
            metadata_file = str(self._below_input("metadata_file", values["metadata_file"], "file"))
        controls = self._control_folders(values)
        words, extension = values.get("class_tokens", ""), values.get("caption_extension", "")
        return folder, ConfigSubset(words, extension, metadata_file, controls, control_size=_control_size(values))

    def _listed_subset(self, key: str, values: Mapping[str, Any]) -> tuple[Path, ConfigSubset]:
        """The same of the pictures or clips that a JSONL file lists."""
        for other in ("control_directory", "control_path"):
            if other in values:
                raise ValueError(f"{other} does nothing beside {key}; name control pictures in its lines")
        file = self._below_input(key, values[key], "file")
        listed = read_jsonl(file, PATH_KEYS[key], lambda name, path: self._below_input(name, path, _LISTED))
        words = values.get("class_tokens", "")
        controls, size = control_folders_of(listed), _control_size(values)
        return folder_of(listed), ConfigSubset(words, "", "", controls, listed, str(file), size)

    def _below_input(self, name: str, value: str, kind: str = "folder") -> Path:
        """The folder or file of a path: beside the file, or in ComfyUI's input folder, and never outside that."""
        place = value.replace("\\", "/").strip()
        if ":" in place or "\0" in place or not place:
            raise ValueError(f"{name} {value!r} is outside ComfyUI's input folder: {_REMEDY}")
        for start in (self.file.parent, self.root):
            named = start / PurePosixPath(place)
            if not os.path.lexists(named):
                named = self.names.first([named]) or named
            path = Path(os.path.realpath(named))  # `Path.resolve` fails at a link to itself
            if not path.is_relative_to(self.root):
                raise ValueError(f"{name} {value!r} is outside ComfyUI's input folder: {_REMEDY}")
            if os.path.exists(path):
                break
        if not _EXISTS[kind](path):
            raise FileNotFoundError(f"there is no {kind} {shorten(value)} ({name}); {_REMEDY}")
        linked = Path(os.path.realpath(named.parent)) / named.name
        if kind == _LISTED and named.suffix and not path.suffix and linked.is_relative_to(self.root):
            return linked  # what it leads to has no ending, as the files of download caches
        return path

    def _control_folders(self, values: Mapping[str, Any]) -> tuple[str, ...]:
        names = [name for name in ("control_directory", "control_path") if name in values]
        if len(names) == 2:
            raise ValueError("control_directory and control_path mean the same; write one of them")
        if not names:
            return ()
        return tuple(str(self._below_input(names[0], folder)) for folder in values[names[0]])

    def _settings(self, values: Mapping[str, Any], subset: ConfigSubset, place: str) -> FolderSettings:
        base = self.base.settings
        settings = {name: values[key] for key, name in _SETTINGS.items() if key in values}
        if "resolution" in values:
            settings["resolution"] = math.isqrt(math.prod(values["resolution"]))
            if len(set(values["resolution"])) == 2:
                subset = replace(subset, resolution=values["resolution"])
        if "flip_aug" in values:
            settings["flip"] = 0.5 * values["flip_aug"]
        self._keep_what_has_an_effect(settings, place)
        settings.update(self._clip_settings(values, place))
        if "validation_seed" in values:
            self.note("validation_seed does nothing: which images are held out depends on their contents")
        for name in ("cache_info", "cache_directory"):
            if values.get(name):
                self.note(f"{name} does nothing: Graft has a cache of its own")
        if values.get("random_crop"):
            self.note("random_crop: each image has crops of its own to draw from, 4 unless crops of filters says more")
        way = settings.get("clip_part", base.clip_part)
        return replace(base, **settings, subset=subset, filters=self._filters(values, way))

    def _keep_what_has_an_effect(self, settings: dict[str, Any], place: str) -> None:
        """Take out what kohya's scripts pass over in silence, and note it."""

        def value(name: str) -> Any:
            return settings.get(name, getattr(self.base.settings, name))

        sides = bool(value("min_side") or value("max_side"))
        if not value("buckets") and (sides or value("no_upscale")):
            settings.update(min_side=0, max_side=0, no_upscale=False)
            self.note(f"{place}: enable_bucket is false, so its other bucket settings do nothing")
        elif value("no_upscale") and sides:
            settings.update(min_side=0, max_side=0)
            self.note(f"{place}: with bucket_no_upscale, min_bucket_reso and max_bucket_reso do nothing")
        moves = value("shuffle_tags") or value("tag_dropout") or self.base.settings.filters.shuffle_tag_p
        if value("keep_tags") and not moves:
            settings["keep_tags"] = 0
            self.note(f"{place}: keep_tokens does nothing where no tags are shuffled or dropped")

    def _clip_settings(self, values: Mapping[str, Any], place: str) -> dict[str, Any]:
        """What of clips is trained, in musubi-tuner's keys and with its defaults."""
        base = self.base.settings
        way = values.get("frame_extraction", base.clip_part)
        frames = values.get("target_frames", base.frames)
        of_clips = "video_directory" in values or "video_jsonl_file" in values
        if of_clips and frames == NO_CLIPS:
            frames = "1"
            if way != "full":
                self.note(f"{place}: without target_frames each clip gives 1 frame, as in musubi-tuner")
        if of_clips and way == "full":
            frames = str(values.get("max_frames", _MOST_FRAMES_OF_FULL))
        if "source_fps" in values:
            self.note(
                "source_fps does nothing: when frames are shown is read from the clips; frame rate of the node says how"
                " many a second are trained"
            )
        if frames == NO_CLIPS:
            if any(key in values for key in _KEYS_OF_CLIPS):
                self.note(f"{place}: without target_frames and with frames of clips 0, clips are left out")
            return {}
        for key, needed in _KEYS_OF_CLIPS.items():
            if key in values and needed not in ("", way):
                self.note(f"{place}: {key} does nothing with frame_extraction {way}")
        return {"frames": frames, "clip_part": way}

    def _filters(self, values: Mapping[str, Any], way: str) -> Any:
        changed = {name: values[key] for key, name in _FILTERS.items() if key in values}
        for key in ("frame_sample", "frame_stride"):
            if _KEYS_OF_CLIPS[key] != way:
                changed[key] = getattr(Filters, key)
            elif key in values or "video_directory" in values or "video_jsonl_file" in values:
                changed[key] = values.get(key, _MUSUBIS[key])
        if values.get("random_crop"):
            changed["crop"] = "random"
        if values.get("alpha_mask"):
            changed["masks"] = "alpha"
        return replace(self.base.settings.filters, **changed)


def _control_size(values: Mapping[str, Any]) -> ControlSize:
    return ControlSize(values.get("control_resolution", 0), values.get("no_resize_control", False))


_MUSUBIS_SOURCES = ("image_directory", "video_directory", *PATH_KEYS)
_LISTED = "picture or clip"
_EXISTS = {"folder": os.path.isdir, "file": os.path.isfile, _LISTED: os.path.exists}
_REMEDY = "copy or link it there, and give its path beside the file or below the input folder"
_SETTINGS = {
    "enable_bucket": "buckets",
    "bucket_reso_steps": "bucket_step",
    "min_bucket_reso": "min_side",
    "max_bucket_reso": "max_side",
    "bucket_no_upscale": "no_upscale",
    "validation_split": "validation",
    "num_repeats": "repeats",
    "shuffle_caption": "shuffle_tags",
    "keep_tokens": "keep_tags",
    "caption_tag_dropout_rate": "tag_dropout",
    "caption_dropout_rate": "caption_dropout",
    "batch_size": "batch_size",
}
_FILTERS = {
    "enable_wildcard": "wildcards",
    "keep_tokens_separator": "keep_separator",
    "caption_prefix": "caption_prefix",
    "caption_suffix": "caption_suffix",
}


# musubi-tuner's keys for clips, with the frame_extraction at which alone they count, and its defaults.
_KEYS_OF_CLIPS = {"frame_extraction": "", "frame_sample": "uniform", "frame_stride": "slide", "max_frames": "full"}
_MUSUBIS = {"frame_sample": 1, "frame_stride": 1}
_MOST_FRAMES_OF_FULL = 129


_LABELS = {
    "minimum bucket side": "min_bucket_reso",
    "maximum bucket side": "max_bucket_reso",
    "bucket step": "bucket_reso_steps",
    "validation split": "validation_split",
}


def _with_keys(message: str) -> str:
    """An error about the node's settings, with the file's keys in place of the node's labels."""
    for label, key in _LABELS.items():
        message = message.replace(label, key)
    return message.removeprefix("Dataset: ").rstrip(".")


def load_config(file: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises ValueError with line and column where it is none."""
    try:
        toml = importlib.import_module("tomllib")  # Python 3.11
    except ModuleNotFoundError:
        try:
            toml = importlib.import_module("tomli")
        except ModuleNotFoundError as error:
            raise ValueError(
                f"Dataset: {file.name}: reading it needs Python 3.11, or: {pip_install('tomli')}"
            ) from error
    try:
        content: dict[str, Any] = toml.loads(read_bounded(file, _MOST_BYTES).decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"Dataset: {file.name} is not UTF-8 text; save it as UTF-8.") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"Dataset: {file.name} is not TOML: {error}. Paths with \\ stand in single quotes, as 'sets\\cat'."
        ) from error
    return content


def read_config(file: Path, root: Path, base: FolderSource) -> tuple[list[FolderSource], list[str]]:
    """Read kohya's or musubi-tuner's dataset_config.toml.

    Args:
        file: the file.
        root: ComfyUI's input folder, which no path leaves.
        base: the node's inputs, which hold where the file says nothing.

    Returns:
        (the folders of the file with their settings, notes for the report).

    Raises:
        ValueError: one for everything that is wrong.
    """
    config = _Config(file.resolve(), root.resolve(), base)
    config.read_file()
    if not config.errors and all(source.is_regularization for source in config.sources):
        config.errors.append("every subset has is_reg; one needs images to train on")
    if config.errors:
        raise ValueError(f"Dataset: {file.name}: " + "; ".join(config.errors) + ".")
    return config.sources, config.notes


def paths_in(file: Path, root: Path) -> list[Path]:
    """The folders and metadata JSONs below `root` that a file names, for noticing changes; none of a file with errors,
    which end the run anyway.
    """
    config = _Config(file.resolve(), root.resolve(), FolderSource(root, FolderSettings()))
    try:
        config.read_file()
    except (ValueError, OSError):
        return []
    paths: list[Path] = []
    for source in config.sources:
        paths.append(source.folder)
        subset = source.settings.subset
        if subset is not None:
            files = [file for file in (subset.metadata_file, subset.listed_in) if file]
            paths += map(Path, [*files, *subset.control_folders])
    return paths
