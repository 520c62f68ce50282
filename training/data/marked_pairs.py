"""Writes the preference pairs that a person marks: `NAME.win.jpg`, `NAME.lose.jpg`, and their caption `NAME.txt`."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from pathlib import Path

from ...storage.atomic import make_folders, sync_folder, write_whole
from ...storage.digest import sha256, sha256_of_file
from ...storage.file_list import names_in
from .preference_files import LOSE, WIN

_WIN, _LOSE = f".{WIN}.jpg", f".{LOSE}.jpg"
_writing = threading.Lock()


class PairChangedError(ValueError):
    """A file of the pair's name holds another picture."""


@dataclass(frozen=True)
class MarkedPair:
    """What became of a mark: the pair's name, whether it has a caption file, and how many pairs the folder has."""

    name: str
    captioned: bool
    pairs: int


@dataclass(frozen=True)
class KeptPair:
    """A whole pair of a folder: its name, and the sha256 of both pictures."""

    name: str
    better: str
    worse: str


def keep_pair(folder: Path, title: str, better: bytes, worse: bytes, caption: str) -> MarkedPair:
    """Keep two JPEG files as a pair. The same two again, the other way round, replace that pair; an empty caption makes
    no caption file, and one that is there stays.

    The pair's name is the title and a digest of the two pictures, so other pictures never get its name. Raises
    ValueError for the same picture twice, PairChangedError, and OSError that names the file. After an OSError none of
    the files is left that were not there before.
    """
    if better == worse:
        raise ValueError("both previews are the same picture; a pair needs two")
    name = f"{title}-{_digest(better, worse)}"
    win, lose, text = (folder / f"{name}{ending}" for ending in (_WIN, _LOSE, ".txt"))
    with _writing:
        make_folders(folder)
        _check_own(win, (better, worse))
        _check_own(lose, (better, worse))
        files = {lose: worse, win: better}
        if caption and not text.exists():
            files = {text: caption.encode(), **files}
        _write(files)
        return MarkedPair(name, text.exists(), len(_names(folder)))


def kept_pairs(folder: Path) -> list[KeptPair]:
    """The whole pairs of a folder that were marked; none where there is no folder. Raises OSError."""
    with _writing:
        return [
            KeptPair(name, sha256_of_file(folder / (name + _WIN)), sha256_of_file(folder / (name + _LOSE)))
            for name in _names(folder)
        ]


def _digest(*pictures: bytes) -> str:
    """12 digits, the same for the pictures in any order."""
    digests = sorted(sha256(picture).hexdigest() for picture in pictures)
    return sha256("".join(digests).encode()).hexdigest()[:12]


def _check_own(path: Path, pictures: tuple[bytes, bytes]) -> None:
    if path.exists() and path.read_bytes() not in pictures:
        raise PairChangedError(f"{path.name} has been changed since it was marked; remove it, then mark the two again")


def _write(files: dict[Path, bytes]) -> None:
    new = [path for path in files if not path.exists()]
    try:
        for path, content in files.items():
            if path in new or path.read_bytes() != content:
                write_whole(path, [content], shared=True)
        sync_folder(next(iter(files)).parent)
    except OSError:
        for path in new:
            with contextlib.suppress(OSError):  # the first error counts
                path.unlink(missing_ok=True)
        raise


def _names(folder: Path) -> list[str]:
    """The names of a folder's whole pairs, in order."""
    files = set(names_in(folder))
    better = [file.removesuffix(_WIN) for file in files if file.endswith(_WIN)]
    return sorted(name for name in better if name + _LOSE in files)
