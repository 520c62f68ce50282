"""Linear maps of channels at the activations, in float32: scales, rotations and mixtures of rows or columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Scale:
    """Channel n times factors[n]."""

    factors: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Apply the map to x (n, any)."""
        return x * self.factors[:, None]

    def transpose(self) -> Scale:
        """The transposed map."""
        return self

    def to(self, device: torch.device) -> Scale:
        """This map on another device."""
        return Scale(self.factors.to(device))


@dataclass(frozen=True, eq=False)
class LowRankMix:
    """x + first @ (second @ x) with first (n, r) and second (r, n)."""

    first: Tensor
    second: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Apply the map to x (n, any)."""
        return x + self.first @ (self.second @ x)

    def transpose(self) -> LowRankMix:
        """The transposed map."""
        return LowRankMix(self.second.T, self.first.T)

    def to(self, device: torch.device) -> LowRankMix:
        """This map on another device."""
        return LowRankMix(self.first.to(device), self.second.to(device))


@dataclass(frozen=True, eq=False)
class RotationStage:
    """One stage of a rotation: blocks (count, b, b), or one shared block, minus the identity. Each rotates b channels.

    With `half` 0 the b channels are neighbors. Otherwise runs of `run` channels that are `half` apart are paired (a
    butterfly).
    """

    blocks: Tensor
    half: int = 0
    run: int = 1

    def apply(self, x: Tensor) -> Tensor:
        """x (n, any) rotated."""
        if self.half:
            return x + rotate_butterfly(x, self.blocks, self.half, self.run)
        return x + rotate_blocks(x, self.blocks)


@dataclass(frozen=True, eq=False)
class Rotation:
    """A rotation in stages: applies the stages to x one after the other, then multiplies by `gains` (n,) if given.

    `fraction` () blends from x to the result.
    """

    stages: tuple[RotationStage, ...]
    fraction: Tensor
    gains: Tensor | None = None

    def apply(self, x: Tensor) -> Tensor:
        """Apply the map to x (n, any)."""
        rotated = x
        for stage in self.stages:
            rotated = stage.apply(rotated)
        if self.gains is not None:
            rotated = rotated * self.gains[:, None]
        return torch.lerp(x, rotated, self.fraction)

    def transpose(self) -> Rotation:
        """The transposed map; only of one without gains."""
        assert self.gains is None
        stages = (replace(stage, blocks=stage.blocks.transpose(1, 2)) for stage in reversed(self.stages))
        return Rotation(tuple(stages), self.fraction)

    def to(self, device: torch.device) -> Rotation:
        """This map on another device."""
        stages = tuple(replace(stage, blocks=stage.blocks.to(device)) for stage in self.stages)
        gains = self.gains.to(device) if self.gains is not None else None
        return Rotation(stages, self.fraction.to(device), gains)


@dataclass(frozen=True, eq=False)
class PartMap:
    """Another map applied to `length` channels from `start` on; the others are unchanged."""

    inner: Scale | LowRankMix | Rotation
    start: int
    length: int

    def apply(self, x: Tensor) -> Tensor:
        """Apply the map to x (n, any)."""
        end = self.start + self.length
        return torch.cat([x[: self.start], self.inner.apply(x[self.start : end]), x[end:]])

    def transpose(self) -> PartMap:
        """The transposed map."""
        return replace(self, inner=self.inner.transpose())

    def to(self, device: torch.device) -> PartMap:
        """This map on another device."""
        return replace(self, inner=self.inner.to(device))


Map = Scale | LowRankMix | Rotation | PartMap


def is_scale(channel_map: Map) -> bool:
    """Whether a map scales each channel separately."""
    inner = getattr(channel_map, "inner", channel_map)
    return hasattr(inner, "factors")  # told apart by what it has: the package may be imported twice


def combine_scales(scales: Iterable[Map], channels: int) -> Scale:
    """Consecutive scales of this many channels as one; ones if there are none."""
    return Scale(apply_maps(scales, torch.ones(channels), 0))


def apply_maps(maps: Iterable[Map], x: Tensor, dimension: int) -> Tensor:
    """Apply maps, one after the other, to channels.

    Args:
        maps: the maps, the first one first.
        x: a tensor of any shape.
        dimension: that of the channels, which may count from the end.

    Returns:
        A tensor of the shape of `x`.
    """
    for channel_map in maps:
        if hasattr(channel_map, "factors"):
            x = x * channel_map.factors.view(-1, *(1,) * (x.ndim - 1 - dimension % x.ndim))
            continue
        channels = x.movedim(dimension, 0)
        mapped = channel_map.apply(channels.reshape(len(channels), -1))
        x = mapped.reshape(channels.shape).movedim(0, dimension)
    return x


def transpose_maps(maps: Sequence[Map]) -> list[Map]:
    """The maps that do to a matrix's columns what `maps` do to the vectors it multiplies.

    M @ (map x) = (M with these maps on its columns) @ x.
    """
    return [channel_map.transpose() for channel_map in reversed(maps)]


def rotate_blocks(rows: Tensor, blocks: Tensor) -> Tensor:
    """Rotate runs of rows, each by its block.

    Args:
        rows: (n, columns).
        blocks: (n / b, b, b), or one shared block (1, b, b).

    Returns:
        The rows (n, columns).
    """
    return (blocks @ rows.unflatten(0, (-1, blocks.shape[-1]))).flatten(0, 1)


def rotate_butterfly(rows: Tensor, blocks: Tensor, half: int, run: int) -> Tensor:
    """One stage of a butterfly (BOFT, Liu 2023, arXiv 2311.06243): pair runs of rows that are far apart, rotate each
    pair by its block, and restore the order.

    Args:
        rows: (n, columns).
        blocks: (n / b, b, b).
        half: how many rows apart the runs are that form a pair.
        run: how many rows a run has.

    Returns:
        The rows (n, columns).
    """
    mixed = rows.unflatten(0, (-1, 2, half // run, run)).transpose(1, 2)
    return rotate_blocks(mixed.flatten(0, 3), blocks).reshape(mixed.shape).transpose(1, 2).flatten(0, 3)
