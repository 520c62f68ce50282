"""Detects changes of the dataset's files while training runs, a few files at a time."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...storage.digest import sha256_of_file, sha256_of_spaced_json
from ...storage.file_list import names_below
from . import clip_files, images, wildcards
from .cache import Cache, key_of
from .file_names import printable
from .layouts import registry
from .packs import tensor_of, text_of


class DatasetChangedError(RuntimeError):
    """A file of the dataset changed, and its settings say to stop then (`changed: stop`)."""


class FileStamp(NamedTuple):
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
        names = (_name_in(self.folder, path) for path, _ in _dataset_files(self.folder, self.clips))
        return [name for name in names if name not in self.files]


def stamp_files(folder: Path, clips: bool = False) -> dict[str, FileStamp]:
    """Size, time and hash of every file below a folder that a dataset is made from, with or without video files."""
    stamps: dict[str, FileStamp] = {}
    for path, status in _dataset_files(folder, clips):
        with contextlib.suppress(FileNotFoundError):  # it was removed since it was listed
            stamps[_name_in(folder, path)] = _stamp(path, status)
    return stamps


def _name_in(folder: Path, path: str) -> str:
    """The relative path of a file below a folder; `Path.relative_to` takes longer."""
    return path[len(str(folder)) :].replace(os.sep, "/").lstrip("/")


def _dataset_files(folder: Path, clips: bool) -> list[tuple[str, os.stat_result]]:
    suffixes = (*images.SUFFIXES, *registry.suffixes(), wildcards.SUFFIX)
    if clips:
        suffixes += clip_files.SUFFIXES
    return names_below(folder, lambda name: os.path.splitext(name)[1].lower() in suffixes)


class KnownHashes:
    """Hashes of files by path, each with what it holds for: size, times and number of the file (inode)."""

    def __init__(self) -> None:
        self._hashes: dict[str, tuple[tuple[int, ...], str]] = {}
        self._fresh: set[str] = set()  # hashed so soon after a change that another change could have the same time

    def hash_of(self, name: str, stat: os.stat_result) -> str:
        """The sha256 of the file at a path, which is read where it is not known."""
        mark = stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino
        known = self._hashes.get(name)
        if known is not None and known[0] == mark:
            return known[1]
        self._fresh.discard(name)
        if time.time_ns() - max(stat.st_mtime_ns, stat.st_ctime_ns) < SETTLED:
            self._fresh.add(name)
        self._remember(name, (mark, sha256_of_file(name)))
        return self._hashes[name][1]

    def _remember(self, name: str, known: tuple[tuple[int, ...], str]) -> None:
        if len(self._hashes) >= _MOST_HASHES:
            self._hashes.pop(next(iter(self._hashes)))
        self._hashes[name] = known

    def list_below(self, folder: Path) -> dict[str, list[Any]]:
        """What is known of the files below a folder, as plain values."""
        start = f"{folder}{os.sep}"
        found: dict[str, list[Any]] = {}
        for name, (mark, sha256) in self._hashes.items():
            if name.startswith(start) and name not in self._fresh:
                found[name] = [*mark, sha256]
        return found

    def add(self, known: dict[str, list[Any]]) -> None:
        """Take over such values; those of this process count more."""
        for name, (*mark, sha256) in known.items():
            if name not in self._hashes:
                self._remember(name, (tuple(mark), sha256))


_MOST_HASHES = 1 << 17
SETTLED = 2_000_000_000  # ns
KNOWN = KnownHashes()


def recall_hashes(cache: Cache, folder: Path) -> None:
    """Take over the hashes of a folder's files that the cache has, so that only files that changed are read."""
    stored = cache.read("files", _hashes_key(folder))
    if stored is not None:
        KNOWN.add(json.loads(text_of(stored[0]["hashes"])))


def keep_hashes(cache: Cache, folder: Path) -> None:
    """Write the hashes of a folder's files into the cache, where they are others than there."""
    tensor = tensor_of(json.dumps(KNOWN.list_below(folder), sort_keys=True))
    stored = cache.read("files", _hashes_key(folder))
    if stored is None or not torch.equal(stored[0]["hashes"], tensor):
        cache.write("files", _hashes_key(folder), {"hashes": tensor})


def _hashes_key(folder: Path) -> str:
    return key_of("hashes of files", str(folder))


def content_hash(path: Path) -> str:
    """sha256 of a file, remembered as long as its size and its times stay the same; of a frame folder, that of
    its pictures in their order.
    """
    if clip_files.is_frame_folder(path.name) and path.is_dir():
        return sha256_of_spaced_json([content_hash(file) for file in clip_files.frame_files(path)])
    return KNOWN.hash_of(str(path), path.stat())


def is_unchanged(path: Path, sha256: str) -> bool:
    """Whether a file is still there with these contents."""
    try:
        return content_hash(path) == sha256
    except FileNotFoundError:
        return False


def _stamp(path: str, stat: os.stat_result) -> FileStamp:
    return FileStamp(stat.st_size, stat.st_mtime_ns, KNOWN.hash_of(path, stat))


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
        lines = [printable(f"{change.name} {change.what}") for change in changes]
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
        if _stamp(str(path), stat).sha256 == before.sha256:
            return ""
        return "has changed"
    except FileNotFoundError:
        return "is gone"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
