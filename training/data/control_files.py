"""Finds the control pictures of a folder: those that belong to a training image, as the picture before an edit.

`name.control.png` beside `name.png`, or a file of its name in a folder `control` inside its folder or beside it; a
second and a third one have a 2 and a 3 behind `control`. musubi-tuner's `name_0.png`, `name_1.png` in such a folder
count too, and OneTrainer's `name-condlabel.png`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .file_names import compose

MOST_CONTROLS = 3  # of one image
_ENDING = re.compile(r"(.+)(?:\.control|-condlabel)[_-]?([1-9]?)", re.IGNORECASE)
_FOLDER = re.compile(r"control[_-]?([1-9]?)", re.IGNORECASE)
_NUMBERED = re.compile(r"(.+)_(\d)")


@dataclass
class Pairs:
    """The images of a folder, the control pictures of those that have some, in order, the control pictures that no
    image uses, the worse pictures of preference pairs (`preference_files`), and OneTrainer's conditioning pictures that
    are left out.
    """

    images: list[Path]
    controls: dict[Path, tuple[Path, ...]] = field(default_factory=dict)
    unused: list[Path] = field(default_factory=list)
    worse: dict[Path, Path] = field(default_factory=dict)
    conditions: list[Path] = field(default_factory=list)


@dataclass(frozen=True)
class _Candidate:
    """A picture that is named as a control picture: it is the `number`th (from 1) of each of `owners`, and counts
    together with the others of its `group`.
    """

    path: Path
    number: int
    owners: tuple[Path, ...]
    group: tuple[Path, str]


def find_pairs(paths: Sequence[Path], folder: Path) -> Pairs:
    """Tell the images below a folder from their control pictures.

    Pictures in a folder named `control` are images as any others as long as none of them has the name of an image.

    Args:
        paths: all pictures below the folder.
        folder: the dataset's.
    """
    named = {path for path in paths if _looks_like_control(path, folder)}
    if not named:
        return Pairs(list(paths))
    places = _Places(path for path in paths if path not in named)
    candidates = [_candidate(path, places) for path in sorted(named)]
    paired_groups = {candidate.group for candidate in candidates if candidate.owners}
    pairs = Pairs([])
    taken: dict[Path, dict[int, Path]] = {}
    are_controls: set[Path] = set()
    for candidate in candidates:
        if candidate.group not in paired_groups:
            continue
        are_controls.add(candidate.path)
        is_used = False
        for owner in candidate.owners:
            numbered = taken.setdefault(owner, {})
            if candidate.number <= MOST_CONTROLS and candidate.number not in numbered:
                numbered[candidate.number] = candidate.path
                is_used = True
        if not is_used:
            pairs.unused.append(candidate.path)
    pairs.images = [path for path in paths if path not in are_controls]
    for owner, numbered in taken.items():
        pairs.controls[owner] = tuple(numbered[number] for number in sorted(numbered))
    return pairs


def pairs_in_folders(images: Sequence[Path], folders: Sequence[Sequence[Path]]) -> Pairs:
    """The pairs of images and the control pictures that other folders hold under the same names: the first picture of
    each from the first folder, and so on; of one folder also `name_0`, `name_1` …

    Args:
        images: the images.
        folders: the pictures of each other folder.
    """
    places = _Places(images)
    pairs = Pairs(list(images))
    taken: dict[Path, list[tuple[int, Path]]] = {}
    for place, pictures in enumerate(folders):
        for path in pictures:
            owners, number = _owners_by_name(path.stem, places.by_stem)
            if not owners:
                pairs.unused.append(path)
            for owner in owners:
                taken.setdefault(owner, []).append((place + number, path))
    for owner, numbered in taken.items():
        ordered = [path for _, path in sorted(numbered)]
        pairs.controls[owner] = tuple(ordered[:MOST_CONTROLS])
        pairs.unused += ordered[MOST_CONTROLS:]
    return pairs


class _Places:
    """Images by their folder and name, and by their name alone."""

    def __init__(self, images: Iterable[Path]) -> None:
        self.by_stem: dict[str, list[Path]] = {}
        self._by_folder: dict[tuple[Path, str], list[Path]] = {}
        self._beside: dict[tuple[Path, str], list[Path]] = {}
        for image in images:
            self.by_stem.setdefault(compose(image.stem), []).append(image)
            self._by_folder.setdefault((image.parent, compose(image.stem)), []).append(image)
            self._beside.setdefault((image.parent.parent, compose(image.stem)), []).append(image)

    def find(self, folder: Path, stem: str) -> list[Path]:
        """The images of that name in a folder; if there are none, in the folders right below it."""
        stem = compose(stem)
        return self._by_folder.get((folder, stem)) or self._beside.get((folder, stem), [])

    def find_beside(self, path: Path, stem: str) -> list[Path]:
        """The images of that name in the folder of a picture."""
        return self._by_folder.get((path.parent, compose(stem)), [])


def _looks_like_control(path: Path, folder: Path) -> bool:
    """Whether its name ends as a control picture's does, or it lies in a folder of control pictures."""
    is_in_control_folder = path.parent != folder and _FOLDER.fullmatch(path.parent.name) is not None
    return _ENDING.fullmatch(path.stem) is not None or is_in_control_folder


def _candidate(path: Path, places: _Places) -> _Candidate:
    ending = _ENDING.fullmatch(path.stem)
    if ending is not None:
        owners = places.find_beside(path, ending[1])
        return _Candidate(path, int(ending[2] or 1), tuple(owners), (path.parent, "beside"))
    match = _FOLDER.fullmatch(path.parent.name)
    assert match is not None
    first, base = int(match[1] or 1), path.parent.parent
    owners = places.find(base, path.stem)
    number = 0
    if not owners:
        stem, number = _split_number(path.stem)
        owners = places.find(base, stem)
    return _Candidate(path, first + number, tuple(owners), (path.parent, "inside"))


def _owners_by_name(stem: str, images: dict[str, list[Path]]) -> tuple[list[Path], int]:
    """(the images of a control picture of that name, which of theirs it is, from 0)."""
    stem = compose(stem)
    if stem in images:
        return images[stem], 0
    name, number = _split_number(stem)
    return images.get(name, []), number


def _split_number(stem: str) -> tuple[str, int]:
    """musubi-tuner's `name_0` as ("name", 0); a name without a number has the number 0."""
    match = _NUMBERED.fullmatch(stem)
    if match is None:
        return stem, 0
    return match[1], int(match[2])
