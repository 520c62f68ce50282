"""EveryDream2's layout: `name.yaml` of an image, `local.yaml` of a folder, `global.yaml` of all below, `multiply.txt`
and so on.

The keys, and how they override each other, are those of its `data/dataset.py` and SHUFFLING_TAGS.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ....storage.file_list import files_below
from .. import images
from ..captions import WrittenCaption, read_lines, read_text
from ..file_names import FolderNames
from ..filters import Filters
from ..tags import split_template
from ..yaml_values import (
    load_mapping,
    read_chance,
    read_flag,
    read_number,
    read_whole_number,
    shorten,
    unknown_key,
)
from . import kohya_txt
from .layout import CaptionReader, DatasetLayout

_SUFFIXES = (".yaml", ".yml")
_UNUSED_KEYS = ("rating", "image")

Tags = tuple[tuple[str, float], ...]  # each with its weight


@dataclass(frozen=True)
class ImageSettings:
    """The settings in one file; None or empty where it has none. `has_caption` is whether it holds a caption, `is_yaml`
    whether it is a YAML file, which no other trainer writes.
    """

    prompt: str = ""
    tags: Tags = ()
    has_caption: bool = False
    multiply: float | None = None
    cond_dropout: float | None = None
    flip_p: float | None = None
    shuffle_tags: bool | None = None
    batch_id: str | None = None
    loss_scale: float | None = None
    max_caption_length: int | None = None
    notes: tuple[str, ...] = ()
    is_yaml: bool = False

    def override(self, upper: ImageSettings) -> ImageSettings:
        """These settings with `upper` on top: its values win, its tags come first."""
        if upper == ImageSettings() and not (self.tags or self.notes):
            return self
        values: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(upper, field.name)
            if value is None or value == "":
                value = getattr(self, field.name)
            values[field.name] = value
        values["tags"] = tuple({**dict(upper.tags), **dict(self.tags), **dict(upper.tags)}.items())
        values["is_yaml"] = self.is_yaml or upper.is_yaml
        values["has_caption"] = self.has_caption or upper.has_caption
        values["notes"] = tuple(dict.fromkeys(self.notes + upper.notes))
        return ImageSettings(**values)


def _settings_of_tags(parts: Sequence[str]) -> ImageSettings:
    """Settings of a caption's tags: the first one is the main prompt."""
    prompt, *tags = parts or [""]
    return ImageSettings(prompt=prompt, tags=tuple((tag, 1.0) for tag in tags), has_caption=True)


class SettingsFiles:
    """Reads the settings files of the folders below one, each once; `problems` go to the report. With `wildcards` one
    of a caption's lines is drawn.
    """

    def __init__(self, folder: Path, encoding: str = "utf-8", wildcards: bool = False) -> None:
        self.folder, self.encoding, self.wildcards = folder, encoding, wildcards
        self.problems: list[str] = []
        self._names = FolderNames()
        self._folders: dict[Path, tuple[ImageSettings, ImageSettings]] = {}

    def apply(self, image: Path, caption: WrittenCaption | None, own_file: bool) -> WrittenCaption:
        """The caption with the settings of its folders and (with `own_file`) of the image's own YAML on top.

        Raises ValueError when its own YAML cannot be used.
        """
        for_all_below, for_this_folder = self._of_folder(image.parent)
        of_folder = for_all_below.override(for_this_folder)
        of_image = ImageSettings()
        if own_file:
            of_image = self._of_image(image)
        if caption is not None and of_folder == of_image == ImageSettings():
            return caption
        if caption is None:
            return _write_caption(of_folder.override(of_image), of_image.has_caption or bool(of_folder.prompt))
        of_folder = of_folder.override(_own_settings(caption))
        has_caption = caption.found or of_image.has_caption
        if not (of_image.has_caption or of_folder.prompt or of_folder.tags):
            settings = of_folder.override(of_image)
            if caption.lines and (settings.shuffle_tags or settings.is_yaml):
                # EveryDream2 shuffles what stands behind the first comma, and its keep_tags counts from there.
                caption = replace(caption, prompt_tags=max(1, caption.prompt_tags))
            return _apply_to_caption(caption, settings, has_caption)
        if caption.found and self.wildcards and len(caption.lines) > 1:
            return _apply_to_lines(caption, of_folder, of_image)
        if caption.found:
            of_image = _settings_of_caption(caption).override(of_image)
        merged = _write_caption(of_folder.override(of_image), has_caption or bool(of_folder.prompt))
        return replace(merged, score=caption.score)

    def _of_image(self, image: Path) -> ImageSettings:
        path = self._names.find_beside(image, _SUFFIXES)
        if path is None:
            return ImageSettings()
        return _read_yaml(path, self.encoding)

    def _of_folder(self, folder: Path) -> tuple[ImageSettings, ImageSettings]:
        """(settings for the folder and everything below it, settings for this folder only)."""
        if folder not in self._folders:
            for_all_below, for_this_folder = ImageSettings(), ImageSettings()
            if folder != self.folder:
                for_all_below = self._of_folder(folder.parent)[0]
            for suffix in _SUFFIXES:
                for_all_below = for_all_below.override(self._folder_yaml(folder / f"global{suffix}"))
            for suffix in _SUFFIXES:
                for_this_folder = for_this_folder.override(self._folder_yaml(folder / f"local{suffix}"))
            for key in _TEXT_FILES:
                for_this_folder = for_this_folder.override(self._folder_text(folder / f"{key}.txt", key))
            self._folders[folder] = (for_all_below, for_this_folder)
        return self._folders[folder]

    def _folder_yaml(self, path: Path) -> ImageSettings:
        found = self._names.first([path])
        if found is None:
            return ImageSettings()
        path = found
        try:
            return replace(_read_yaml(path, self.encoding), has_caption=False)
        except ValueError as error:
            parent = ""  # the error begins with the file's name, so only its folder is missing
            if path.parent != self.folder:
                parent = path.parent.relative_to(self.folder).as_posix() + "/"
            self.problems.append(f"{parent}{error}; not used")
            return ImageSettings()

    def _folder_text(self, path: Path, key: str) -> ImageSettings:
        found = self._names.first([path])
        if found is None:
            return ImageSettings()
        path = found
        try:
            return ImageSettings(**{key: _TEXT_FILES[key](" ".join(read_lines(path, self.encoding)))})
        except ValueError as error:
            self.problems.append(f"{path.relative_to(self.folder).as_posix()}: {error}; not used")
            return ImageSettings()


