"""The folders below another one that hold pictures or clips, with how many; from the names of the files alone."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from .clip_files import is_frame_folder, is_video
from .file_names import is_of_system
from .images import MASK_FOLDER, is_image


@dataclass
class PictureFolders:
    """How many pictures each folder has with its subfolders, by relative path; `cut` when not everything was looked at
    within the limits.
    """

    counts: dict[str, int] = field(default_factory=dict)
    cut: bool = False


@dataclass(frozen=True)
class _LastLook:
    """What a folder held when it was last looked at."""

    changed: int  # its modification time in ns
    pictures: int
    folders: tuple[str, ...]
    entries: int


_seen: dict[str, _LastLook] = {}  # by path; of folders that had been left alone for a while
_MOST_SEEN = 20_000
_SETTLED = 2_000_000_000  # ns after which a further change gives a folder another modification time


def picture_folders(root: str, most_entries: int = 500_000, seconds: float = 5.0) -> PictureFolders:
    """Count the pictures and clips of every folder below `root`. Folders without any are listed only where they lie
    right in `root`. Linked and hidden folders are left out, as a dataset leaves them out.
    """
    found = PictureFolders()
    end = time.monotonic() + seconds
    looked_at = 0
    waiting = [""]
    while waiting:
        name = waiting.pop()
        seen = _look(os.path.join(root, name), most_entries - looked_at)
        looked_at += seen.entries
        waiting += [f"{name}/{folder}".lstrip("/") for folder in seen.folders]
        _add(found.counts, name, seen.pictures)
        if looked_at > most_entries or time.monotonic() > end:
            found.cut = bool(waiting) or looked_at > most_entries
            break
    found.counts = dict(sorted(found.counts.items()))
    return found


def _look(path: str, most: int) -> _LastLook:
    """What lies in a folder, at most one entry more than `most`. It is not read again while its time stays."""
    now = time.time_ns()
    try:
        changed = os.stat(path).st_mtime_ns
    except OSError:
        return _LastLook(0, 0, (), 0)
    known = _seen.get(path)
    if known is not None and known.changed == changed and known.entries <= most:
        return known
    pictures = entries = 0
    folders: list[str] = []
    for entry in _entries(path):
        entries += 1
        if entries > most:
            break
        if _is_read(entry):
            pictures += 1
        elif is_of_system(entry.name) or entry.name.lower() == MASK_FOLDER:
            continue
        elif entry.is_dir(follow_symlinks=False):
            folders.append(entry.name)
    seen = _LastLook(changed, pictures, tuple(folders), entries)
    if entries <= most and now - changed > _SETTLED:
        if len(_seen) >= _MOST_SEEN:
            _seen.clear()
        _seen[path] = seen
    return seen


def _is_read(entry: os.DirEntry[str]) -> bool:
    """Whether a dataset reads it as one picture or clip."""
    if is_frame_folder(entry.name):
        return entry.is_dir(follow_symlinks=False)
    return (is_image(entry.name) or is_video(entry.name)) and entry.is_file()


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    """What lies in a folder; nothing where it has gone or may not be opened."""
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError:
        return


def _add(counts: dict[str, int], name: str, own: int) -> None:
    """Count a folder's own pictures for it and for every folder around it."""
    if name and "/" not in name:
        counts.setdefault(name, 0)
    while name and own:
        counts[name] = counts.get(name, 0) + own
        name = name.rpartition("/")[0]


def file_names(root: str, most: int) -> list[str] | None:
    """The relative paths of all files below a folder; None when there are more than `most`."""
    names: list[str] = []
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        for entry in _entries(os.path.join(root, folder)):
            name = f"{folder}/{entry.name}".lstrip("/")
            if entry.is_dir(follow_symlinks=False):
                waiting.append(name)
            else:
                names.append(name)
            if len(names) + len(waiting) > most:
                return None
    return sorted(names)
