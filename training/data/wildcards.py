"""Word lists of a dataset: `__name__` in a caption is one line of `wildcards/name.txt`, as in Dynamic Prompts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from ...storage.digest import sha256_of_spaced_json
from .captions import LONGEST, read_lines

FOLDER = "wildcards"
DEEPEST = 8  # lists that name lists
MOST = 1000  # lines that one caption may draw: short files may name each other so often that a caption fills the memory
_NAME = re.compile(r"__(?! )((?:[^\W_]|[./ -]|_(?!_)){1,100})(?<! )__")


class WordLists:
    """Lines by the name of their list; immutable, shared by all captions."""

    def __init__(self, lines: Mapping[str, tuple[str, ...]] | None = None) -> None:
        self._lines, self._heights, self._draws = dict(lines or {}), dict[str, int](), dict[str, int]()
        self.digest = sha256_of_spaced_json(sorted(self._lines.items()))

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __getitem__(self, name: str) -> tuple[str, ...]:
        return self._lines[name]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WordLists) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def check(self, text: str) -> None:
        """Raise ValueError when a text names a list that is not there, one that leads to itself or too deep, or too
        many in the end.
        """
        for name in named(text):
            self._height(name, ())
        drawn = sum(map(self._most, named(text)))
        if drawn > MOST:
            raise ValueError(
                f"the caption may draw {drawn:,} lines of word lists that name each other, expected at most {MOST:,}"
            )

    def _most(self, name: str) -> int:
        """How many lines may have to be drawn for this list, its own and those of the lists in it."""
        if name not in self._draws:
            self._draws[name] = 1 + max((sum(map(self._most, named(line))) for line in self._lines[name]), default=0)
        return self._draws[name]

    def _height(self, name: str, within: tuple[str, ...]) -> int:
        """How many lists lie in each other from this one on."""
        if name not in self._lines:
            if within:
                where = f"the word list {within[-1]!r}"
            else:
                where = "the caption"
            raise ValueError(f"{where} has __{name}__, and there is no file {FOLDER}/{name}.txt that can be used")
        if name not in self._heights:
            if name in within or len(within) == DEEPEST:
                raise ValueError(
                    f"the word list {within[0]!r} leads to itself, or more than {DEEPEST} deep:"
                    f" {' > '.join((*within, name))}"
                )
            inner = {other for line in self._lines[name] for other in named(line)}
            self._heights[name] = 1 + max((self._height(other, (*within, name)) for other in sorted(inner)), default=0)
        if len(within) + self._heights[name] > DEEPEST:
            raise ValueError(f"the word list {(*within, name)[0]!r} has lists in each other more than {DEEPEST} deep")
        return self._heights[name]


NO_LISTS = WordLists()


def named(text: str) -> list[str]:
    """The names of the lists in a text, in order."""
    return _NAME.findall(text)


def filled(text: str, line_of: Callable[[str], str]) -> tuple[str, int]:
    """(the text with what `line_of` gives in the place of each name, how many there were)."""
    return _NAME.subn(lambda found: line_of(found[1]), text)


def read(folder: Path, encoding: str = "utf-8") -> tuple[WordLists, list[str]]:
    """(the word lists of a dataset's folder, what is wrong with others). Empty lines and lines that begin with # are
    left out.
    """
    lines: dict[str, tuple[str, ...]] = {}
    problems: list[str] = []
    root = folder / FOLDER
    for path in sorted(root.rglob("*.txt")):
        name = path.relative_to(root).as_posix().removesuffix(".txt")
        try:
            lines[name] = _read(path, folder, encoding)
        except (ValueError, OSError) as error:
            problems.append(f"{FOLDER}/{name}.txt: {getattr(error, 'strerror', None) or error}; not used")
    return WordLists(lines), problems


def _read(path: Path, folder: Path, encoding: str) -> tuple[str, ...]:
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError("it leads out of the dataset's folder")
    if path.stat().st_size > LONGEST:
        raise ValueError(f"it has {path.stat().st_size} bytes, expected at most {LONGEST}")
    found = tuple(line for line in read_lines(path, encoding) if not line.startswith("#"))
    if not found:
        raise ValueError("it has no line")
    return found
