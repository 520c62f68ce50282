"""Where the tensors of samples are: in memory as far as they fit, the others in the cache, by their hash.

A graph makes samples, so what the cache loses cannot be made again: it removes no file that a dataset still reads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...storage.digest import sha256_of_tensors
from .cache import Cache, HeldFile, key_of
from .dataset import Conditioning, Dataset, StoredConditioning
from .stored_extras import StoredExtras
from .stored_latent import KEPT_BYTES, Latent, StoredLatent

KIND = "samples"  # of the cache's files


@dataclass(frozen=True)
class _InFile:
    """Stands for a tensor that is in the file, under that name."""

    name: str


class SampleStore:
    """Keeps up to `KEPT_BYTES` of latents in memory and as much of conditionings, those of the dataset `beside` counted
    in; what is beyond goes into `cache`. Without one, or where it cannot be written, all stays in memory.
    """

    def __init__(self, cache: Cache | None = None, beside: Dataset | None = None) -> None:
        self.cache = cache
        self._latent_bytes, self._conditioning_bytes = _count_held(beside)  # in memory
        self._bytes_beside = self._latent_bytes + self._conditioning_bytes
        self._stored_bytes = 0

    @property
    def leaves_on_disk(self) -> bool:
        """Whether anything is read from the cache each time it is drawn."""
        return self._stored_bytes > 0

    def latent(self, name: str, latent: Tensor, sha256: str) -> Latent:
        """The latent of a sample, whose hash that is, or one that is read from the cache. `name` is the sample's, for
        messages.
        """
        size = _bytes(latent)
        if self._latent_bytes + size > KEPT_BYTES:
            file = self._write({"latent": latent}, key_of("sample latent", sha256))
            if file is not None:
                return StoredLatent(latent.shape, lambda: self._read(name, file)["latent"])
        self._latent_bytes += size
        return latent

    def conditioning(self, name: str, conditioning: Conditioning) -> Conditioning | StoredConditioning:
        """The conditioning of a sample, or one that is read from the cache."""
        whole = {"context": conditioning.context, "extras": dict(conditioning.extras)}
        read = self._store(name, whole)
        if read is None:
            return conditioning
        return StoredConditioning(lambda: Conditioning(**read()))

    def extras(self, name: str, extras: Mapping[str, Any]) -> Mapping[str, Any]:
        """The entries of a sample's conditioning, or ones that are read from the cache."""
        read = self._store(name, dict(extras))
        if read is None:
            return extras
        return StoredExtras(extras, read)

    def _store(self, name: str, value: Any) -> Callable[[], Any] | None:
        """What reads a value whose tensors are in the cache; None where they stay in memory."""
        tensors: dict[str, Tensor] = {}
        without = _map_leaves(value, lambda leaf: _move_tensor(leaf, tensors))
        size = sum(map(_bytes, tensors.values()))
        if self._conditioning_bytes + size > KEPT_BYTES:
            file = self._write(tensors, key_of("sample conditioning", sha256_of_tensors(tensors)))
            if file is not None:
                return lambda: _fill(without, self._read(name, file))
        self._conditioning_bytes += size
        return None

    def _write(self, tensors: Mapping[str, Tensor], key: str) -> HeldFile | None:
        """The file of the cache that has these tensors; None where there is no cache, or it cannot be written."""
        if self.cache is None or not tensors:
            return None
        file = self.cache.hold(KIND, key)
        if self.cache.read(KIND, key) is None and not self.cache.write(KIND, key, tensors):
            return None
        self._stored_bytes += sum(map(_bytes, tensors.values()))
        return file

    def _read(self, name: str, file: HeldFile) -> dict[str, Tensor]:
        assert self.cache is not None
        cached = self.cache.read(KIND, file.key)
        if cached is None:
            raise ValueError(
                f"Samples: {name} is not in the cache any more: {file.path} was removed or damaged, and only the graph"
                " can make it again. Start ComfyUI again, or change an input of Samples, and run the workflow."
            )
        return cached[0]

    def report(self) -> list[str]:
        """Lines about what is in memory and what is in the cache."""
        megabytes = (self._latent_bytes + self._conditioning_bytes - self._bytes_beside) / 2**20
        line = f"{megabytes:.1f} MB of latents and conditionings, as the graph holds them: nothing is copied"
        if self.cache is None:
            return [line]
        if not self._stored_bytes:
            return [line, *self.cache.notes]
        total = self.cache.trim()
        lines = [
            line,
            f"{self._stored_bytes / 2**20:.1f} MB more are read from the cache when they are drawn",
            f"cache: {total / 2**30:.2f} GB of at most {self.cache.limit / 2**30:g} GB in {self.cache.folder}",
        ]
        if total > self.cache.limit:
            lines.append("cache: larger than its limit, because samples that are in use stay in it")
        return lines + self.cache.notes


def _count_held(dataset: Dataset | None) -> tuple[int, int]:
    """The bytes of latents and of conditionings of samples that a dataset holds in memory."""
    latents: dict[int, Tensor] = {}
    others: dict[int, Tensor] = {}
    images = () if dataset is None else dataset.images + dataset.held_out

    def note(leaf: Any) -> None:
        if isinstance(leaf, Tensor):
            others[id(leaf)] = leaf

    for image in images:
        if isinstance(image.latent, Tensor):
            latents[id(image.latent)] = image.latent
        conditioning = None if image.brought is None else image.brought.conditioning
        if isinstance(conditioning, Conditioning):
            _map_leaves([conditioning.context, conditioning.extras], note)
        if not isinstance(image.extras, StoredExtras):
            _map_leaves(image.extras, note)
    return sum(map(_bytes, latents.values())), sum(map(_bytes, others.values()))


def _map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same nested mappings, sequences and objects with attributes, with everything in them changed."""
    if isinstance(value, Mapping):
        return {name: _map_leaves(entry, change) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map_leaves(entry, change) for entry in value)
    if isinstance(value, Tensor | _InFile) or not hasattr(value, "__dict__"):
        return change(value)
    own = copy.copy(value)
    for name, entry in vars(value).items():
        setattr(own, name, _map_leaves(entry, change))
    return own


def _move_tensor(leaf: Any, tensors: dict[str, Tensor]) -> Any:
    """What stands for a tensor that moves into `tensors`; others stay."""
    if not isinstance(leaf, Tensor):
        return leaf
    name = str(len(tensors))
    tensors[name] = leaf
    return _InFile(name)


def _fill(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value with its tensors."""

    def tensor_of(leaf: Any) -> Any:
        if isinstance(leaf, _InFile):
            return tensors[leaf.name]
        return leaf

    return _map_leaves(value, tensor_of)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
