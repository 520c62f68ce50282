"""Which LoRA files a missing one may have been: the same file in another folder, then names with the same parts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import NamedTuple

_PART = re.compile(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*|\d+|[^\W\d_]+")
_LEAST = 0.5  # of the letters that two names have together


class _Name(NamedTuple):
    """What two file names are compared by."""

    parts: frozenset[str]
    pairs: frozenset[str]
    folders: frozenset[str]


def near_names(name: str, names: Iterable[str], count: int = 3) -> list[str]:
    """Up to `count` of `names` that may be meant by `name`, the likeliest first.

    First come files of the same name in other folders. Then come names by the parts that they share, wherever these
    stand and whatever is between them: `anime-v2.1` is near `styles/anime_v2`. Letters that differ count too, so that
    a typing error is found.
    """
    missing = _read(name)
    same, scored = [], []
    for other in names:
        if file_name(other) == file_name(name):
            same.append(other)
            continue
        found = _read(other)
        score = _likeness(missing, found)
        if score >= _LEAST:
            scored.append((score, len(missing.folders & found.folders), other))
    scored.sort(reverse=True)  # of equals the highest version comes first
    return [*same, *(other for _, _, other in scored)][:count]


def file_name(name: str) -> str:
    """The file of a name, without folders, as it is compared: Windows and macOS tell no cases apart."""
    return name.replace("\\", "/").rpartition("/")[2].casefold()


def _read(name: str) -> _Name:
    folder, _, file = name.replace("\\", "/").rpartition("/")
    stem = os.path.splitext(file)[0]
    parts = [part.casefold() for part in _PART.findall(stem)]
    joined = "".join(parts)
    pairs = frozenset(joined[at : at + 2] for at in range(len(joined) - 1))
    return _Name(frozenset(parts), pairs, frozenset(folder.casefold().split("/")))


def _likeness(one: _Name, other: _Name) -> float:
    """From 0 to 1: how much of two names is the same, by whole parts or by pairs of letters, whichever says more."""
    return max(_share(one.parts, other.parts), _pair_share(one.pairs, other.pairs))


def _share(one: frozenset[str], other: frozenset[str]) -> float:
    all_letters = sum(map(len, one | other))
    if not all_letters:
        return 0.0
    return sum(map(len, one & other)) / all_letters


def _pair_share(one: frozenset[str], other: frozenset[str]) -> float:
    """Dice's coefficient; 0 for names so short that a pair says nothing."""
    if len(one) < 2 or len(other) < 2:
        return 0.0
    return 2 * len(one & other) / (len(one) + len(other))
