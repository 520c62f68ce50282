"""What an average makes of the float16 rounding of the snapshots that it is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...ema.post_hoc import ROUNDING
from ...patches.lora_files.parse import group_by_layer

_SAMPLED = 1 << 18  # numbers of each snapshot that are looked at
_TINY = 1e-200


class StorageNoise:
    """The rounding of averages of some snapshots, as a share of the change that they make.

    A layer's change is the product of its tensors, so its rounding is theirs together. A stored number's rounding is
    `ROUNDING` of it, and those of different snapshots have nothing to do with each other.
    """

    def __init__(self, files: Sequence[Mapping[str, Tensor]]) -> None:
        layers, tensors = _layers(files[0])
        stride = 1 + sum(files[0][name].numel() for name in tensors) // _SAMPLED
        products = []
        for name in tensors:
            numbers = torch.stack([file[name].flatten()[::stride].double() for file in files])
            products.append(numbers @ numbers.T)
        self._layers = torch.tensor(layers)
        of_tensors = torch.stack(products)
        squared = of_tensors.diagonal(dim1=1, dim2=2)
        scale = squared.amax(1).clamp(min=_TINY)  # a layer's change is a product: no tensor may make it 0 or infinite
        self._products = of_tensors / scale[:, None, None]
        self._squared = squared / scale[:, None]
        self._energies = torch.zeros(int(self._layers.max()) + 1, dtype=torch.float64)
        self._energies.index_add_(0, self._layers, scale.log())
        self._energies -= self._energies.max().clone()

    def of(self, shares: Tensor) -> float:
        """The rms rounding of an average, as a share of its change.

        Args:
            shares: those of the files (files,), float64.
        """
        averaged = torch.einsum("a,tab,b->t", shares, self._products, shares).clamp(min=_TINY)
        rounding = ROUNDING**2 * (self._squared @ shares.square())
        of_layers = torch.zeros_like(self._energies).index_add_(0, self._layers, rounding / averaged)
        energies = self._energies.clone().index_add_(0, self._layers, averaged.log())
        counts = (energies - energies.max()).exp()
        return float((of_layers * counts).sum() / counts.sum()) ** 0.5


def _layers(file: Mapping[str, Tensor]) -> tuple[list[int], list[str]]:
    """(The number of the layer, the name) of every tensor of a LORA_MODEL that is averaged."""
    layers: list[int] = []
    names: list[str] = []
    numbers: dict[str, int] = {}
    for layer, group in group_by_layer(file, plain=False)[0].items():
        for name, tensor in group.values():
            if tensor.is_floating_point() and tensor.numel() > 1:
                layers.append(numbers.setdefault(layer, len(numbers)))
                names.append(name)
    return layers, names
