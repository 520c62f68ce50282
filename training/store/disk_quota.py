"""Keeps all stored runs below a size limit: removes what has not been used for longest, never what this run needs."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from ...storage.atomic import sync_folder
from ...storage.disk_errors import explain_disk_errors
from ...storage.file_list import files_below, names_in
from ...storage.lock import FolderInUse, folder_lock

Listed = tuple[Path, os.stat_result]  # a file and its size and times
CACHE = "cache"  # what Dataset has encoded and quantized weights: beside the runs, with limits of their own
_REST = ("averages", "history", "previews")  # folders of a run beside its states
_UNFINISHED = 24 * 3600.0  # seconds: a younger snapshot on the way to a result may be another process's
_ABANDONED = 3600.0  # seconds: what a crash left and nothing names
_AT_WORK = 7 * 24 * 3600.0  # seconds: a younger lock beside a run's folder says that another process works in it


@dataclass(frozen=True)
class StoredFiles:
    """Files that are kept or removed together: a state, or what else a run without states has left.

    `kind` is "state", "partial" (a snapshot on the way), "orphan" (tensors that no state.json names) or "rest"; `used`
    is when they were written or read last, in seconds since 1970.
    """

    folder: Path
    kind: str
    files: tuple[Path, ...]
    size: int
    used: float


def stored_files(root: Path) -> tuple[list[StoredFiles], int]:
    """(what could be removed of every run below `root`, bytes of all their files)."""
    removable: list[StoredFiles] = []
    total = 0
    for name in names_in(root):
        if name == CACHE:
            continue
        files = files_below(root / name)
        total += sum(status.st_size for _, status in files)
        removable += _list_run(root / name, files)
    return removable, total


def _list_run(run: Path, files: Sequence[Listed]) -> list[StoredFiles]:
    """The states of a run; what else it has left when it has none."""
    folders: dict[Path, list[Listed]] = {}
    others: list[Listed] = []
    for path, status in files:
        if path.name.startswith("state"):
            folders.setdefault(path.parent, []).append((path, status))
        elif path.parent.parent == run and path.parent.name in _REST:
            others.append((path, status))
    if folders:
        return [_join_files(folder, _kind(folder, listed), listed) for folder, listed in folders.items()]
    if others:
        return [_join_files(run, "rest", others)]
    return []


def _join_files(folder: Path, kind: str, files: Sequence[Listed]) -> StoredFiles:
    size = sum(status.st_size for _, status in files)
    used = max(status.st_mtime for _, status in files)
    return StoredFiles(folder, kind, tuple(path for path, _ in files), size, used)


def _kind(folder: Path, files: Iterable[Listed]) -> str:
    if not any(path.name == "state.json" for path, _ in files):
        return "orphan"
    if folder.name == "partial":
        return "partial"
    return "state"


def _time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another process has removed it
        return -math.inf


def touch(folder: Path) -> None:
    """Records that the state in a folder was used now."""
    for name in names_in(folder):
        if fnmatch(name, "state*.safetensors"):
            with contextlib.suppress(OSError):  # the folder may be read-only
                os.utime(folder / name)


_ORDER = {"orphan": 0, "state": 1, "rest": 1, "partial": 2}  # which kind is removed first
_MIN_AGE = {"orphan": _ABANDONED, "partial": _UNFINISHED}  # seconds without use, by kind


def choose_removals(
    stored: Iterable[StoredFiles], excess: int, needed: Collection[Path], now: float
) -> list[StoredFiles]:
    """Choose what to remove to free `excess` bytes, or as many as possible.

    Leftovers go first, then what was unused for longest, unfinished runs last.

    Never what is in a folder of `needed`, nor what another process may be writing.
    """
    removals = []
    for entry in sorted(stored, key=lambda entry: (_ORDER[entry.kind], entry.used, str(entry.folder))):
        if excess <= 0:
            break
        if entry.folder in needed or now - entry.used < _MIN_AGE.get(entry.kind, -math.inf):
            continue
        removals.append(entry)
        excess -= entry.size
    return removals


def make_space(root: Path, limit: int, coming: int, needed: Collection[Path]) -> list[StoredFiles]:
    """Remove stored files so that `coming` more bytes stay within `limit`; returns what was removed.

    Folders in `needed` stay as they are; if a run's own folder is among them, it is the one that this process works in.
    """
    stored, total = stored_files(root)
    now = time.time()
    free = [entry for entry in stored if not _in_use(root, _run_name(root, entry), needed, now)]
    removed = []
    for entry in choose_removals(free, total + coming - limit, needed, now):
        run = root / _run_name(root, entry)
        try:
            if run in needed:  # this process has its lock
                _remove_stored(root, entry)
            elif not _remove_unused(root, run, entry):
                continue
        except OSError:  # another process has it open: it stays, and counts in the report's total
            continue
        removed.append(entry)
    return removed


def _run_name(root: Path, entry: StoredFiles) -> str:
    return entry.folder.relative_to(root).parts[0]


def _in_use(root: Path, run: str, needed: Collection[Path], now: float) -> bool:
    """Whether another process works in a run's folder: there is a recent lock beside it that is not ours."""
    return root / run not in needed and now - _time(root / f".{run}.lock") < _AT_WORK


def _remove_unused(root: Path, run: Path, entry: StoredFiles) -> bool:
    """Remove an entry of another run, unless a process works in that run or has used the entry since it was listed.
    Returns whether it was removed.
    """
    try:
        with folder_lock(run):
            if max(map(_time, entry.files)) > entry.used:
                return False
            _remove_stored(root, entry)
    except FolderInUse:
        return False
    return True


def _remove_stored(root: Path, entry: StoredFiles) -> None:
    remove(entry.files)
    for folder in (entry.folder, entry.folder.parent):
        if folder != root:
            _remove_empty(folder)


def remove(files: Collection[Path]) -> None:
    """Remove files, then their folders if nothing else is in them. A folder with the name of a file stays: it is not
    of the store.

    A state.json goes first, so that it never names what is gone.
    """
    for path in sorted(files, key=lambda path: (path.name != "state.json", path.name)):
        if path.is_dir() and not path.is_symlink():
            continue
        with explain_disk_errors(str(path)):
            path.unlink(missing_ok=True)
    for folder in {path.parent for path in files}:
        _remove_empty(folder)


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not empty, or already removed
        folder.rmdir()
        sync_folder(folder.parent)


def removal_report(removed: Sequence[StoredFiles], root: Path, limit: int) -> str:
    """One sentence about what was removed."""
    names = [entry.folder.relative_to(root).as_posix() for entry in removed[:5]]
    if len(removed) > 5:
        names.append("…")
    megabytes = sum(entry.size for entry in removed) / 1e6
    return (
        f"{len(removed)} stored results that were unused for longest were removed, {megabytes:.1f} MB, so that all runs"
        f" stay within {limit / 1e9:g} GB (GRAFT_STORE_GB): {', '.join(names)}"
    )
