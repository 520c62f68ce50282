"""Atomic writes: a file appears complete or not at all, and what was written survives a power cut (fsync)."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path

from .disk_errors import disk_errors_at

DRAFT = ".partial"  # suffix of a file that is still being written


def write_whole(path: str | os.PathLike[str], chunks: Iterable[bytes], shared: bool = False) -> None:
    """Write a file that appears complete or not at all: a draft beside it, fsync, then rename. Raises OSError that
    names the file.

    `shared` gives the draft a hidden name of its own, for files that several processes may write at the same time.
    """
    path = os.fspath(path)
    draft = f"{path}{DRAFT}"
    if shared:
        draft = os.path.join(os.path.dirname(path), f".{secrets.token_hex(8)}{DRAFT}")
    try:
        with disk_errors_at(path):
            with open(draft, "wb") as file:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            move_file(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error counts; the next write of this file replaces the draft
            os.remove(draft)
        raise


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
    with disk_errors_at(path):
        os.rename(path, aside)
    return aside


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
    with disk_errors_at(os.fspath(folder)):
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
        with disk_errors_at(str(new)):
            new.mkdir(exist_ok=True)
        sync_folder(new.parent)
    return missing
