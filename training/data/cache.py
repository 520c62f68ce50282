"""The disk cache of latents and conditionings, under hashes of what they were made from: written whole or not at all,
verified when read, limited in size.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ...storage.digest import sha256, sha256_of_spaced_json, sha256_of_tensors
from ...storage.disk_errors import disk_errors_at
from ...storage.file_list import files_below
from ...storage.safetensors import load_safetensors, write_safetensors

FORMAT = 1
_SUFFIX = ".safetensors"
_ABANDONED = 3600.0  # seconds


def key_of(*parts: Any) -> str:
    """sha256 of plain values, the key of what is made from them."""
    return sha256_of_spaced_json([FORMAT, *parts])


class HeldFile:
    """A file that no cache of this process removes as long as this object lives."""

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.key = path, key


_HELD: weakref.WeakSet[HeldFile] = weakref.WeakSet()
_HOLDING = threading.Lock()


class Cache:
    """A folder of safetensors files by kind and key.

    `notes` for the report name damaged files, which are made again, and say when nothing can be written (a full disk).
    """

    def __init__(self, folder: Path, limit_gb: float = 20.0) -> None:
        self.folder, self.limit = folder, int(limit_gb * 2**30)
        self.read_counts: Counter[str] = Counter()  # by kind
        self.write_counts: Counter[str] = Counter()
        self.notes: list[str] = []
        self._used: set[str] = set()
        self._full = False

    def _path(self, kind: str, key: str) -> Path:
        return self.folder / kind / key[:2] / f"{key}{_SUFFIX}"

    def holds(self, kind: str, key: str) -> bool:
        """Whether the file exists; `read` checks whether it is complete."""
        return self._path(kind, key).is_file()

    def hold(self, kind: str, key: str) -> HeldFile:
        """The file of a key, which is or will be there: `trim` leaves it as long as somebody has what this returns."""
        file = HeldFile(self._path(kind, key), key)
        with _HOLDING:
            _HELD.add(file)
        return file

    def read(self, kind: str, key: str) -> tuple[dict[str, Tensor], Any] | None:
        """(tensors, plain values) that were written under a key, None when there are none or the file is damaged."""
        path = self._path(kind, key)
        if not path.is_file():
            return None
        try:
            views, metadata = load_safetensors(str(path))
            tensors = {name: view.clone() for name, view in views.items()}  # a copy, because the file may be replaced
            if metadata.get("digest") != _digest(tensors, metadata.get("values", "")):
                raise ValueError(f"{path}: its contents are not what was written")
            values = json.loads(metadata["values"])
            with contextlib.suppress(OSError):  # a read-only cache
                os.utime(path)  # the least recently used goes first
        except FileNotFoundError:  # another process has removed it since
            return None
        except (ValueError, OSError) as error:
            self.notes.append(f"cache: {error}; made again")
            return None
        self._used.add(str(path))
        self.read_counts[kind] += 1
        return tensors, values

    def write(self, kind: str, key: str, tensors: Mapping[str, Tensor], values: Any = None) -> bool:
        """Stores tensors and plain values (JSON) under a key. Returns whether that was possible."""
        self.write_counts[kind] += 1
        path, text = self._path(kind, key), json.dumps(values, sort_keys=True)
        metadata = {"digest": _digest(tensors, text), "values": text}
        try:
            with disk_errors_at(str(path)):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_safetensors(path, tensors, metadata, shared=True)
        except OSError as error:
            if not self._full:
                self.notes.append(
                    f"cache: cannot be written, what was encoded is kept in memory only: {error.strerror}"
                )
            self._full = True
            return False
        self._used.add(str(path))
        return True

    def files(self) -> list[tuple[float, int, Path]]:
        """(time of last use, bytes, path) of every file, the longest unused first."""
        files = []
        for path, status in files_below(self.folder):
            if path.suffix == _SUFFIX:
                files.append((status.st_mtime, status.st_size, path))
        return sorted(files)

    def trim(self) -> int:
        """Remove the least recently used files until the folder is within its limit, never those that this object has
        used or that are held. Returns the bytes that are left.
        """
        with _HOLDING:
            kept = self._used | {str(file.path) for file in _HELD}
        for path, status in files_below(self.folder):  # left by a crash; a recent one may belong to another process
            if path.suffix != _SUFFIX and time.time() - status.st_mtime > _ABANDONED:
                path.unlink(missing_ok=True)
        files = self.files()
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total <= self.limit:
                break
            if str(path) in kept:
                continue
            path.unlink(missing_ok=True)
            total -= size
        return total

    def report(self) -> list[str]:
        """Lines about what was read and encoded, and how large the cache is now."""
        total = self.trim()
        counts: list[str] = []
        for kind in ("latents", "texts"):
            counts.append(f"{kind} {self.read_counts[kind]} from the cache, {self.write_counts[kind]} encoded")
        lines = [
            f"cache: {'; '.join(counts)}; {total / 2**30:.2f} GB of at most {self.limit / 2**30:g} GB in {self.folder}"
        ]
        if total > self.limit:
            lines.append(
                "cache: larger than its limit, because this dataset alone is; raise cache_gb in filters or set cache:"
                " false"
            )
        return lines + self.notes


def _digest(tensors: Mapping[str, Tensor], values: str) -> str:
    return sha256(f"{sha256_of_tensors(tensors)} {values}".encode()).hexdigest()
