"""Word lists of a dataset: `__name__` in a caption is one line of `wildcards/name.txt`, as in Dynamic Prompts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from ...storage.digest import sha256_of_spaced_json
from .captions import MAX_TEXT_BYTES, read_lines

FOLDER, SUFFIX = "wildcards", ".txt"
MAX_DEPTH = 8  # lists that name lists
MAX_DRAWS = 1000  # lines for one caption: short files may name each other so often that a caption fills the memory
_NAME = re.compile(r"__(?! )((?:[^\W_]|[./ -]|_(?!_)){1,100})(?<! )__")


class WordLists:
    """Lines by the name of their list; immutable, shared by all captions."""

    def __init__(self, lines: Mapping[str, tuple[str, ...]] | None = None) -> None:
        self._lines = dict(lines or {})
        self._depths: dict[str, int] = {}
        self._draws: dict[str, int] = {}
        self.digest = sha256_of_spaced_json(sorted(self._lines.items()))

    @property
    def texts(self) -> tuple[str, ...]:
        """Every line of every list."""
        return tuple(line for lines in self._lines.values() for line in lines)

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __getitem__(self, name: str) -> tuple[str, ...]:
        return self._lines[name]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WordLists) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def check(self, text: str) -> None:
        """Raise ValueError when a text names a list that does not exist, that contains itself, is nested too deep, or
        draws too many lines.
        """
        names = list_names(text)
        for name in names:
            self._check_depth(name, ())
        drawn = sum(map(self._max_draws, names))
        if drawn > MAX_DRAWS:
            raise ValueError(
                f"the caption may draw {drawn:,} lines of word lists that name each other, expected at most"
                f" {MAX_DRAWS:,}"
            )

    def _max_draws(self, name: str) -> int:
        """How many lines may have to be drawn for this list: its own and those of the lists in it."""
        if name not in self._draws:
            max_in_a_line = 0
            for line in self._lines[name]:
                max_in_a_line = max(max_in_a_line, sum(map(self._max_draws, list_names(line))))
            self._draws[name] = 1 + max_in_a_line
        return self._draws[name]

    def _check_depth(self, name: str, within: tuple[str, ...]) -> int:
        """How many lists are nested from this one on; raises ValueError for too many. `within` are the lists around."""
        if name not in self._lines:
            source = "the caption"
            if within:
                source = f"the word list {within[-1]!r}"
            raise ValueError(f"{source} has __{name}__, and there is no file {FOLDER}/{name}.txt that can be used")
        if name not in self._depths:
            if name in within or len(within) == MAX_DEPTH:
                raise ValueError(
                    f"the word list {within[0]!r} leads to itself, or more than {MAX_DEPTH} deep:"
                    f" {' > '.join((*within, name))}"
                )
            inner: set[str] = set()
            for line in self._lines[name]:
                inner.update(list_names(line))
            depths = [self._check_depth(other, (*within, name)) for other in sorted(inner)]
            self._depths[name] = 1 + max(depths, default=0)
        if len(within) + self._depths[name] > MAX_DEPTH:
            raise ValueError(f"the word list {(*within, name)[0]!r} has lists in each other more than {MAX_DEPTH} deep")
        return self._depths[name]


NO_LISTS = WordLists()


def list_names(text: str) -> list[str]:
    """The names of the lists in a text, in order."""
    return _NAME.findall(text)


def fill_lists(text: str, line_of: Callable[[str], str]) -> tuple[str, int]:
    """(the text with what `line_of` gives in the place of each name, how many there were)."""
    return _NAME.subn(lambda match: line_of(match[1]), text)


def read_word_lists(folder: Path, encoding: str) -> tuple[WordLists, list[str]]:
    """(the word lists of a dataset's folder, the errors of other files). Empty lines and lines that begin with # are
    left out.
    """
    lines: dict[str, tuple[str, ...]] = {}
    problems: list[str] = []
    root = folder / FOLDER
    for path in sorted(root.rglob(f"*{SUFFIX}")):
        name = path.relative_to(root).as_posix().removesuffix(SUFFIX)
        try:
            lines[name] = _read(path, folder, encoding)
        except (ValueError, OSError) as error:
            problems.append(f"{FOLDER}/{name}.txt: {getattr(error, 'strerror', None) or error}; not used")
    return WordLists(lines), problems


def _read(path: Path, folder: Path, encoding: str) -> tuple[str, ...]:
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError("it leads out of the dataset's folder")
    if path.stat().st_size > MAX_TEXT_BYTES:
        raise ValueError(f"it has {path.stat().st_size} bytes, expected at most {MAX_TEXT_BYTES}")
    lines = tuple(line for line in read_lines(path, encoding) if not line.startswith("#"))
    if not lines:
        raise ValueError("it has no line")
    return lines
