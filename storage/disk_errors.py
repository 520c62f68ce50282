"""Explains errors of a full, broken or read-only disk: which file it was, and what to do next."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

NEXT_STEPS = {  # by the system's error number
    errno.ENOSPC: "free some space there, then do the same again: what was stored before is whole",
    errno.EDQUOT: (
        "your quota is used up; free some space there, then do the same again: what was stored before is whole"
    ),
    errno.EFBIG: (
        "the drive or this process (ulimit -f) allows no larger files; write to another drive or raise the limit"
    ),
    errno.EIO: "the drive fails; write to another one, and check this one before you trust it",
    errno.EROFS: "it can only be read; choose another output folder, or make the drive writable",
    errno.EACCES: "this user may not write there; choose another output folder, or grant the right to",
    errno.EPERM: "this user may not write there; choose another output folder, or grant the right to",
}


@contextlib.contextmanager
def explain_disk_errors(path: str) -> Iterator[None]:
    """Errors of the system inside the block, which writes to `path`, name the file and say what to do next."""
    try:
        yield
    except OSError as error:
        raise add_next_step(error, path) from error


@contextlib.contextmanager
def ignore_read_only() -> Iterator[None]:
    """What the block would write or remove stays as it is on a disk that can only be read."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EROFS:
            raise


def add_next_step(error: OSError, path: str) -> OSError:
    """A system error with the file's name (`path`, unless it names one itself) and with what to do next."""
    if error.errno is None:  # not an error of the system
        return error
    message = error.strerror or str(error)
    next_step = NEXT_STEPS.get(error.errno)
    if next_step is not None and next_step not in message:
        message = f"{message} ({next_step})"
    return OSError(error.errno, message, error.filename or path)
