"""How much the stored runs may take on disk together: what was unused for longest goes first, never what the run at
hand needs.
"""

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
_UNFINISHED = (
    24 * 3600.0
)  # seconds: snapshots on the way to a result are left alone so long, another process may be at it
_ABANDONED = 3600.0  # seconds: what a crash left and nothing names
_AT_WORK = 7 * 24 * 3600.0  # seconds: a younger lock beside a run's folder says that another process works in it


@dataclass(frozen=True)
class Held:
    """Files that are kept or go together: a state, or what else a run without states has left.

    `kind` is "state", "partial" (a snapshot on the way), "orphan" (tensors that no state.json names) or "rest"; `used`
    is when they were written or read last, in seconds since 1970.
    """

    folder: Path
    kind: str
    files: tuple[Path, ...]
    size: int
    used: float


def held(root: Path) -> tuple[list[Held], int]:
    """(what could be removed of every run below `root`, bytes of all their files)."""
    found: list[Held] = []
    total = 0
    for run in sorted(path for path in root.glob("*") if path.is_dir() and path.name != CACHE):
        every = [path for path in run.rglob("*") if path.is_file()]
        total += sum(map(_size, every))
        folders: dict[Path, list[Path]] = {}
        for path in every:
            if path.name.startswith("state"):
                folders.setdefault(path.parent, []).append(path)
        states = [_held(folder, _kind(folder, files), files) for folder, files in folders.items()]
        found += states
        if not states:
            rest = [path for path in every if path.parent in [run / name for name in _REST]]
            found += [_held(run, "rest", rest)] if rest else []
    return found, total


def _held(folder: Path, kind: str, files: Sequence[Path]) -> Held:
    return Held(folder, kind, tuple(files), sum(map(_size, files)), max(map(_time, files)))


def _kind(folder: Path, files: Iterable[Path]) -> str:
    if not any(path.name == "state.json" for path in files):
        return "orphan"
    if folder.name == "partial":
        return "partial"
    return "state"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # another process makes room too
        return 0


def _time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def touch(folder: Path) -> None:
    """Note that the state in a folder was used now."""
    for path in folder.glob("state*.safetensors"):
        with contextlib.suppress(OSError):  # a folder that may be read only
            os.utime(path)


def to_go(found: Iterable[Held], excess: int, needed: Collection[Path], now: float) -> list[Held]:
    """What to remove so that `excess` bytes become free, or as many as can be: leftovers, then the longest unused,
    unfinished runs last.

    Never what is in a folder of `needed`, nor what another process may be writing.
    """
    order = {"orphan": 0, "state": 1, "rest": 1, "partial": 2}
    least = {"orphan": _ABANDONED, "partial": _UNFINISHED}
    free = (one for one in found if one.folder not in needed and now - one.used >= least.get(one.kind, 0.0))
    chosen = []
    for one in sorted(free, key=lambda one: (order[one.kind], one.used, str(one.folder))):
        if excess <= 0:
            break
        chosen.append(one)
        excess -= one.size
    return chosen


def make(root: Path, limit: int, coming: int, needed: Collection[Path]) -> list[Held]:
    """Remove what must go so that `coming` more bytes stay within `limit`; what was removed.

    Folders in `needed` stay as they are; if a run's own folder is among them, it is the one that this process works in.
    """
    found, total = held(root)
    others = {one.folder.relative_to(root).parts[0] for one in found} - {
        folder.name for folder in needed if folder.parent == root
    }
    at_work = {run for run in others if time.time() - _time(root / f".{run}.lock") < _AT_WORK}
    found = [one for one in found if one.folder.relative_to(root).parts[0] not in at_work]
    gone = []
    for one in to_go(found, total + coming - limit, needed, time.time()):
        try:
            remove(one.files)
        except OSError:  # somebody has it open: it stays, and the report's total shows it
            continue
        gone.append(one)
        for folder in (one.folder, one.folder.parent):
            if folder != root:
                _remove_empty(folder)
    return gone


def remove(files: Collection[Path]) -> None:
    """Remove files, a state.json first, so that it never names what is gone; then their folders if nothing else is in
    them.
    """
    for path in sorted(files, key=lambda path: (path.name != "state.json", path.name)):
        with disk_errors_at(str(path)):
            path.unlink(missing_ok=True)
    for folder in {path.parent for path in files}:
        _remove_empty(folder)


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # something else is in it, or it is gone
        folder.rmdir()
        sync_folder(folder.parent)


def said(gone: Sequence[Held], root: Path, limit: int) -> str:
    """What was removed, in a sentence."""
    some = [one.folder.relative_to(root).as_posix() for one in gone[:5]] + (["…"] if len(gone) > 5 else [])
    freed = sum(one.size for one in gone) / 1e6
    return (
        f"{len(gone)} stored results that were unused for longest were removed, {freed:.1f} MB, so that all runs stay"
        f" within {limit / 1e9:g} GB (GRAFT_STORE_GB): {', '.join(some)}"
    )
