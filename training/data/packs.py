"""Packs: files of the cache that hold several entries, and the index that finds an entry without opening them.

A pack is a safetensors file; its metadata name its entries, each with the digest of its contents. Its name is the hash
of these metadata. The index holds the same by the pack's name and size; what it lacks is read from the packs' headers.
An index has thousands of entries, so they are kept as texts and tuples, which Python's garbage collector leaves alone.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...storage.digest import sha256, tensor_bytes
from ...storage.safetensors import load_safetensors, read_header

Shapes = dict[str, tuple[int, ...]]  # by the tensor's name
Facts = Mapping[str, tuple[str, str, Shapes]]  # by key: digest of the contents, plain values as JSON, shapes
_Entry = tuple[str, str, str, tuple[tuple[str, tuple[int, ...]], ...]]  # place, digest, plain values, shapes
FOLDER = "packs"
ENTRIES = "entries"  # of a pack's metadata: its facts as JSON
_SUFFIX = ".safetensors"


@dataclass(frozen=True)
class PackedEntry:
    """An entry of a pack: the digest of its contents, its plain values as JSON, and the shapes of its tensors."""

    path: str
    key: str
    digest: str
    values: str
    shapes: Shapes


def path(folder: Path, kind: str, name: str) -> Path:
    """Where the pack of that name lies in a cache."""
    return folder / kind / FOLDER / f"{name}{_SUFFIX}"


def tensor_name(key: str, name: str) -> str:
    """The name of an entry's tensor in its pack."""
    return f"{key}/{name}"


def header(facts: Facts) -> tuple[str, dict[str, str]]:
    """(name, metadata) of the pack with these entries."""
    text = json.dumps(facts, sort_keys=True)
    name = sha256(text.encode()).hexdigest()
    return name, {ENTRIES: text, "digest": name}


def read_tensors(entry: PackedEntry) -> dict[str, Tensor]:
    """Copies of an entry's tensors. Raises ValueError when its pack lacks one."""
    views, _ = load_safetensors(entry.path)
    tensors: dict[str, Tensor] = {}
    for name in entry.shapes:
        view = views.get(tensor_name(entry.key, name))
        if view is None:
            raise ValueError(f"{entry.path}: it has no tensor {name} of an entry")
        tensors[name] = view.clone()  # a copy, because the file may be replaced
    return tensors


def tensor_of(text: str) -> Tensor:
    """A text as a tensor of bytes."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def text_of(tensor: Tensor) -> str:
    """The text of such a tensor."""
    return bytes(tensor_bytes(tensor)).decode()


class PackIndex:
    """Which pack of a cache has which entry."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.has_changed = False  # since the index was stored
        self._packs: dict[str, tuple[int, str]] = {}  # by place below the folder: size, and its facts as JSON
        self._entries: dict[str, dict[str, _Entry]] = {}  # by kind and key
        self._shapes: dict[Any, Any] = {}  # those of many entries are the same

    def read(self, kinds: Iterable[str], known: str | None) -> list[str]:
        """Find the packs of these kinds. What the stored index `known` lacks is read from their headers. Returns what
        is wrong with those that are damaged, which are removed.
        """
        stored = {}
        if known is not None:
            stored = json.loads(known)
        problems: list[str] = []
        for kind in kinds:
            for name, size in _files_in(self.folder / kind / FOLDER):
                place = f"{kind}/{FOLDER}/{name}"
                file = self.folder / kind / FOLDER / name
                size_and_entries = stored.get(place)
                if size_and_entries is None or size_and_entries[0] != size:
                    self.has_changed = True
                    try:
                        size_and_entries = size, _entries_in_header(file)
                    except FileNotFoundError:  # another process has removed it since
                        continue
                    except OSError as error:
                        problems.append(str(error))
                        continue
                    except ValueError as error:
                        problems.append(str(error))
                        with contextlib.suppress(OSError):  # a read-only cache
                            file.unlink()
                        continue
                self._put(kind, name, *size_and_entries)
        self.has_changed |= len(stored) != len(self._packs)
        return problems

    def find(self, kind: str, key: str) -> PackedEntry | None:
        """The entry of a key; None when no pack has it."""
        entry = self._entries.get(kind, {}).get(key)
        if entry is None:
            return None
        place, digest, values, shapes = entry
        return PackedEntry(os.path.join(self.folder, *place.split("/")), key, digest, values, dict(shapes))

    def add(self, kind: str, file: Path, entries: str) -> None:
        """Note a pack that was written, with `ENTRIES` of its metadata."""
        with contextlib.suppress(FileNotFoundError):  # another process has removed it since
            self._put(kind, file.name, file.stat().st_size, entries)
            self.has_changed = True

    def forget(self, file: str) -> None:
        """Leave out the entries of a pack."""
        self.has_changed = True
        place = os.path.relpath(file, self.folder).replace(os.sep, "/")
        self._packs.pop(place, None)
        for entries in self._entries.values():
            for key, entry in list(entries.items()):
                if entry[0] == place:
                    del entries[key]

    def text(self) -> str:
        """What is stored of it."""
        return json.dumps(self._packs)

    def _put(self, kind: str, name: str, size: int, entries: str) -> None:
        place = f"{kind}/{FOLDER}/{name}"
        self._packs[place] = size, entries
        by_key = self._entries.setdefault(kind, {})
        for key, (digest, values, shapes) in json.loads(entries).items():
            tuples = tuple((name, tuple(shape)) for name, shape in shapes.items())
            by_key[key] = place, digest, values, self._shapes.setdefault(tuples, tuples)


def _files_in(folder: Path) -> list[tuple[str, int]]:
    """(name, size) of every pack in a folder, by name."""
    found: list[tuple[str, int]] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(_SUFFIX):
                    with contextlib.suppress(FileNotFoundError):  # another process has removed it since
                        found.append((entry.name, os.stat(entry.path).st_size))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found)


def _entries_in_header(file: Path) -> str:
    """The facts about a pack's entries as its header has them. Raises ValueError when that is not what was written."""
    _, metadata = read_header(str(file))
    text = metadata.get(ENTRIES, "")
    if sha256(text.encode()).hexdigest() != metadata.get("digest"):
        raise ValueError(f"{file}: its header is not what was written")
    return text
