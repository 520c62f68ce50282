"""Which LoRA files a missing one may have been: the same file in another folder, then names with the same parts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import NamedTuple

_PART = re.compile(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*|\d+|[^\W\d_]+")
_BETWEEN = re.compile(r"[\W_]+")
_LEAST = 0.5  # of the letters that two names have together


class _Name(NamedTuple):
    """What a file name is compared by: its parts, and the pairs of letters in all of them together."""

    parts: frozenset[str]
    pairs: frozenset[str]


def near_names(name: str, names: Iterable[str], count: int = 3) -> list[str]:
    """Up to `count` of `names` that may be meant by `name`, the likeliest first.

    First come files of the same name in other folders. Then come names by the parts that they share, wherever these
    stand and whatever is between them: `anime-v2.1` is near `styles/anime_v2`. Letters that differ count too, so that
    a typing error is found.
    """
    missing, missing_file, folders = _read(name), file_name(name), _folders(name)
    same, scored = [], []
    for other in names:
        file = file_name(other)
        if file == missing_file:
            same.append(other)
        elif _may_be_near(missing, file):
            parts, pairs = _read(other)
            score = max(_share(missing.parts, parts), _pair_share(missing.pairs, pairs))  # whichever says more
            if score >= _LEAST:
                scored.append((score, len(folders & _folders(other)), other))
    scored.sort(reverse=True)  # of equals the highest version comes first
    return [*same, *(other for _, _, other in scored)][:count]


def _may_be_near(missing: _Name, file: str) -> bool:
    """Whether it is worth a closer look: a name that shares neither a part nor a third of the pairs never gets near."""
    letters = _BETWEEN.sub("", file)
    return any(part in file for part in missing.parts) or (
        3 * sum(pair in letters for pair in missing.pairs) >= len(missing.pairs)
    )


def file_name(name: str) -> str:
    """The file of a name, without folders, as it is compared: Windows and macOS tell no cases apart."""
    return name.replace("\\", "/").rpartition("/")[2].casefold()


def _folders(name: str) -> frozenset[str]:
    return frozenset(name.replace("\\", "/").rpartition("/")[0].casefold().split("/"))


def _read(name: str) -> _Name:
    stem = os.path.splitext(name.replace("\\", "/").rpartition("/")[2])[0]
    parts = [part.casefold() for part in _PART.findall(stem)]
    joined = "".join(parts)
    return _Name(frozenset(parts), frozenset(joined[at : at + 2] for at in range(len(joined) - 1)))


def _share(one: frozenset[str], other: frozenset[str]) -> float:
    all_letters = sum(map(len, one | other))
    if not all_letters:
        return 0.0
    return sum(map(len, one & other)) / all_letters


def _pair_share(one: frozenset[str], other: frozenset[str]) -> float:
    """Dice's coefficient; 0 for names so short that a pair says nothing."""
    return 0.0 if len(one) < 2 or len(other) < 2 else 2 * len(one & other) / (len(one) + len(other))
