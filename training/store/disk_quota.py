"""Keeps all stored runs below a size limit: removes what has not been used for longest, never what this run needs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...storage.atomic import sync_folder
from ...storage.disk_errors import disk_errors_at

CACHE = "cache"  # what GraftDataset has encoded lies beside the runs and has a limit of its own
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
    for run in sorted(root.glob("*")):
        if not run.is_dir() or run.name == CACHE:
            continue
        files = [path for path in run.rglob("*") if path.is_file()]
        total += sum(map(_size, files))
        removable += _of_run(run, files)
    return removable, total


def _of_run(run: Path, files: Sequence[Path]) -> list[StoredFiles]:
    """The states of a run; what else it has left when it has none."""
    folders: dict[Path, list[Path]] = {}
    other_paths = []
    for path in files:
        if path.name.startswith("state"):
            folders.setdefault(path.parent, []).append(path)
        elif path.parent.parent == run and path.parent.name in _REST:
            other_paths.append(path)
    if folders:
        return [_together(folder, _kind(folder, paths), paths) for folder, paths in folders.items()]
    if other_paths:
        return [_together(run, "rest", other_paths)]
    return []


def _together(folder: Path, kind: str, files: Sequence[Path]) -> StoredFiles:
    return StoredFiles(folder, kind, tuple(files), sum(map(_size, files)), max(map(_time, files)))


def _kind(folder: Path, files: Iterable[Path]) -> str:
    if not any(path.name == "state.json" for path in files):
        return "orphan"
    if folder.name == "partial":
        return "partial"
    return "state"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # another process is freeing space too
        return 0


def _time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def touch(folder: Path) -> None:
    """Records that the state in a folder was used now."""
    for path in folder.glob("state*.safetensors"):
        with contextlib.suppress(OSError):  # the folder may be read-only
            os.utime(path)


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
        if entry.folder in needed or now - entry.used < _MIN_AGE.get(entry.kind, 0.0):
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
        try:
            remove(entry.files)
        except OSError:  # another process has it open: it stays, and counts in the report's total
            continue
        removed.append(entry)
        for folder in (entry.folder, entry.folder.parent):
            if folder != root:
                _remove_empty(folder)
    return removed


def _run_name(root: Path, entry: StoredFiles) -> str:
    return entry.folder.relative_to(root).parts[0]


def _in_use(root: Path, run: str, needed: Collection[Path], now: float) -> bool:
    """Whether another process works in a run's folder: there is a recent lock beside it that is not ours."""
    return root / run not in needed and now - _time(root / f".{run}.lock") < _AT_WORK


def remove(files: Collection[Path]) -> None:
    """Remove files, then their folders if nothing else is in them.

    A state.json goes first, so that it never names what is gone.
    """
    for path in sorted(files, key=lambda path: (path.name != "state.json", path.name)):
        with disk_errors_at(str(path)):
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
