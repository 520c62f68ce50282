"""Opens files for reading, and nothing that only looks like one: opening a pipe waits until somebody writes into it."""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
# Windows has no O_NONBLOCK, and needs O_BINARY.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)


class NotAFile(OSError):
    """What has the name of a file is a folder, a pipe or a device."""


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """A file, open for reading its bytes; links are followed. It never waits, as opening a pipe would.

    Raises NotAFile, an OSError, when there is something else under the name; OSError as `open` does.
    """
    require_regular(path)
    descriptor = os.open(path, _FLAGS)  # without waiting: it may be another one by now
    try:
        _require(os.fstat(descriptor).st_mode, path)
    except NotAFile:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def require_regular(path: str | os.PathLike[str]) -> None:
    """Raises NotAFile when there is something else than a file under the name, OSError when nothing is there: for
    libraries that open a path by themselves.
    """
    _require(os.stat(path).st_mode, path)


def _require(mode: int, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise NotAFile(number, f"it is {kind}, not a file", os.fspath(path))
