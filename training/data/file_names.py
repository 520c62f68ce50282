"""Finds the files that belong to a picture by their names, as disks and archives spell them: an ending in capitals, and
é as one character or as two, which are the same to Windows and macOS.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable
from pathlib import Path

# Folders in which systems, NAS devices and archives keep what is none of the user's pictures; in lower case.
SYSTEM_FOLDERS = (
    "@eadir",  # Synology: thumbnails
    "@recently-snapshot",
    "@recycle",  # QNAP
    "@__thumb",
    "#recycle",
    "#snapshot",
    "$recycle.bin",  # Windows
    "system volume information",
    "__macosx",  # archives of macOS
    "__pycache__",
    "lost+found",
)
_THUMBNAIL_FOLDERS = ("thumbs", "thumbnails", "_thumbs", "_thumbnails", "thumb", "thumbnail")


def is_of_system(folder: str) -> bool:
    """Whether a folder of this name holds none of the user's pictures: a hidden one, or one of the system's."""
    return folder.startswith(".") or folder.lower() in SYSTEM_FOLDERS


def drop_thumbnails(paths: Iterable[Path]) -> list[Path]:
    """Pictures without those that lie in a folder as `thumbs` below another one of their name."""
    paths = list(paths)
    candidates = {path for path in paths if path.parent.name.lower() in _THUMBNAIL_FOLDERS}
    if not candidates:
        return paths
    stems = {(path.parent, compose(path.stem)) for path in paths}
    return [path for path in paths if path not in candidates or (path.parent.parent, compose(path.stem)) not in stems]


def compose(name: str) -> str:
    """A name with each accented letter as one character, however a disk has it."""
    if name.isascii():
        return name
    return unicodedata.normalize("NFC", name)


def printable(text: str) -> str:
    """A text with the bytes of file names that are not UTF-8 as \\udc83 and so on: such names can't be written."""
    return text.encode("utf-8", "backslashreplace").decode()


def is_text(name: str) -> bool:
    """Whether it can be written as UTF-8: a file's name may be any bytes, and JSON may have half a character."""
    return printable(name) == name


class FolderNames:
    """Finds files whose names may be spelled otherwise. A folder is listed once, so one of these is for one reading."""

    def __init__(self) -> None:
        self._folders: dict[str, tuple[str, dict[str, list[str]]] | None] = {}

    def first(self, paths: Iterable[Path | str]) -> Path | None:
        """The first of the paths that is a file, under its own name on the disk; None without one.

        Capitals and small letters are the same in endings and folders; in a name too, unless several files have it.
        """
        for path in paths:
            found = self._find(os.fspath(path))
            if found is not None:
                return Path(found)
        return None

    def find_beside(self, image: Path, suffixes: Iterable[str]) -> Path | None:
        """The first of the files that have an image's name with one of these suffixes in place of its own."""
        stem = str(image).removesuffix(image.suffix)
        return self.first(stem + suffix for suffix in suffixes)

    def _find(self, path: str) -> str | None:
        folder, name = os.path.split(path)
        if folder not in self._folders and os.path.isfile(path):  # False for names too long, too
            return path
        listed = self._list_folder(folder)
        if listed is None:
            return None
        place, names = listed
        stem, suffix = os.path.splitext(name)
        alike = names.get(_key(stem), [])
        found = _best([one for one in alike if os.path.splitext(one)[1].lower() == suffix.lower()], name, alike)
        if found is None:
            return None
        path = os.path.join(place, found)
        return path if os.path.isfile(path) else None

    def _list_folder(self, folder: str) -> tuple[str, dict[str, list[str]]] | None:
        """(the folder as the disk has it, its names by `_key` of what is in front of their endings)."""
        if folder not in self._folders:
            self._folders[folder] = self._list(folder)
        return self._folders[folder]

    def _list(self, folder: str) -> tuple[str, dict[str, list[str]]] | None:
        try:
            found = sorted(os.listdir(folder or os.curdir))
        except (FileNotFoundError, NotADirectoryError):
            return self._list_of_other_spelling(folder)
        except OSError:  # one that this user may not open, or whose name is too long
            return None
        names: dict[str, list[str]] = {}
        for name in found:
            names.setdefault(_key(os.path.splitext(name)[0]), []).append(name)
        return folder, names

    def _list_of_other_spelling(self, folder: str) -> tuple[str, dict[str, list[str]]] | None:
        parent, name = os.path.split(folder)
        if not name or parent == folder:
            return None
        around = self._list_folder(parent)
        if around is None:
            return None
        place, names = around
        alike = [one for one in names.get(_key(os.path.splitext(name)[0]), []) if _key(one) == _key(name)]
        if len(alike) != 1:
            return None
        other = os.path.join(place, alike[0])
        return None if other == folder else self._list_folder(other)


def _best(candidates: list[str], name: str, alike: list[str]) -> str | None:
    """Which of the files that are spelled almost like `name` is meant; `alike` are all with such a name."""
    if name in candidates:
        return name
    stem = compose(os.path.splitext(name)[0])
    same = [one for one in candidates if compose(os.path.splitext(one)[0]) == stem]
    if same:
        return same[0]
    if len(candidates) != 1:
        return None
    own = compose(os.path.splitext(candidates[0])[0])
    is_of_another = any(one != candidates[0] and compose(os.path.splitext(one)[0]) == own for one in alike)
    return None if is_of_another else candidates[0]


def _key(name: str) -> str:
    return compose(name).casefold()
