"""GLoRA (arXiv 2306.07967): a mixture of the weight's columns, and a LoRA. Loaded, not trained."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .channel_maps import LowRankMix
from .factor_products import shape_text, sides_text
from .file_format import FileFormat, LayerTensors, PlacedLayer, TensorRole
from .kind import AdapterKind
from .layer import ActivationForm, ReadWeight, StoredLayer
from .lora import LoRA


@dataclass(frozen=True, eq=False)
class GLoRA(StoredLayer):
    """apply(W) = W + scale * (W a1 a2 + b1 b2), b with a Tucker core `bm`. Older lycoris files store each pair in
    reverse order.
    """

    a1: Tensor
    a2: Tensor
    b1: Tensor
    b2: Tensor
    alpha: float | None = None
    bm: Tensor | None = None
    kind: ClassVar[str] = "GLoRA"
    is_additive: ClassVar[bool] = False

    def _pairs(self, columns: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        a1, a2, b1, b2 = (factor.flatten(1) for factor in (self.a1, self.a2, self.b1, self.b2))
        if a1.shape[0] == columns:
            return (a1, a2, b1, b2)
        return (a2, a1, b2, b1)

    def apply(self, weight: Tensor) -> Tensor:
        """What a weight (out, in, ...) in float32 becomes."""
        a1, a2, b1, b2 = (factor.to(weight.device, torch.float32) for factor in self._pairs(weight.shape[1]))
        mixed = torch.einsum("oi...,ir,rj->oj...", weight, a1, a2)
        added = b1 @ b2 if self.bm is None else torch.einsum("or,rm...,mi->oi...", b1, self.bm.to(b1), b2)
        return weight + self._scale(a2) * (mixed + added.reshape(weight.shape))

    def _scale(self, a2: Tensor) -> float:
        return 1.0 if self.alpha is None else self.alpha / a2.shape[0]

    def activation_form(self, strength: float, shape: Sequence[int], read: ReadWeight) -> ActivationForm:
        """A mixture of what goes in, and a LoRA."""
        # copies: gradients cannot pass through inference tensors
        a1, a2, b1, b2 = (factor.to(torch.float32, copy=True) for factor in self._pairs(shape[1]))
        strength = strength * self._scale(a2)
        mix, layer = LowRankMix(strength * a1, a2), LoRA(b1, b2, None, self.bm)
        return ActivationForm(inputs=(mix,), layer=layer, strength=strength)

    def mismatch(self, shape: Sequence[int]) -> str | None:
        """Why this does not fit a weight of `shape`, or None."""
        shapes = ", ".join(shape_text(factor) for factor in self.tensors())
        if len(shape) < 2 or any(factor.ndim < 2 for factor in self.tensors()):
            return f"expected matrices, got {shapes}"
        a1, a2, b1, b2 = self._pairs(shape[1])
        ranks_fit = a1.shape[1] == a2.shape[0]
        columns = math.prod(shape[1:])
        if self.bm is None:
            ranks_fit &= b1.shape[1] == b2.shape[0]
        else:
            ranks_fit &= self.bm.shape == (b1.shape[1], b2.shape[0], *shape[2:])
            columns //= math.prod(shape[2:])
        sides = (a1.shape[0], a2.shape[1], b1.shape[0], b2.shape[1])
        if ranks_fit and sides == (shape[1], shape[1], shape[0], columns):
            return None
        return f"expected a weight {sides_text(shape)}, got a1, a2, b1, b2 {shapes}"


def _build(tensors: LayerTensors) -> Iterator[PlacedLayer]:
    factors = tensors["a1"], tensors["a2"], tensors["b1"], tensors["b2"]
    yield PlacedLayer(GLoRA(*factors, tensors.alpha, tensors.get("bm")))


_FORMAT = FileFormat(
    name="GLoRA",
    roles=(
        TensorRole("a1", (".a1.weight",), needed=True, refused_as="GLoRA"),
        TensorRole("a2", (".a2.weight",), needed=True, refused_as="GLoRA"),
        TensorRole("b1", (".b1.weight",), needed=True, refused_as="GLoRA"),
        TensorRole("b2", (".b2.weight",), needed=True, refused_as="GLoRA"),
        TensorRole("bm", (".bm.weight",), refused_as="GLoRA"),
    ),
    build=_build,
)

KIND = AdapterKind("glora", (GLoRA,), (_FORMAT,))
