"""The record of a dataset layout: everything that Graft knows about one way to store captions beside images."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from .. import images
from ..captions import WrittenCaption
from ..filters import Filters

# `10_cat` and `10_1girl`, but no date as `2024_05_holiday`.
_REPEATS = re.compile(r"(\d+)_(?!\d+(?:[\W_]|$))")


def kohya_repeats(image: Path, folder: Path) -> int:
    """kohya's repeat count: the number in front of the innermost folder named `N_name`, 1 without one. The dataset's
    folder counts too, but 0 leaves images out only below it. It is none where another number follows, as in a date.
    """
    found = _class_folder(image.parent, folder)
    if found is None:
        return 1
    class_folder, match = found
    repeats = int(match[1])
    if class_folder == folder:
        return max(1, repeats)
    return repeats


def kohya_class_words(image: Path, folder: Path) -> str:
    """The words of that folder's name, `sks dog` of `10_sks dog`: kohya's caption of images that no file describes.
    "" without such a folder.
    """
    found = _class_folder(image.parent, folder)
    if found is None:
        return ""
    _, match = found
    return match.string[match.end() :].strip()


@lru_cache(maxsize=256)
def _class_folder(innermost: Path, folder: Path) -> tuple[Path, re.Match[str]] | None:
    """The innermost folder that is named `N_name`, and its name matched up to where `name` begins."""
    for parent in (innermost, *innermost.parents):
        match = _REPEATS.match(parent.name)
        if match:
            return parent, match
        if parent == folder:
            break
    return None


def looks_like_repeats(name: str) -> bool:
    """Whether a folder's name begins with a number and an underscore, and is not read as repeats."""
    return re.match(r"\d+_", name) is not None and _REPEATS.match(name) is None


def no_text_files(image: Path, folder: Path) -> list[Path]:
    """Of a layout whose captions are not plain text files."""
    return []


class CaptionReader:
    """Reads the captions of one layout below a folder. A layout's own reader overrides what it does differently.

    `problems` go to the report, as "file: what is wrong". `listed_images` are the images that the layout's index files
    list, None for a layout without index files. `passed_over` are those of them that `consider_every_nth` leaves out,
    None for a layout that leaves this to the order of the images.
    """

    problems: tuple[str, ...] = ()
    listed_images: frozenset[Path] | None = None
    passed_over: frozenset[Path] | None = None

    def read(self, image: Path) -> WrittenCaption | None:
        """The caption of an image, None if this layout has none for it. Raises ValueError if it cannot be used."""
        return None

    def fallback(self, image: Path) -> WrittenCaption | None:
        """The caption of an image that no file describes, if this layout was chosen; None leaves it empty."""
        return None


class ImageSettingsReader(Protocol):
    """Reads a layout's settings files, which hold for images of every layout."""

    problems: list[str]

    def apply(self, image: Path, caption: WrittenCaption | None, own_file: bool) -> WrittenCaption:
        """The caption with the settings on top; `own_file` reads the image's own settings file too."""


@dataclass(frozen=True)
class DatasetLayout:
    """One way to store captions beside images: how it is recognized and read, and what is said about it.

    `open` gets the dataset's folder, the filters, and whether the user chose this layout (false for `auto`, which asks
    the layouts in the order of the registry).
    """

    name: str  # the option of GraftDataset's input `captions`
    title: str  # for people, in notes and errors
    hint: str  # its part of the option's tooltip
    documentation: str  # its line in the node's help page
    suffixes: tuple[str, ...]  # of the files that it reads: a change of one is noticed while training
    recognize: Callable[[Path], bool]  # whether a folder has captions in this layout
    open: Callable[[Path, Filters, bool], CaptionReader]
    has_scores: bool = False  # whether it gives scores, for min_score and the like
    unlisted_reason: str = ""  # why images that no index file lists are left out, if they are: "that no … describes"
    fallback_note: str = ""  # the report's words after the number of captions that came from `fallback`
    text_files: Callable[[Path, Path], list[Path]] = no_text_files  # with captions, best place first
    repeats: Callable[[Path, Path], int] = kohya_repeats  # (image, dataset folder) -> how often; 0 leaves it out
    mask_file: Callable[[Path, Path], Path | None] = images.mask_file  # (image, dataset folder) -> its loss mask
    settings_files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # {file name or pattern: its keys}
    open_settings: Callable[[Path, Filters], ImageSettingsReader] | None = None  # reads the settings files