def _own_settings(caption: WrittenCaption) -> ImageSettings:
    """The settings, without the caption, that another layout's file gave for an image."""
    return ImageSettings(
        multiply=caption.multiply,
        cond_dropout=caption.dropout,
        flip_p=caption.flip,
        shuffle_tags=caption.shuffle,
        batch_id=caption.batch_id or None,
        loss_scale=caption.loss_scale,
        max_caption_length=caption.max_length or None,
        notes=caption.notes,
    )


def _settings_of_caption(caption: WrittenCaption) -> ImageSettings:
    return _settings_of_tags(caption.tags or split_template(" ".join(caption.lines)))


def _apply_to_lines(caption: WrittenCaption, of_folder: ImageSettings, of_image: ImageSettings) -> WrittenCaption:
    """A caption whose lines have each the settings' prompt and tags; weights only order the tags of a line."""
    written: list[WrittenCaption] = []
    for line in caption.lines:
        of_line = _settings_of_caption(replace(caption, lines=(line,))).override(of_image)
        written.append(_write_caption(of_folder.override(of_line), True))
    lines = tuple(", ".join(one.tags) for one in written)
    # A prompt of a YAML file is the same for each line, and may have commas itself.
    prompt_tags = len(split_template(written[0].tags[0])) if written[0].prompt_tags else 0
    return replace(written[0], lines=lines, tags=(), weights=(), prompt_tags=prompt_tags, score=caption.score)


def _write_caption(settings: ImageSettings, found: bool) -> WrittenCaption:
    """A caption of the settings' own prompt and tags."""
    # EveryDream2 puts tags of a greater weight first where they are not shuffled.
    tags = sorted(settings.tags, key=lambda tag: -tag[1])
    texts, weights = [], []
    if settings.prompt:
        texts.append(settings.prompt)
        weights.append(1.0)
    prompt_tags = len(texts)
    for text, weight in tags:
        texts.append(text)
        weights.append(weight)
    if len({weight for _, weight in tags}) < 2:
        weights = []
    caption = WrittenCaption(tags=tuple(texts), weights=tuple(weights), prompt_tags=prompt_tags)
    return _apply_to_caption(caption, settings, found)


def _apply_to_caption(caption: WrittenCaption, settings: ImageSettings, found: bool) -> WrittenCaption:
    return replace(
        caption,
        found=found,
        multiply=settings.multiply,
        flip=settings.flip_p,
        dropout=settings.cond_dropout,
        shuffle=settings.shuffle_tags,
        batch_id=settings.batch_id or "",
        loss_scale=settings.loss_scale,
        max_length=settings.max_caption_length or 0,
        notes=settings.notes,
    )


def _read_yaml(path: Path, encoding: str) -> ImageSettings:
    """One YAML file; raises ValueError that lists every error in it."""
    try:
        text = read_text(path, encoding)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name} is not {encoding} text ({error.reason} at byte {error.start})") from error
    errors: list[str] = []
    notes: list[str] = []
    values: dict[str, Any] = {}
    for key, value in load_mapping(text, path.name).items():
        if key in _UNUSED_KEYS:
            notes.append(f"{key} in {path.name} is not used")
            continue
        try:
            values |= _read_key(key, value)
        except ValueError as error:
            errors.append(str(error))
    if errors:
        raise ValueError(f"{path.name}: " + "; ".join(errors))
    return ImageSettings(**values, notes=tuple(notes), is_yaml=True)


