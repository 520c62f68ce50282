"""musubi-tuner's JSONL files (kohya-ss/musubi-tuner, docs/dataset_config.md): each line names a picture or a clip, its
caption and its control pictures, wherever they lie.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...storage.bounded_read import MB, read_bounded
from . import clip_files, images
from .captions import WrittenCaption, split_lines
from .control_files import MOST_CONTROLS, Pairs
from .layouts.layout import CaptionReader
from .yaml_values import shorten

_MOST_BYTES = 256 * MB
_MOST_ERRORS = 5
_CONTROL = re.compile(r"control_path(?:_(\d+))?")
_LAYER = re.compile(r"image_path_\d+")
PATH_KEYS = {"image_jsonl_file": "image_path", "video_jsonl_file": "video_path"}  # by the key of dataset_config.toml

FindFile = Callable[[str, str], Path]  # (key, path as it is written) -> the file; raises ValueError


@dataclass(frozen=True)
class ListedPicture:
    """A picture or clip of such a file, with its caption and control pictures."""

    path: str
    caption: str
    controls: tuple[str, ...] = ()


def read_jsonl(file: Path, key: str, find: FindFile) -> tuple[ListedPicture, ...]:
    """What a file lists; `key` is `image_path` or `video_path`. Raises one ValueError for everything that is wrong."""
    try:
        text = read_bounded(file, _MOST_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file.name} is not UTF-8 text; save it as UTF-8") from error
    except ValueError as error:
        raise ValueError(f"{file.name}: {error}") from error
    listed: dict[str, ListedPicture] = {}
    errors: list[str] = []
    for number, line in enumerate(split_lines(text), 1):
        if not line.strip():
            continue
        try:
            picture = _read_line(line, key, find)
            if picture.path in listed:
                raise ValueError(f"{key} is in an earlier line too; write each once, and set num_repeats instead")
            listed[picture.path] = picture
        except (ValueError, FileNotFoundError, RecursionError) as error:
            errors.append(f"line {number}: {error}")
    if errors:
        more = len(errors) - _MOST_ERRORS
        if more > 0:
            errors[_MOST_ERRORS:] = [f"and {more} more lines"]
        raise ValueError(f"{file.name}: " + "; ".join(errors))
    if not listed:
        raise ValueError(f'{file.name} has no lines as {{"{key}": "1.png", "caption": "a cat"}}')
    return tuple(listed.values())


def _read_line(line: str, key: str, find: FindFile) -> ListedPicture:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from error
    if not isinstance(record, dict):
        raise ValueError(f"it is {shorten(record)}, expected an object")
    if any(_LAYER.fullmatch(name) for name in record):
        raise ValueError("image_path_0 and so on are the layers of Qwen-Image-Layered, which Graft does not train")
    path = find(key, _text(record, key))
    _check_kind(path, key)
    controls = [find(name, _text(record, name)) for name in _control_keys(record)]
    if len(controls) > MOST_CONTROLS:
        raise ValueError(f"it has {len(controls)} control pictures, expected at most {MOST_CONTROLS}")
    for control in controls:
        _check_kind(control, "control_path")
    return ListedPicture(str(path), _text(record, "caption").strip(), tuple(map(str, controls)))


def _text(record: dict[str, Any], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{key} is {shorten(value)}, expected a text" if key in record else f"{key} is missing")
    return value


def _control_keys(record: dict[str, Any]) -> list[str]:
    """`control_path`, or `control_path_0` and so on in the order of their numbers."""
    numbered = []
    for name in record:
        match = _CONTROL.fullmatch(name)
        if match is not None:
            numbered.append((int(match[1] or 0), name))
    return [name for _, name in sorted(numbered)]


def _check_kind(path: Path, key: str) -> None:
    """Raise ValueError where a file is nothing that the key may name."""
    is_picture = images.is_image(path.name) and path.is_file()
    if key == "video_path":
        if path.is_dir() and not clip_files.is_frame_folder(path.name):
            raise ValueError(f"the folder {path.name} holds the frames of a clip: name it {path.name}.frames")
        if not (is_picture or path.is_dir() or clip_files.is_video(path.name)):
            raise ValueError(f"{key} {path.name} is not a clip that Graft reads")
    elif not is_picture:
        remedy = ""
        if key == "control_path":
            remedy = "; control clips go through Samples, with the model's own nodes"
        raise ValueError(f"{key} {path.name} is not a picture that Graft reads{remedy}")


def folder_of(listed: Sequence[ListedPicture]) -> Path:
    """The innermost folder that holds all pictures."""
    return Path(os.path.commonpath([Path(picture.path).parent for picture in listed]))


def control_folders_of(listed: Sequence[ListedPicture]) -> tuple[str, ...]:
    """The folders of the control pictures."""
    folders = {str(Path(control).parent) for picture in listed for control in picture.controls}
    return tuple(sorted(folders))


def listed_pairs(listed: Sequence[ListedPicture], with_controls: bool) -> Pairs:
    """The pictures with their control pictures."""
    pairs = Pairs([Path(picture.path) for picture in listed])
    for picture in listed:
        if with_controls and picture.controls:
            pairs.controls[Path(picture.path)] = tuple(map(Path, picture.controls))
    return pairs


class ListedCaptions(CaptionReader):
    """Gives the captions that such a file has, whole."""

    def __init__(self, listed: Sequence[ListedPicture]) -> None:
        self._captions = {picture.path: picture.caption for picture in listed}

    def read(self, image: Path) -> WrittenCaption | None:
        caption = self._captions.get(str(image))
        if not caption:
            return None
        return WrittenCaption(lines=(caption,), found=True)
