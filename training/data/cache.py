"""The disk cache of latents and conditionings, under hashes of what they were made from: written whole or not at all,
verified when read, limited in size.

What belongs together lies in one file, a pack (packs.py): all latents of a picture, a chunk of captions. An entry that
was written by itself has a file of its own.
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
from ...storage.disk_errors import explain_disk_errors
from ...storage.file_list import names_below
from ...storage.printable import logger
from ...storage.safetensors import load_safetensors, read_header, write_safetensors
from . import packs
from .packs import PackedEntry, PackIndex, Shapes

log = logger(__name__)

FORMAT = 1
KINDS = ("latents", "texts", "pictures")  # those that are written in packs
QUANTIZED = "quantized"  # a cache below the dataset's, of quantized weights, with a limit of its own
_INDEX = "index"
_SUFFIX = ".safetensors"
_ABANDONED = 3600.0  # seconds


def key_of(*parts: Any) -> str:
    """sha256 of plain values, the key of what is made from them."""
    return sha256_of_spaced_json([FORMAT, *parts])


_INDEX_KEY = key_of("packs", 2)


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
        self.read_counts: Counter[str] = Counter()  # by kind, each entry once
        self.write_counts: Counter[str] = Counter()
        self.notes: list[str] = []
        self._counted: set[tuple[str, str]] = set()
        self._used: set[str] = set()
        self._full = False
        self._reported = False
        self._index: PackIndex | None = None

    def _path(self, kind: str, key: str) -> Path:
        return self.folder / kind / key[:2] / f"{key}{_SUFFIX}"

    def _find_packed(self, kind: str, key: str) -> PackedEntry | None:
        """Where an entry lies in a pack; None when no pack has it."""
        if self._index is None:
            self._index = self._read_index()
        return self._index.find(kind, key)

    def _read_index(self) -> PackIndex:
        known = self._read_alone(_INDEX, _INDEX_KEY)
        index = PackIndex(self.folder)
        for problem in index.read(KINDS, None if known is None else packs.text_of(known[0]["packs"])):
            self._note(f"cache: {problem}; made again")
        return index

    def holds(self, kind: str, key: str) -> bool:
        """Whether the file exists; `read` checks whether it is complete."""
        packed = self._find_packed(kind, key)
        if packed is not None and os.path.isfile(packed.path):
            return True
        return self._path(kind, key).is_file()

    def keep(self, kind: str, key: str) -> bool:
        """As `holds`, and counts the entry as used: `trim` leaves it."""
        packed = self._find_packed(kind, key)
        if packed is not None and self._use(packed.path):
            return True
        return self._use(str(self._path(kind, key)))

    def hold(self, kind: str, key: str) -> HeldFile:
        """The file of a key, which is or will be there: `trim` leaves it as long as somebody has what this returns."""
        file = HeldFile(self._path(kind, key), key)
        with _HOLDING:
            _HELD.add(file)
        return file

    def shapes(self, kind: str, key: str) -> Shapes | None:
        """The shapes of an entry's tensors by name, None when there is no such entry. Reads no tensors, and counts the
        entry as used.
        """
        packed = self._find_packed(kind, key)
        if packed is not None and self._use(packed.path):
            self._count(kind, key)
            return packed.shapes
        path = str(self._path(kind, key))
        if not self._use(path):
            return None
        try:
            tensors, _ = read_header(path)
        except FileNotFoundError:  # another process has removed it since
            return None
        except (ValueError, OSError) as error:
            self._note(f"cache: {error}; made again")
            return None
        self._count(kind, key)
        return {name: info.shape for name, info in tensors.items()}

    def read(self, kind: str, key: str) -> tuple[dict[str, Tensor], Any] | None:
        """What was written under a key.

        Args:
            kind: the folder of such entries.
            key: from `key_of`.

        Returns:
            (tensors, plain values), None when there are none or the file is damaged.
        """
        packed = self._find_packed(kind, key)
        found = None
        if packed is not None:
            found = self._read_packed(packed)
        if found is None:
            found = self._read_alone(kind, key)
        if found is not None:
            self._count(kind, key)
        return found

    def _read_packed(self, entry: PackedEntry) -> tuple[dict[str, Tensor], Any] | None:
        if not self._use(entry.path):
            return None
        if not entry.shapes:  # all of it is in the index
            return {}, json.loads(entry.values)
        try:
            tensors = packs.read_tensors(entry)
            if entry.digest != _digest(tensors, entry.values):
                raise ValueError(f"{entry.path}: its contents are not what was written")
        except FileNotFoundError:  # another process has removed it since
            return None
        except ValueError as error:
            self._note(f"cache: {error}; made again")
            assert self._index is not None
            self._index.forget(entry.path)  # so that a damaged pack never hides what is made again
            with contextlib.suppress(OSError):  # a read-only cache
                os.unlink(entry.path)
            return None
        except OSError as error:
            self._note(f"cache: {error}; made again")
            return None
        return tensors, json.loads(entry.values)

    def _read_alone(self, kind: str, key: str) -> tuple[dict[str, Tensor], Any] | None:
        path = self._path(kind, key)
        if not path.is_file():
            return None
        try:
            views, metadata = load_safetensors(str(path))
            tensors = {name: view.clone() for name, view in views.items()}  # a copy, because the file may be replaced
            if metadata.get("digest") != _digest(tensors, metadata.get("values", "")):
                raise ValueError(f"{path}: its contents are not what was written")
            values = json.loads(metadata["values"])
        except FileNotFoundError:  # another process has removed it since
            return None
        except (ValueError, OSError) as error:
            self._note(f"cache: {error}; made again")
            return None
        self._use(str(path))
        return tensors, values

    def _use(self, path: str) -> bool:
        """Mark a file as used, once: the least recently used goes first. Returns whether it exists."""
        if path in self._used:
            return True
        try:
            os.utime(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # a read-only cache
            if not os.path.isfile(path):
                return False
        self._used.add(path)
        return True

    def _count(self, kind: str, key: str) -> None:
        if (kind, key) not in self._counted:
            self._counted.add((kind, key))
            self.read_counts[kind] += 1

    def _note(self, text: str) -> None:
        self.notes.append(text)
        if self._reported:
            log.warning("Graft: %s", text)

    def write(self, kind: str, key: str, tensors: Mapping[str, Tensor], values: Any = None) -> bool:
        """Store an entry.

        Args:
            kind: the folder of such entries.
            key: from `key_of`.
            tensors: by name.
            values: plain values, as JSON.

        Returns:
            Whether that was possible: a full disk is not an error.
        """
        self.write_counts[kind] += 1
        text = json.dumps(values, sort_keys=True)
        return self._write(self._path(kind, key), tensors, {"digest": _digest(tensors, text), "values": text})

    def write_together(self, kind: str, entries: Mapping[str, tuple[Mapping[str, Tensor], Any]]) -> bool:
        """Store several entries in one pack.

        Args:
            kind: the folder of such entries.
            entries: tensors and plain values by key.

        Returns:
            Whether that was possible.
        """
        if not entries:
            return True
        self.write_counts[kind] += len(entries)
        tensors: dict[str, Tensor] = {}
        facts: dict[str, tuple[str, str, Shapes]] = {}
        for key, (own, values) in entries.items():
            text = json.dumps(values, sort_keys=True)
            facts[key] = _digest(own, text), text, {name: tuple(tensor.shape) for name, tensor in own.items()}
            for name, tensor in own.items():
                tensors[packs.tensor_name(key, name)] = tensor
        name, metadata = packs.header(facts)
        path = packs.path(self.folder, kind, name)
        if not self._write(path, tensors, metadata):
            return False
        if self._index is None:
            self._index = self._read_index()
        self._index.add(kind, path, metadata[packs.ENTRIES])
        return True

    def _write(self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bool:
        try:
            with explain_disk_errors(str(path)):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_safetensors(path, tensors, metadata, shared=True)
        except OSError as error:
            if not self._full:
                self._note(f"cache: cannot be written, what was made is kept in memory only: {error.strerror}")
            self._full = True
            return False
        self._used.add(str(path))
        return True

    def trim(self) -> int:
        """Remove the least recently used files until the folder is within its limit, never those that this object has
        used or that are held. Returns the bytes that are left.
        """
        with _HOLDING:
            kept = self._used | {str(file.path) for file in _HELD}
        files: list[tuple[float, int, str]] = []
        apart = os.path.join(self.folder, QUANTIZED, "")
        for path, status in names_below(self.folder):
            if path.startswith(apart):
                continue
            if path.endswith(_SUFFIX):
                files.append((status.st_mtime, status.st_size, path))
            elif time.time() - status.st_mtime > _ABANDONED:  # left by a crash; a recent one may be another process's
                _is_removed(path)
        files.sort()
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total <= self.limit:
                break
            if path not in kept and _is_removed(path):
                total -= size
        return total

    def report(self) -> list[str]:
        """Lines about what was read and encoded, and how large the cache is now. What is damaged and found later is
        logged.
        """
        if self._index is not None and self._index.has_changed:
            self.write(_INDEX, _INDEX_KEY, {"packs": packs.tensor_of(self._index.text())})
        total = self.trim()
        self._reported = True
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


def _is_removed(path: str) -> bool:
    """Remove a file; returns whether it is gone. It stays in a read-only cache, and where another process has it open
    on Windows.
    """
    try:
        Path(path).unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _digest(tensors: Mapping[str, Tensor], values: str) -> str:
    return sha256(f"{sha256_of_tensors(tensors)} {values}".encode()).hexdigest()
