"""Linear maps of channels, in float32: what a rotation, a scale or a mixture of a weight's rows or columns is at the
activations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Scale:
    """Channel n times factors[n]."""

    factors: Tensor

    def rows(self, x: Tensor) -> Tensor:
        """The map of x (n, any)."""
        return x * self.factors[:, None]

    def transposed(self) -> Scale:
        """The transposed map."""
        return self

    def to(self, device: torch.device) -> Scale:
        """This map on another device."""
        return Scale(self.factors.to(device))


@dataclass(frozen=True, eq=False)
class Mix:
    """x + first @ (second @ x) with first (n, r) and second (r, n)."""

    first: Tensor
    second: Tensor

    def rows(self, x: Tensor) -> Tensor:
        """The map of x (n, any)."""
        return x + self.first @ (self.second @ x)

    def transposed(self) -> Mix:
        """The transposed map."""
        return Mix(self.second.T, self.first.T)

    def to(self, device: torch.device) -> Mix:
        """This map on another device."""
        return Mix(self.first.to(device), self.second.to(device))


@dataclass(frozen=True, eq=False)
class Stage:
    """Blocks (count, b, b), or one for all, less the identity: each turns b channels. `half` 0: neighbours; else runs
    of `together` that are `half` apart meet (a butterfly).
    """

    blocks: Tensor
    half: int = 0
    together: int = 1

    def rows(self, x: Tensor) -> Tensor:
        """x (n, any) turned."""
        return x + (butterfly(x, self.blocks, self.half, self.together) if self.half else turned(x, self.blocks))


@dataclass(frozen=True, eq=False)
class Turn:
    """From x to what the stages, one after the other, make of it, times `gains` (n,) where there are any; `share` () of
    the way.
    """

    stages: tuple[Stage, ...]
    share: Tensor
    gains: Tensor | None = None

    def rows(self, x: Tensor) -> Tensor:
        """The map of x (n, any)."""
        made = x
        for stage in self.stages:
            made = stage.rows(made)
        return torch.lerp(x, made if self.gains is None else made * self.gains[:, None], self.share)

    def transposed(self) -> Turn:
        """The transposed map; only of one without gains."""
        assert self.gains is None
        return Turn(
            tuple(replace(stage, blocks=stage.blocks.transpose(1, 2)) for stage in reversed(self.stages)), self.share
        )

    def to(self, device: torch.device) -> Turn:
        """This map on another device."""
        stages = tuple(replace(stage, blocks=stage.blocks.to(device)) for stage in self.stages)
        return Turn(stages, self.share.to(device), None if self.gains is None else self.gains.to(device))


@dataclass(frozen=True, eq=False)
class Within:
    """Another map of the channels from `start` on; the others stay."""

    of: Scale | Mix | Turn
    start: int
    length: int

    def rows(self, x: Tensor) -> Tensor:
        """The map of x (n, any)."""
        end = self.start + self.length
        return torch.cat([x[: self.start], self.of.rows(x[self.start : end]), x[end:]])

    def transposed(self) -> Within:
        """The transposed map."""
        return replace(self, of=self.of.transposed())

    def to(self, device: torch.device) -> Within:
        """This map on another device."""
        return replace(self, of=self.of.to(device))


Map = Scale | Mix | Turn | Within


def is_scale(one: Map) -> bool:
    """Whether a map scales every channel by itself."""
    return hasattr(getattr(one, "of", one), "factors")  # told apart by what it has: the package may be imported twice


def in_one(scales: Iterable[Map], channels: int) -> Scale:
    """Scales of so many channels, one after the other, as one; of ones where there are none."""
    return Scale(along(scales, torch.ones(channels), 0))


def along(maps: Iterable[Map], x: Tensor, dimension: int) -> Tensor:
    """x with maps, one after the other, of its channels in a dimension."""
    for one in maps:
        if hasattr(one, "factors"):
            x = x * one.factors.view(-1, *(1,) * (x.ndim - 1 - dimension % x.ndim))
            continue
        channels = x.movedim(dimension, 0)
        x = one.rows(channels.reshape(len(channels), -1)).reshape(channels.shape).movedim(0, dimension)
    return x


def backwards(maps: Sequence[Map]) -> list[Map]:
    """Maps that make of a matrix's columns what those do to the vectors that it is multiplied with: M @ (map x) = (M
    with these) @ x.
    """
    return [one.transposed() for one in reversed(maps)]


def turned(rows: Tensor, blocks: Tensor) -> Tensor:
    """Every run of b rows turned by its block of (blocks, b, b), or by the only one there is."""
    return (blocks @ rows.unflatten(0, (-1, blocks.shape[-1]))).flatten(0, 1)


def butterfly(rows: Tensor, blocks: Tensor, half: int, together: int) -> Tensor:
    """One stage: runs of `together` rows that are `half` apart meet in a block, turn, and go back."""
    mixed = rows.unflatten(0, (-1, 2, half // together, together)).transpose(1, 2)
    return turned(mixed.flatten(0, 3), blocks).reshape(mixed.shape).transpose(1, 2).flatten(0, 3)
