"""A layer for a weight whose rows the model holds in another order than the file: diffusers' shift and scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .layer import ActivationForm, ReadWeight, StoredLayer, WeightLayer


@dataclass(frozen=True, eq=False)
class InRowOrder(StoredLayer):
    """apply(W) is what the layer makes of W with its rows in the file's order, in the model's order again.

    Row n of the model's weight is row `rows[n]` of the file's.
    """

    inner: WeightLayer
    rows: Tensor
    is_additive = False

    @property
    def kind(self) -> str:
        """The kind's name, for reports."""
        return self.inner.kind

    def apply(self, weight: Tensor) -> Tensor:
        """What a weight (out, in, ...) in float32 becomes."""
        rows = self.rows.to(weight.device)
        return self.inner.apply(weight[rows.argsort()])[rows]

    def activation_form(self, strength: float, shape: Sequence[int], read: ReadWeight) -> ActivationForm | None:
        """None: as a full difference."""
        return None

    def to_comfyui(self, strength: float) -> InRowOrder:
        """This, with the layer as ComfyUI's loader applies it."""
        inner: Any = self.inner
        if not hasattr(inner, "to_comfyui"):
            return self
        return replace(self, inner=inner.to_comfyui(strength))

    def mismatch(self, shape: Sequence[int]) -> str | None:
        """Why this does not fit a weight of `shape`, or None."""
        return self.inner.mismatch(shape)


def row_order(function: Callable[[Tensor], Tensor], shape: Sequence[int]) -> Tensor | None:
    """Which row of a file's weight each row of the model's is, by what a host does to a difference of this shape.

    None if it does more than to move rows.
    """
    count = shape[0]
    numbers = torch.arange(float(count)).reshape(count, *(1 for _ in shape[1:])).expand(*shape)
    moved = function(numbers.contiguous())
    if moved.shape != numbers.shape:
        return None
    rows = moved.reshape(count, -1)[:, 0].long()
    if torch.equal(rows.sort().values, torch.arange(count)) and torch.equal(moved, numbers[rows]):
        return rows
    return None
