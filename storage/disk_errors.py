"""Errors of a disk that is full, broken or read-only: which file it was, and what to do next."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

NEXT_STEPS = {  # by what the system says
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
def naming(path: str) -> Iterator[None]:
    """What the system says inside the block, which writes to `path`, comes out as `explained` has it."""
    try:
        yield
    except OSError as error:
        raise explained(error, path) from error


def explained(error: OSError, path: str) -> OSError:
    """An error of writing with a file's name, which writing itself and fsync do not give (`path`), and with what to do
    next.
    """
    if error.errno is None:  # not of the system
        return error
    said, way = error.strerror or str(error), NEXT_STEPS.get(error.errno)
    if way is not None and way not in said:
        said = f"{said} ({way})"
    return OSError(error.errno, said, error.filename or path)