def _read_key(key: Any, value: Any) -> dict[str, Any]:
    """The fields of `ImageSettings` that one key of a YAML file sets."""
    if key == "caption":
        if not isinstance(value, str | int | float):
            raise ValueError(f"caption is {shorten(value)}, expected one text")
        settings = _settings_of_tags(split_template(str(value)))
        return {"prompt": settings.prompt, "tags": settings.tags, "has_caption": True}
    if key not in _KEYS:
        raise ValueError(unknown_key(str(key)[:80], {*_KEYS, "caption"}))
    field, reader = _KEYS[key]
    try:
        values = {field: reader(value)}
    except ValueError as error:
        raise ValueError(f"{key} is {shorten(value)}, expected {error}") from None
    if field in ("prompt", "tags"):
        values["has_caption"] = True
    return values


def _read_text_value(value: Any) -> str:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, str | int | float):
        raise ValueError("one text")
    return " ".join(str(value).split())


def _read_tags(value: Any) -> Tags:
    if not isinstance(value, list):
        value = [None]
    tags = (_read_tag(entry) for entry in value)
    return tuple((text, weight) for text, weight in tags if text)


def _read_tag(entry: Any) -> tuple[str, float]:
    """A tag as a text, or as a mapping of tag and weight."""
    if not isinstance(entry, dict):
        entry = {"tag": entry}
    if not isinstance(entry.get("tag"), str | int | float) or not entry.keys() <= {"tag", "weight"}:
        raise ValueError("a list of tags, each a text or tag: and weight:")
    weight = 1.0
    if entry.get("weight") is not None:
        weight = read_number(entry["weight"], 0.0)
    return " ".join(str(entry["tag"]).split()), weight


def _read_positive(value: Any) -> float:
    return read_number(value, 0.0)


_KEYS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {  # key of a YAML file: (field of ImageSettings, its reader)
    "main_prompt": ("prompt", _read_text_value),
    "tags": ("tags", _read_tags),
    "multiply": ("multiply", _read_positive),
    "cond_dropout": ("cond_dropout", read_chance),
    "flip_p": ("flip_p", read_chance),
    "shuffle_tags": ("shuffle_tags", read_flag),
    "batch_id": ("batch_id", _read_text_value),
    "loss_scale": ("loss_scale", _read_positive),
    "max_caption_length": ("max_caption_length", read_whole_number(1)),
}


def _read_text_number(most: float = float("inf")) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            return read_number(float(text), 0.0, most)
        except ValueError:
            bounds = "from 0"
            if most < float("inf"):
                bounds = f"from 0 to {most:g}"
            raise ValueError(f"is {text!r}, expected a number {bounds}") from None

    return read


_TEXT_FILES: Mapping[str, Callable[[str], Any]] = {  # name of a text file, and field of ImageSettings: its reader
    "multiply": _read_text_number(),
    "cond_dropout": _read_text_number(1.0),
    "flip_p": _read_text_number(1.0),
    "loss_scale": _read_text_number(),
    "batch_id": str,
    "shuffle_tags": lambda text: True,  # the file may be empty
}


class YamlCaptions(kohya_txt.TextFiles):
    """Text files beside the images, on which `SettingsFiles` lays the YAML files; else the images' file names. What
    stands in front of the first comma is the main prompt.
    """

    def read(self, image: Path) -> WrittenCaption | None:
        caption = super().read(image)
        if caption is None:
            return None
        return replace(caption, prompt_tags=1)

    def fallback(self, image: Path) -> WrittenCaption:
        return WrittenCaption(lines=(image.stem.split("_")[0],), found=True, prompt_tags=1)


def _recognize(folder: Path) -> bool:
    names = FolderNames()
    for path, _ in files_below(folder):
        if path.suffix.lower() not in _SUFFIXES:
            continue
        if path.stem.lower() in ("local", "global") or names.find_beside(path, images.SUFFIXES):
            return True
    return False


def _open(folder: Path, filters: Filters, chosen: bool) -> CaptionReader:
    if chosen:
        return YamlCaptions(filters.encoding)
    return CaptionReader()  # with auto the text files are kohya's layout, and no file names are taken


def _open_settings(folder: Path, filters: Filters) -> SettingsFiles:
    return SettingsFiles(folder, filters.encoding, filters.wildcards)


_YAML_KEYS = ("caption", *_KEYS)
LAYOUT = DatasetLayout(
    name="yaml",
    title="YAML files (EveryDream2)",
    hint="EveryDream2's",
    documentation=(
        "EveryDream2's `name.yaml` with `main_prompt`, `tags` (each a text, or `tag` and `weight`) and"
        " `max_caption_length` in characters. If there is none, the caption is in `name.txt`; if that is"
        " missing too, it is the file's name up to the first underscore."
    ),
    suffixes=(*_SUFFIXES, *kohya_txt.SUFFIXES),
    recognize=_recognize,
    open=_open,
    fallback_note="captions are file names up to the first underscore, as EveryDream2 takes them",
    settings_files={
        "name.yaml": _YAML_KEYS,
        "local.yaml": _YAML_KEYS,
        "global.yaml": _YAML_KEYS,
        **{f"{key}.txt": (key,) for key in _TEXT_FILES},
    },
    open_settings=_open_settings,
)
