"""One process at a time in a run's folder: a lock of the operating system, which ends with its process."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from .atomic import make_folders
from .disk_errors import explain_disk_errors

PATIENCE = 2.0  # seconds to wait for a process that is just ending
NO_LOCKS = "this drive has no locks: make sure that no second process works on the same run"
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
_HELD = {errno.EACCES, errno.EAGAIN, errno.EDEADLK}
# error numbers of network drives without locks
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}


class FolderInUse(RuntimeError):
    """Another process works in the folder: the message says which, and what to do."""


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[str]:
    """Locks a folder for the block; gives "" or a warning for the user (a drive without locks).

    The lock file `.<name>.lock` lies beside the folder and is removed at the end; one that a killed process left locks
    nothing. A folder that cannot be written needs no lock. Raises FolderInUse that names the other process, OSError
    when the disk fails.
    """
    path = folder.parent / f".{folder.name}.lock"
    try:
        make_folders(path.parent)
        with explain_disk_errors(str(path)):
            descriptor, warning = _open_locked(path, folder)
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise
        yield ""
        return
    try:
        yield warning
    finally:
        with contextlib.suppress(OSError):
            # before unlocking: a waiting process then sees that its lock file is no longer the one at this path
            path.unlink()
        os.close(descriptor)


def _open_locked(path: Path, folder: Path) -> tuple[int, str]:
    """(descriptor of the locked file, warning)."""
    end = time.monotonic() + PATIENCE
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            lock_descriptor(descriptor)
            if os.fstat(descriptor).st_ino == os.stat(path).st_ino:
                with contextlib.suppress(OSError):  # a full disk: the lock holds, only its message lacks a name
                    os.truncate(descriptor, 0)
                    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return descriptor, ""
            os.close(descriptor)  # the previous process removed it while we waited
        except FileNotFoundError:
            os.close(descriptor)
        except OSError as error:
            owner = _owner(descriptor)
            if error.errno in _UNSUPPORTED:
                return descriptor, NO_LOCKS
            os.close(descriptor)
            if error.errno not in _HELD:
                raise
            if time.monotonic() > end:
                raise FolderInUse(
                    f"{folder} is in use by {owner}: two that write the same folder would undo each other's work. Wait"
                    " for it, end it, or use another name."
                ) from error
        time.sleep(0.05)


def _owner(descriptor: int) -> str:
    try:
        return os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
    except (OSError, AttributeError):  # Windows has no pread
        return "another process"


if sys.platform == "win32":
    import msvcrt

    def lock_descriptor(descriptor: int) -> None:
        os.lseek(descriptor, 1 << 30, os.SEEK_SET)  # a byte far behind the file's text
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        os.lseek(descriptor, 0, os.SEEK_SET)

else:
    import fcntl

    def lock_descriptor(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
