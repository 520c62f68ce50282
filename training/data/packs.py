"""Packs: files of the cache that hold several entries, and the index that finds an entry without opening them.

A pack is a safetensors file; its metadata name its entries, each with the digest of its contents. Its name is the hash
of these metadata. The index holds the same by the pack's name and size; what it lacks is read from the packs' headers.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...storage.digest import sha256, tensor_bytes
from ...storage.safetensors import load_safetensors, read_header

Shapes = dict[str, tuple[int, ...]]  # by the tensor's name
Facts = Mapping[str, tuple[str, str, Shapes]]  # by key: digest of the contents, plain values as JSON, shapes
FOLDER = "packs"
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
    return name, {"entries": text, "digest": name}


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
        self._packs: dict[str, tuple[int, Facts]] = {}  # by place below the folder: size, and what it holds
        self._places: dict[tuple[str, str], str] = {}  # of the pack that has an entry

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
                size_and_facts = stored.get(place)
                if size_and_facts is None or size_and_facts[0] != size:
                    self.has_changed = True
                    try:
                        size_and_facts = size, _facts_in_header(file)
                    except FileNotFoundError:  # another process has removed it since
                        continue
                    except OSError as error:
                        problems.append(str(error))
                        continue
                    except ValueError as error:
                        problems.append(str(error))
                        with contextlib.suppress(OSError):  # a read-only cache
                            file.unlink(missing_ok=True)
                        continue
                self._put(kind, name, *size_and_facts)
        self.has_changed |= len(stored) != len(self._packs)
        return problems

    def find(self, kind: str, key: str) -> PackedEntry | None:
        """The entry of a key; None when no pack has it."""
        place = self._places.get((kind, key))
        if place is None:
            return None
        digest, values, shapes = self._packs[place][1][key]
        tuples = {name: tuple(shape) for name, shape in shapes.items()}
        return PackedEntry(f"{self.folder}{os.sep}{place}", key, digest, values, tuples)

    def add(self, kind: str, file: Path, facts: Facts) -> None:
        """Note a pack that was written."""
        self.has_changed = True
        self._put(kind, file.name, file.stat().st_size, facts)

    def forget(self, file: str) -> None:
        """Leave out the entries of a pack."""
        self.has_changed = True
        place = os.path.relpath(file, self.folder).replace(os.sep, "/")
        self._packs.pop(place, None)
        for entry, its_place in list(self._places.items()):
            if its_place == place:
                del self._places[entry]

    def text(self) -> str:
        """What is stored of it."""
        return json.dumps(self._packs)

    def _put(self, kind: str, name: str, size: int, facts: Facts) -> None:
        place = f"{kind}/{FOLDER}/{name}"
        self._packs[place] = size, facts
        for key in facts:
            self._places[kind, key] = place


def _files_in(folder: Path) -> list[tuple[str, int]]:
    """(name, size) of every pack in a folder, by name."""
    found: list[tuple[str, int]] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(_SUFFIX):
                    found.append((entry.name, os.stat(entry.path).st_size))
    except (FileNotFoundError, NotADirectoryError):
        return found
    return sorted(found)


def _facts_in_header(file: Path) -> Facts:
    """What a pack's header says of its entries. Raises ValueError when that is not what was written."""
    _, metadata = read_header(str(file))
    text = metadata.get("entries", "")
    if sha256(text.encode()).hexdigest() != metadata.get("digest"):
        raise ValueError(f"{file}: its header is not what was written")
    return json.loads(text)
