"""Quantized weights on disk: a model that was quantized before is read, not quantized again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from ....storage.digest import sha256_of_tensors
from ...data.cache import Cache, key_of
from .format import QuantizedWeight, WeightFormat

LIMIT_GB = 20.0
_KIND = "weights"


class KeptWeights:
    """A folder of quantized weights, each file under the hash of what was quantized. The least recently used go when it
    is too large.

    `notes`, for the report, say what was read, which file was damaged, and when nothing could be written.
    """

    def __init__(self, folder: Path) -> None:
        self._cache = Cache(folder, LIMIT_GB)
        self._read_notes: list[str] = []

    @property
    def notes(self) -> Sequence[str]:
        """Sentences for the report."""
        return [*self._read_notes, *self._cache.notes]

    def key(self, weight_format: WeightFormat, layers: Mapping[str, nn.Linear]) -> str:
        """The key of the layers' weights as they are now, by path, quantized to a format."""
        weights = {path: layer.weight for path, layer in layers.items()}
        return key_of("quantized weights", weight_format.name, sha256_of_tensors(weights))

    def read(self, key: str, paths: Iterable[str]) -> dict[str, QuantizedWeight] | None:
        """The quantized weights by path that were written under a key; None when they are not there or damaged."""
        found = self._cache.read(_KIND, key)
        if found is None:
            return None
        tensors, _ = found
        self._read_notes = [f"base weights: read from {self._cache.folder}, not quantized again"]
        return {path: QuantizedWeight(*(tensors[name] for name in _names(path))) for path in paths}

    def write(self, key: str, quantized: Mapping[str, QuantizedWeight]) -> None:
        """Keep quantized weights by path under a key, and make room for them."""
        if self._cache.write(_KIND, key, dict(_name_tensors(quantized))):
            self._cache.trim()


def _names(path: str) -> tuple[str, str]:
    return f"{path}.numbers", f"{path}.scales"


def _name_tensors(quantized: Mapping[str, QuantizedWeight]) -> Iterator[tuple[str, Tensor]]:
    for path, weight in quantized.items():
        yield from zip(_names(path), weight, strict=True)
