"""Whether the files a dataset was made from are still as they were, looked at a few at a time while training runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from . import images

_TEXTS = (".txt", ".caption", ".json", ".yaml", ".yml")


class Changed(RuntimeError):
    """A file of the dataset has changed, and the dataset says to stop then."""


@dataclass(frozen=True)
class Stamp:
    """A file as it was: size, time of change and content hash."""

    size: int
    changed: int
    sha256: str


@dataclass(frozen=True)
class Watched:
    """The files of a folder as they were when it was read, by relative path; `stop` says that a
    change ends training.
    """

    folder: Path
    files: dict[str, Stamp]
    stop: bool = False


def stamps(folder: Path) -> dict[str, Stamp]:
    """Every file below a folder that a dataset is made from, as it is now."""
    return {path.relative_to(folder).as_posix(): _stamp(path) for path in _files(folder)}


def _files(folder: Path) -> list[Path]:
    known = (*images.SUFFIXES, *_TEXTS)
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in known and path.is_file())


@lru_cache(maxsize=1 << 17)
def _hash_of(path: Path, size: int, changed: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def content_hash(path: Path) -> str:
    """sha256 of a file, remembered as long as its size and time of change stay the same."""
    found = path.stat()
    return _hash_of(path, found.st_size, found.st_mtime_ns)


def _stamp(path: Path) -> Stamp:
    found = path.stat()
    return Stamp(found.st_size, found.st_mtime_ns, content_hash(path))


class Patrol:
    """Looks at `at_once` files a call, in turn, and once a round for new ones; each change is said once."""

    def __init__(self, watched: Iterable[Watched], at_once: int = 64) -> None:
        self.watched = tuple(watched)
        self.at_once = at_once
        self._row = [(one, name) for one in self.watched for name in one.files]
        self._next = 0
        self._said: set[tuple[Path, str]] = set()

    def look(self) -> list[str]:
        """What has changed among the files that it is the turn of; raises Changed when one of them is
        to stop training.
        """
        found: list[tuple[Watched, str, str]] = []
        if self._next == 0:
            found += [(one, name, "is new") for one in self.watched for name in self._new(one)]
        for one, name in self._row[self._next : self._next + self.at_once]:
            what = _difference(one.folder / name, one.files[name])
            if what:
                found.append((one, name, what))
        self._next += self.at_once
        if self._next >= len(self._row):
            self._next = 0
        fresh = [(one, name, what) for one, name, what in found if (one.folder, name) not in self._said]
        self._said.update((one.folder, name) for one, name, _ in fresh)
        said = [f"{name} {what}" for _, name, what in fresh]
        if any(one.stop for one, _, _ in fresh):
            raise Changed(
                f"The dataset changed while training: {'; '.join(said)}. The state is kept. Put the files back and run"
                " again, or queue the graph to begin a run with what is there now; changed: continue in GraftDataset's"
                " filters trains on with what was encoded."
            )
        return said

    def sweep(self) -> list[str]:
        """All files at once, as `look` says it."""
        at_once, self.at_once, self._next = self.at_once, max(1, len(self._row)), 0
        try:
            return self.look()
        finally:
            self.at_once, self._next = at_once, 0

    def _new(self, one: Watched) -> list[str]:
        return [
            name
            for name in (path.relative_to(one.folder).as_posix() for path in _files(one.folder))
            if name not in one.files
        ]


def _difference(path: Path, was: Stamp) -> str:
    """What has become of a file, "" when its contents are the same."""
    try:
        found = path.stat()
        if (found.st_size, found.st_mtime_ns) == (was.size, was.changed):
            return ""
        if _stamp(path).sha256 == was.sha256:
            return ""
        return "has changed"
    except FileNotFoundError:
        return "is gone"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
