"""Atomic writes: a file appears complete or not at all, and what was written survives a power cut (fsync)."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from .disk_errors import explain_disk_errors

DRAFT = ".partial"  # suffix of a file that is still being written
# error numbers of drives without hard links; EACCES is Android's, where the system forbids them
_NO_LINKS = {errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK}


def write_whole(path: str | os.PathLike[str], chunks: Iterable[bytes], shared: bool = False) -> None:
    """Write a file that appears complete or not at all: a draft beside it, fsync, then rename. Raises OSError that
    names the file.

    `shared` gives the draft a hidden name of its own, for files that several processes may write at the same time.
    """
    path = os.fspath(path)
    draft = shared_draft(path) if shared else f"{path}{DRAFT}"
    with _complete(draft, path, chunks):
        move_file(draft, path)


@contextlib.contextmanager
def whole_draft(path: str | os.PathLike[str], chunks: Iterable[bytes]) -> Iterator[str]:
    """For the block, which may rename it: a draft beside `path`, under a hidden name of its own, complete and on disk.
    Afterwards nothing is left under the draft's name.
    """
    path = os.fspath(path)
    draft = shared_draft(path)
    with _complete(draft, path, chunks):
        yield draft
        if os.path.lexists(draft):
            os.remove(draft)


def shared_draft(path: str) -> str:
    """A hidden name beside `path` for its draft, which no other draft has."""
    return os.path.join(os.path.dirname(path), f".{secrets.token_hex(8)}{DRAFT}")


class Draft:
    """A file that is written piece by piece, and renamed when it is complete."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = open(path, "wb")  # noqa: SIM115  (closed by `complete` or `discard`)

    def write(self, chunk: bytes) -> None:
        """Add bytes to the draft."""
        self._file.write(chunk)

    def complete(self) -> None:
        """Have everything on the disk; the file may then be renamed."""
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    def discard(self) -> None:
        """Remove the draft, unless it has been renamed."""
        with contextlib.suppress(OSError):  # of a buffer that no longer fits on the disk
            self._file.close()
        if os.path.lexists(self.path):
            os.remove(self.path)


_DRAFT_NAME = re.compile(r"\.[0-9a-f]{16}(\.incoming|\.partial|\.incoming\.partial)")  # of this version and before
_YOUNG = 600.0  # seconds since a draft's last write, in which its process may still be at work


def sweep_drafts(folder: str | os.PathLike[str]) -> None:
    """Remove what killed processes have left half written in a folder. Drafts that were written to in the last ten
    minutes stay, and so does whatever cannot be removed.
    """
    oldest = time.time() - _YOUNG
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not _DRAFT_NAME.fullmatch(entry.name):
                continue
            with contextlib.suppress(OSError):
                if entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_mtime < oldest:
                    os.remove(entry.path)


@contextlib.contextmanager
def _complete(draft: str, path: str, chunks: Iterable[bytes]) -> Iterator[None]:
    """For the block, which gives it the name `path`: a draft that is complete and on disk. An error removes it."""
    writing = None
    try:
        with explain_disk_errors(path):
            writing = Draft(draft)
            _take_mode(path, draft)
            for chunk in chunks:
                writing.write(chunk)
            writing.complete()
            yield
    except BaseException:
        with contextlib.suppress(OSError):  # the first error counts; the next write of this file replaces the draft
            if writing is not None:
                writing.discard()
        raise


def _take_mode(path: str, draft: str) -> None:
    """Give a draft the rights of the file that it replaces: who may not read the one may not read the other."""
    with contextlib.suppress(OSError):  # there is none, or the drive has no rights
        os.chmod(draft, os.stat(path).st_mode & 0o777)


def move_file(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Rename a file, in place of one that is there: other processes see the old file or the new one."""
    os.replace(source, target)


def set_aside(path: str | os.PathLike[str]) -> str:
    """Rename a folder that lies where a file is to be written, so that nothing in it is lost. Returns its new path;
    empty when no folder lies there. Raises OSError that names it.
    """
    path = os.fspath(path)
    if os.path.islink(path) or not os.path.isdir(path):
        return ""
    aside = f"{path}.folder-{secrets.token_hex(4)}"
    with explain_disk_errors(path):
        os.rename(path, aside)
    return aside


def move_to_free_name(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Rename a file to a name that nothing has. Raises FileExistsError when something has it, also when another process
    took it a moment ago.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _reserve(source, target)
    else:
        os.unlink(source)


def _reserve(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """The same on a drive without hard links (FAT, some network drives): an empty file reserves the name first."""
    os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    try:
        os.replace(source, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(target)
        raise


def copy_whole(source: Path, target: str | os.PathLike[str]) -> None:
    """Copy a file or a folder, with its times, so that it appears complete or not at all. What is there already stays:
    another process may have been faster.
    """
    parent = os.path.dirname(os.fspath(target))
    os.makedirs(parent, exist_ok=True)
    draft = os.path.join(parent, f".{secrets.token_hex(8)}{DRAFT}")
    try:
        if source.is_dir():
            shutil.copytree(source, draft)
        else:
            shutil.copy2(source, draft)
        if not os.path.lexists(target):
            os.rename(draft, target)
    except OSError:
        if not os.path.exists(target):
            raise
    finally:
        _remove(draft)


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.exists(path):
        os.remove(path)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Make renames in a folder durable where the system can (Windows cannot open folders)."""
    if os.name == "nt":
        return
    with explain_disk_errors(os.fspath(folder)):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_folders(folder: Path) -> list[Path]:
    """Create a folder and its parents durably; returns the new ones, outermost first. Raises OSError that names the
    folder.
    """
    missing = []
    parent = folder
    while not parent.exists():
        missing.append(parent)
        parent = parent.parent
    missing.reverse()
    for new in missing:
        with explain_disk_errors(str(new)):
            new.mkdir(exist_ok=True)
        sync_folder(new.parent)
    return missing
