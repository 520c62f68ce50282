"""GraftAdapter's `pattern`: which modules are kept or left out, and separate ranks and alphas for some of them."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass, field
from typing import NamedTuple

_SIZE = re.compile(r"\s*(rank\s+(?P<rank>\d+))?\s*(alpha\s+(?P<alpha>\d+(\.\d*)?))?\s*")


class Size(NamedTuple):
    """Rank and alpha of what matches `pattern`; None leaves what GraftAdapter says."""

    pattern: str
    rank: int | None
    alpha: float | None


@dataclass(frozen=True)
class Patterns:
    """What a layer filter says: modules to keep (all if empty), modules to leave out, and sizes.

    If several sizes match, the last one counts.
    """

    keep: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    sizes: tuple[Size, ...] = ()

    def choose(self, path: str) -> bool:
        """Whether a module is kept."""
        if self.keep and not any(matches(path, pattern) for pattern in self.keep):
            return False
        return not any(matches(path, pattern) for pattern in self.drop)

    def name(self, part: str) -> bool:
        """Whether a pattern of the modules to keep has this part of a path written out."""
        return any(part in pattern for pattern in self.keep)


def parse_patterns(text: str) -> Patterns:
    """Read a layer filter.

    Args:
        text: globs or /regular expressions/, separated by commas or lines; `!` in front leaves modules out, `=` gives
            sizes. `input_blocks.*=rank 8, alpha 4` leaves nothing out: it says how large the adapters of chosen modules
            are.

    Raises:
        ValueError: listing what cannot be read.
    """
    reader = _Reader()
    for entry in re.split(r"[,\n]", text):
        reader.read(entry.strip())
    errors = reader.errors
    for size in reader.sizes:
        if size.rank == 0:
            errors.append(f"{size.pattern!r}: rank is 0, expected 1 or more; !{size.pattern} leaves modules out")
    for pattern in (*reader.keep, *reader.drop, *(size.pattern for size in reader.sizes)):
        try:
            compile_regex(pattern)
        except re.error as error:
            errors.append(f"{pattern!r} is not a regular expression: {error}")
    if errors:
        raise ValueError("layer filter: " + "; ".join(errors))
    return Patterns(tuple(reader.keep), tuple(reader.drop), tuple(reader.sizes))


@dataclass
class _Reader:
    """Reads a pattern text entry by entry; `after_size` says whether the last entry was a size."""

    keep: list[str] = field(default_factory=list)
    drop: list[str] = field(default_factory=list)
    sizes: list[Size] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    after_size: bool = False

    def read(self, entry: str) -> None:
        """Reads one entry; a following "alpha 4" belongs to the size before it."""
        size = _SIZE.fullmatch(entry)
        if entry and size is not None and self.after_size:
            last = self.sizes.pop()
            rank, alpha = _rank(size), _alpha(size)
            if rank is None:
                rank = last.rank
            if alpha is None:
                alpha = last.alpha
            self.sizes.append(Size(last.pattern, rank, alpha))
            return
        self.after_size = False
        if entry:
            self._read_pattern(entry)

    def _read_pattern(self, entry: str) -> None:
        pattern, equals, value = entry.rpartition("=")
        size = None
        if equals:
            size = _SIZE.fullmatch(value)
        if entry.startswith("/") and entry.endswith("/") and size is None:
            self.keep.append(entry)
        elif equals:
            self._read_size(entry, pattern.strip(), size if value.strip() else None)
        elif entry.startswith("!"):
            self.drop.append(entry[1:].strip())
        else:
            self.keep.append(entry)

    def _read_size(self, entry: str, pattern: str, size: re.Match[str] | None) -> None:
        if size is None or not pattern:
            self.errors.append(f"{entry!r}: expected PATTERN=rank 8, PATTERN=alpha 4 or PATTERN=rank 8, alpha 4")
            return
        self.sizes.append(Size(pattern, _rank(size), _alpha(size)))
        self.after_size = True


def _rank(size: re.Match[str]) -> int | None:
    if size["rank"] is None:
        return None
    return int(size["rank"])


def _alpha(size: re.Match[str]) -> float | None:
    if size["alpha"] is None:
        return None
    return float(size["alpha"])


def compile_regex(pattern: str) -> re.Pattern[str] | None:
    """The regular expression of a /pattern/ in slashes, None for a glob. Raises re.error where it is none."""
    if len(pattern) > 1 and pattern.startswith("/") and pattern.endswith("/"):
        return re.compile(pattern[1:-1])
    return None


def matches(path: str, pattern: str) -> bool:
    """Whether a pattern matches a path.

    Args:
        path: a module's path, or the name of a tensor.
        pattern: a glob, which has to match all of the path, or a /regular expression/, which may match a part.
    """
    regex = compile_regex(pattern)
    if regex is not None:
        return regex.search(path) is not None
    return fnmatch.fnmatchcase(path, pattern)
