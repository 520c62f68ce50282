"""Finds the preference pairs of a folder: `name.win.png`, and beside it `name.lose.png`, which people like less."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...storage.problem_list import problem_lines
from .file_names import compose

WIN, LOSE = "win", "lose"
_ENDING = re.compile(rf"(.+)\.({WIN}|{LOSE})", re.IGNORECASE)


@dataclass
class PreferencePairs:
    """The images of a folder without the worse ones, and the worse picture of each image that has one."""

    images: list[Path]
    worse: dict[Path, Path] = field(default_factory=dict)


def find_preferences(paths: Sequence[Path]) -> PreferencePairs:
    """Tell the better pictures from the worse ones. Without any whole pair, all are images as any others.

    Raises ValueError that names every picture without a partner, and every name that more than one picture has.
    """
    sides: dict[tuple[Path, str], dict[str, list[Path]]] = {}
    for path in paths:
        match = _ENDING.fullmatch(path.stem)
        if match is not None:
            of_name = sides.setdefault((path.parent, compose(match[1])), {WIN: [], LOSE: []})
            of_name[match[2].lower()].append(path)
    if not any(of_name[WIN] and of_name[LOSE] for of_name in sides.values()):
        return PreferencePairs(list(paths))
    errors: list[str] = []
    worse: dict[Path, Path] = {}
    for _, of_name in sorted(sides.items()):
        errors += _errors_of_name(of_name)
        for better, other in zip(of_name[WIN], of_name[LOSE], strict=False):
            worse[better] = other
    if errors:
        raise ValueError("Dataset: preference pairs are incomplete:\n" + problem_lines(errors, "  "))
    losing = set(worse.values())
    return PreferencePairs([path for path in paths if path not in losing], worse)


def _errors_of_name(of_name: dict[str, list[Path]]) -> list[str]:
    """What is wrong with the pictures of one name."""
    errors = []
    for side, other in ((WIN, LOSE), (LOSE, WIN)):
        files = of_name[side]
        if len(files) > 1:
            listed = ", ".join(path.name for path in files)
            errors.append(f"{listed}: a pair has one of them; remove the others")
        elif files and not of_name[other]:
            errors.append(
                f"{files[0].name}: there is no {missing_partner(files[0].name)} beside it; add it, or take this one"
                " away"
            )
    return errors


def missing_partner(name: str) -> str:
    """The name that the partner of a picture would have; "" where its own is none of a pair's."""
    path = Path(name)
    match = _ENDING.fullmatch(path.stem)
    if match is None:
        return ""
    other = LOSE if match[2].lower() == WIN else WIN
    return f"{match[1]}.{other}{path.suffix}"


def caption_paths(path: Path) -> tuple[Path, ...]:
    """Under which names the caption of an image is looked for: its own, and of a pair the name of both pictures, so
    that `name.txt` is the caption of `name.win.png`.
    """
    match = _ENDING.fullmatch(path.stem)
    if match is None:
        return (path,)
    return path, path.with_name(match[1] + path.suffix)
