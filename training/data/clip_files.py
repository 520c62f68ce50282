"""Clips in a folder by their names: video files, and folders of numbered pictures whose names end in `.frames`.

Animated GIF and WebP files are pictures by their names; `clips.is_clip` looks into them.
"""

from __future__ import annotations

import re
from pathlib import Path

from . import images
from .file_names import is_of_system

SUFFIXES = (".mp4", ".m4v", ".mov", ".webm", ".mkv")
OTHER_SUFFIXES = (".avi", ".mpg", ".mpeg", ".ts", ".wmv", ".flv", ".ogv", ".3gp")  # named in the report
FRAMES_ENDING = ".frames"
_DIGITS = re.compile(r"(\d+)")


def is_video(name: str) -> bool:
    """Whether a file of this name is read as a clip, by its ending."""
    return name.lower().endswith(SUFFIXES)


def is_frame_folder(name: str) -> bool:
    """Whether a folder of this name holds the frames of one clip."""
    return name.lower().endswith(FRAMES_ENDING)


def find_clips(folder: Path) -> list[Path]:
    """The video files and frame folders below a folder, in the order of their relative paths."""
    clips = {path.relative_to(folder).as_posix(): path for path in images.find_files(folder, is_video)}
    for path in images.find_images(folder):
        around = _frame_folder_around(path, folder)
        if around is not None:
            clips[around.relative_to(folder).as_posix()] = around
    return [path for name, path in sorted(clips.items()) if _frame_folder_around(path, folder) is None]


def find_pictures_and_clips(folder: Path) -> list[Path]:
    """Every picture and clip below a folder, in the order of their relative paths."""
    found = [path for path in images.find_images(folder) if _frame_folder_around(path, folder) is None]
    by_name = {path.relative_to(folder).as_posix(): path for path in [*found, *find_clips(folder)]}
    return [path for _, path in sorted(by_name.items())]


def _frame_folder_around(path: Path, folder: Path) -> Path | None:
    """The frame folder that a file lies in; None where it lies in none."""
    for parent in path.parents:
        if parent == folder:
            return None
        if is_frame_folder(parent.name):
            return parent
    return None


def frame_files(folder: Path) -> list[Path]:
    """The pictures of a frame folder in the order of the numbers in their names: 2.png before 10.png;
    hidden files are none of them, as macOS's ._2.png.
    """
    pictures = (path for path in folder.iterdir() if images.is_image(path.name) and not is_of_system(path.name))
    return sorted(pictures, key=_sort_key)


def _sort_key(path: Path) -> tuple[list[str | int], str]:
    """A name as a text, a number, a text and so on."""
    parts: list[str | int] = list(_DIGITS.split(path.name))
    parts[1::2] = map(int, parts[1::2])
    return parts, path.name
