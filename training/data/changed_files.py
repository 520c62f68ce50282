"""Detects changes of the dataset's files while training runs, a few files at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ...storage.digest import sha256_of_file, sha256_of_spaced_json
from ...storage.file_list import files_below
from . import clip_files, images, wildcards
from .layouts import registry


class DatasetChangedError(RuntimeError):
    """A file of the dataset changed, and its settings say to stop then (`changed: stop`)."""


@dataclass(frozen=True)
class FileStamp:
    """A file as it was: size in bytes, modification time in ns, and content hash."""

    size: int
    modified: int
    sha256: str


@dataclass(frozen=True)
class WatchedFiles:
    """The files of a folder as they were when it was read, by relative path; with `stop` a change ends training. Video
    files belong to them where the dataset reads `clips`.
    """

    folder: Path
    files: dict[str, FileStamp]
    stop: bool = False
    clips: bool = False

    def new_files(self) -> list[str]:
        """Relative paths of the files that have been added since."""
        names = (path.relative_to(self.folder).as_posix() for path in _dataset_files(self.folder, self.clips))
        return [name for name in names if name not in self.files]


def stamp_files(folder: Path, clips: bool = False) -> dict[str, FileStamp]:
    """Size, time and hash of every file below a folder that a dataset is made from, with or without video files."""
    stamps: dict[str, FileStamp] = {}
    for path in _dataset_files(folder, clips):
        with contextlib.suppress(FileNotFoundError):  # it was removed since it was listed
            stamps[path.relative_to(folder).as_posix()] = _stamp(path)
    return stamps


def _dataset_files(folder: Path, clips: bool) -> list[Path]:
    suffixes = (*images.SUFFIXES, *registry.suffixes(), wildcards.SUFFIX)
    if clips:
        suffixes += clip_files.SUFFIXES
    return [path for path, _ in files_below(folder) if path.suffix.lower() in suffixes]


@lru_cache(maxsize=1 << 17)
def _hash_of(path: Path, size: int, modified: int) -> str:
    return sha256_of_file(path)


def content_hash(path: Path) -> str:
    """sha256 of a file, remembered as long as its size and modification time stay the same; of a frame folder, that of
    its pictures in their order.
    """
    if clip_files.is_frame_folder(path.name) and path.is_dir():
        return sha256_of_spaced_json([content_hash(file) for file in clip_files.frame_files(path)])
    stat = path.stat()
    return _hash_of(path, stat.st_size, stat.st_mtime_ns)


def is_unchanged(path: Path, sha256: str) -> bool:
    """Whether a file is still there with these contents."""
    try:
        return content_hash(path) == sha256
    except FileNotFoundError:
        return False


def _stamp(path: Path) -> FileStamp:
    stat = path.stat()
    return FileStamp(stat.st_size, stat.st_mtime_ns, content_hash(path))


@dataclass(frozen=True)
class _Change:
    folder: Path
    name: str
    what: str  # "is new", "has changed" …
    stop: bool

    @property
    def key(self) -> tuple[Path, str]:
        return self.folder, self.name


class FileWatcher:
    """Checks `at_once` files per call, in turn, and once per round looks for new ones. Each change is reported once."""

    def __init__(self, watched: Iterable[WatchedFiles], at_once: int = 64) -> None:
        self.watched = tuple(watched)
        self.at_once = at_once
        self._queue = [(folder, name) for folder in self.watched for name in folder.files]
        self._next = 0
        self._reported: set[tuple[Path, str]] = set()

    def check_next(self) -> list[str]:
        """The changes among the next files. Raises DatasetChangedError when a change must stop training."""
        changes = [change for change in self._changes() if change.key not in self._reported]
        self._reported.update(change.key for change in changes)
        lines = [f"{change.name} {change.what}" for change in changes]
        if any(change.stop for change in changes):
            raise DatasetChangedError(
                f"The dataset changed while training: {'; '.join(lines)}. The state is kept. Put the files back and run"
                " again, or queue the graph to begin a run with what is there now; changed: continue in Dataset's"
                " filters trains on with what was encoded."
            )
        return lines

    def check_all(self) -> list[str]:
        """All files at once, reported as `check_next` does."""
        at_once, self.at_once, self._next = self.at_once, max(1, len(self._queue)), 0
        try:
            return self.check_next()
        finally:
            self.at_once, self._next = at_once, 0

    def _changes(self) -> list[_Change]:
        changes: list[_Change] = []
        if self._next == 0:
            for watched in self.watched:
                changes += [_Change(watched.folder, name, "is new", watched.stop) for name in watched.new_files()]
        for watched, name in self._queue[self._next : self._next + self.at_once]:
            difference = _difference(watched.folder / name, watched.files[name])
            if difference:
                changes.append(_Change(watched.folder, name, difference, watched.stop))
        self._next += self.at_once
        if self._next >= len(self._queue):
            self._next = 0
        return changes


def _difference(path: Path, before: FileStamp) -> str:
    """What happened to a file, or "" when its contents are the same."""
    try:
        stat = path.stat()
        if (stat.st_size, stat.st_mtime_ns) == (before.size, before.modified):
            return ""
        if _stamp(path).sha256 == before.sha256:
            return ""
        return "has changed"
    except FileNotFoundError:
        return "is gone"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
