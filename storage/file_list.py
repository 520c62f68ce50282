"""Lists folders while other processes remove files in them: what is gone when it is looked at is left out."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}  # ELOOP: a link that leads to itself


def names_in(folder: str | os.PathLike[str]) -> list[str]:
    """The names of all files and folders in a folder, sorted; none when there is no such folder (any more)."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def files_below(
    folder: str | os.PathLike[str], wanted: Callable[[str], bool] = lambda name: True
) -> list[tuple[Path, os.stat_result]]:
    """Every file below a folder whose name is wanted, by path, with its size and times. Links to folders are not
    followed, links to nothing and folders that this user may not open are left out.
    """
    return [(Path(path), status) for path, status in names_below(folder, wanted)]


def names_below(
    folder: str | os.PathLike[str], wanted: Callable[[str], bool] = lambda name: True
) -> list[tuple[str, os.stat_result]]:
    """The same with paths as text, which take a third of the time."""
    found: list[tuple[str, os.stat_result]] = []
    for parent, _, names in os.walk(folder, onerror=_raise_unless_gone):
        for name in filter(wanted, names):
            path = os.path.join(parent, name)
            status = _status(path)
            if status is not None and stat.S_ISREG(status.st_mode):
                found.append((path, status))
    found.sort(key=lambda entry: os.path.normcase(entry[0]).split(os.sep))  # as paths, which compare slowly
    return found


def _raise_unless_gone(error: OSError) -> None:
    if error.errno not in _GONE and not isinstance(error, PermissionError):
        raise error


def _status(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
