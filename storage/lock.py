"""One process at a time in a run's folder: a lock of the operating system, which goes when its process does, however
that ends.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from .disk_errors import naming
from .safetensors import make_folders

PATIENCE = 2.0  # seconds that a process which is just ending may take to let go
WITHOUT = "this drive has no locks: make sure that no second process works on the same run"
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
_HELD = {errno.EACCES, errno.EAGAIN, errno.EDEADLK}
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}  # what network drives answer


class Busy(RuntimeError):
    """Another process works in the folder: the message says which, and what to do."""


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[str]:
    """For the block no other process is inside `alone` of this folder; gives "" or what there is to say (a drive
    without locks).

    The lock file lies beside the folder, as `.<name>.lock`, and is removed at the end; one that a killed process left
    is no lock. Where nothing can be written nothing needs a lock. Raises Busy naming the other process, OSError when
    the disk fails.
    """
    path = folder.parent / f".{folder.name}.lock"
    try:
        make_folders(path.parent)
        with naming(str(path)):
            number, said = _taken(path, folder)
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise
        yield ""
        return
    try:
        yield said
    finally:
        with contextlib.suppress(OSError):
            # before the lock goes: who waits for it sees that the file it has is no longer the one at this place
            path.unlink()
        os.close(number)


def _taken(path: Path, folder: Path) -> tuple[int, str]:
    """(descriptor of the locked file, what there is to say)."""
    end = time.monotonic() + PATIENCE
    while True:
        number = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(number)
            if os.fstat(number).st_ino == os.stat(path).st_ino:
                with contextlib.suppress(OSError):  # a full disk: the lock holds, and only its message lacks a name
                    os.truncate(number, 0)
                    os.write(number, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return number, ""
            os.close(number)  # the one before removed it while we waited
        except FileNotFoundError:
            os.close(number)
        except OSError as error:
            owner = _owner(number)
            if error.errno in _NO_LOCKS:
                return number, WITHOUT
            os.close(number)
            if error.errno not in _HELD:
                raise
            if time.monotonic() > end:
                raise Busy(
                    f"{folder} is in use by {owner}: two that write the same folder would undo each other's work. Wait"
                    " for it, end it, or use another name."
                ) from error
        time.sleep(0.05)


def _owner(number: int) -> str:
    try:
        return os.pread(number, 200, 0).decode(errors="replace") or "another process"
    except (OSError, AttributeError):  # Windows has no pread
        return "another process"


if sys.platform == "win32":
    import msvcrt

    def _lock(number: int) -> None:
        os.lseek(number, 1 << 30, os.SEEK_SET)  # a byte far behind what the file says
        msvcrt.locking(number, msvcrt.LK_NBLCK, 1)
        os.lseek(number, 0, os.SEEK_SET)

else:
    import fcntl

    def _lock(number: int) -> None:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
