"""Quantised weights on disk: a model that was quantised before is read, not quantised again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from ...data.cache import Cache, key_of
from .format import Quantised, WeightFormat

LIMIT_GB = 20.0
_KIND = "weights"


class KeptWeights:
    """The quantised weights of a model, in a folder whose least recently used files go when it is too large.

    `identity` is a hash of the model's weights and of everything that changes them. `notes`, for the report, say what
    was read, which file was damaged, and when nothing could be written.
    """

    def __init__(self, folder: Path, identity: str) -> None:
        self._cache = Cache(folder, LIMIT_GB)
        self._identity = identity
        self._read_notes: list[str] = []

    @property
    def notes(self) -> Sequence[str]:
        """Sentences for the report."""
        return [*self._read_notes, *self._cache.notes]

    def read(self, weight_format: WeightFormat, layers: Mapping[str, nn.Linear]) -> dict[str, Quantised] | None:
        """The quantised weights of layers by path; None when they are not there or damaged."""
        found = self._cache.read(_KIND, self._key(weight_format, layers))
        if found is None:
            return None
        tensors, _ = found
        self._read_notes = [f"base weights: {weight_format.name} read from {self._cache.folder}, not quantized again"]
        return {path: Quantised(*(tensors[name] for name in _names(path))) for path in layers}

    def write(
        self, weight_format: WeightFormat, layers: Mapping[str, nn.Linear], quantised: Mapping[str, Quantised]
    ) -> None:
        """Keep the quantised weights of layers by path, and make room for them."""
        tensors = dict(_named(quantised))
        if self._cache.write(_KIND, self._key(weight_format, layers), tensors):
            self._cache.trim()

    def _key(self, weight_format: WeightFormat, layers: Mapping[str, nn.Linear]) -> str:
        weights = [[path, str(layer.weight.dtype), *layer.weight.shape] for path, layer in layers.items()]
        return key_of("quantised weights", weight_format.name, self._identity, weights)


def _names(path: str) -> tuple[str, str]:
    return f"{path}.numbers", f"{path}.scales"


def _named(quantised: Mapping[str, Quantised]) -> Iterator[tuple[str, Tensor]]:
    for path, weight in quantised.items():
        yield from zip(_names(path), weight, strict=True)
