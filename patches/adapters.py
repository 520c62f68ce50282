"""What a LoRA file holds for one weight: a factor pair (LoRA; LoCon, arXiv 2309.14859, with Tucker core) or a full difference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class LoRA:
    """delta = scale * up @ down, reshaped to the weight. A convolution's factors (LoCon) flatten; `mid` is its Tucker core.

    `up` is (out, rank) or (out, rank, 1, 1); `down` is (rank, in) or (rank, in, *kernel); with `mid` (rank, rank, *kernel) the kernel of
    `down` is 1. A missing alpha means scale 1.
    """

    up: Tensor
    down: Tensor
    alpha: float | None = None
    mid: Tensor | None = None

    @property
    def kind(self) -> str:
        """The family's name, for reports."""
        return "LoCon" if self.down.ndim > 2 else "LoRA"

    @property
    def rank(self) -> int:
        """Rows of `down`; what alpha is divided by."""
        return self.down.shape[0]

    @property
    def scale(self) -> float:
        """alpha / rank; 1 without alpha."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def factors(self) -> tuple[Tensor, Tensor]:
        """(B, A) with B (out, rank) and A (rank, columns), not scaled, so that delta = scale * B @ A; float32 with a Tucker core."""
        if self.mid is None:
            return self.up.flatten(1), self.down.flatten(1)
        down = torch.einsum("om...,mi->oi...", self.mid.float(), self.down.flatten(1).float())
        return self.up.flatten(1), down.flatten(1)

    def problem(self, shape: Sequence[int]) -> str | None:
        """Why this does not fit a weight of `shape`, or None."""
        core = self.mid
        if self.up.ndim < 2 or self.down.ndim < 2 or (core is not None and core.ndim < 3):
            return f"expected matrices, got up {_text(self.up)} and down {_text(self.down)}"
        inner = self.up.flatten(1).shape[1]
        if core is None and inner != self.rank:
            return f"ranks differ: up {_text(self.up)}, down {_text(self.down)}"
        if core is not None and (inner != core.shape[0] or core.shape[1] != self.rank or self.down.flatten(2).shape[2:].numel() != 1):
            return f"ranks differ: up {_text(self.up)}, mid {_text(core)}, down {_text(self.down)}"
        columns = self.down[0].numel() * (1 if core is None else core[0, 0].numel())
        if not shape or self.up.shape[0] != shape[0] or columns != math.prod(shape[1:]):
            return f"expected a weight {_sides(shape)}, got up {_text(self.up)} x down {_text(self.down)} = {self.up.shape[0]}x{columns}"
        return None

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor this holds."""
        return (self.up, self.down) if self.mid is None else (self.up, self.down, self.mid)


@dataclass(frozen=True, eq=False)
class Diff:
    """delta = diff, of the weight's own shape."""

    diff: Tensor
    kind: ClassVar[str] = "diff"

    def factors(self) -> None:
        """None: a full difference has no factors."""

    def problem(self, shape: Sequence[int]) -> str | None:
        """Why this does not fit a weight of `shape`, or None."""
        return None if tuple(self.diff.shape) == tuple(shape) else f"expected a difference {_sides(shape)}, got {_text(self.diff)}"

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor this holds."""
        return (self.diff,)


Layer = LoRA | Diff


def delta(layer: Layer, shape: Sequence[int]) -> Tensor:
    """The unscaled-by-strength difference (shape) of one layer in float32."""
    if isinstance(layer, Diff):
        return layer.diff.float()
    up, down = layer.factors()
    return (layer.scale * (up.float() @ down.float())).reshape(tuple(shape))


def _text(tensor: Tensor) -> str:
    return _sides(tensor.shape)


def _sides(shape: Sequence[int]) -> str:
    return "x".join(str(side) for side in shape) or "scalar"
