"""Finds changes that a LoRA file holds under two names, as converters leave them: as `attention.qkv` and `to_q` …"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ..adapters.layer import AdditiveLayer, Layer
from ..adapters.row_parts import slice_rows
from .target import Target

_TOLERANCE = 1e-5  # of the largest number: the rounding of float32, in which both products are computed
Shapes = Mapping[tuple[str, str], Sequence[int]]


class Claim(NamedTuple):
    """A layer, its name in the file, and where it is applied."""

    base: str
    target: Target
    layer: Layer


class _NamedChange(NamedTuple):
    """All that one name does to some rows of a weight."""

    base: str
    target: Target
    start: int
    stop: int
    layers: list[Layer]

    def meets(self, other: _NamedChange) -> bool:
        """Whether both change a row."""
        return self.start < other.stop and other.start < self.stop

    def covers(self, other: _NamedChange) -> bool:
        """Whether this changes every row that the other one changes."""
        return self.start <= other.start and other.stop <= self.stop


def drop_repeated(claims: Sequence[Claim], shapes: Shapes) -> tuple[list[Claim], tuple[str, ...], list[str]]:
    """(the layers that count, the names whose changes another name has too, problems).

    Of two names with the same change the one for more rows counts, of equals the first one. Two names that change the
    same rows in different ways are a problem.
    """
    by_weight: dict[tuple[str, str], list[_NamedChange]] = {}
    for claim in claims:
        held = by_weight.setdefault((claim.target.model, claim.target.weight), [])
        same = [one for one in held if one.base == claim.base and one.target == claim.target]
        if same:
            same[0].layers.append(claim.layer)
        else:
            start, length = _rows(claim.target, shapes)
            held.append(_NamedChange(claim.base, claim.target, start, start + length, [claim.layer]))
    left_out: set[tuple[str, Target]] = set()
    problems: list[str] = []
    for held in by_weight.values():
        _compare(held, shapes, left_out, problems)
    used = [claim for claim in claims if (claim.base, claim.target) not in left_out]
    return used, tuple(dict.fromkeys(base for base, _ in left_out)), problems


def _rows(target: Target, shapes: Shapes) -> tuple[int, int]:
    if target.part is not None and target.part[0] == 0:
        return target.part[1], target.part[2]
    return 0, ([*shapes[target.model, target.weight]] or [1])[0]


def _compare(held: list[_NamedChange], shapes: Shapes, left_out: set[tuple[str, Target]], problems: list[str]) -> None:
    """Adds to what is left out of one weight's claims, and to the problems."""
    counted: list[_NamedChange] = []
    for one in sorted(held, key=lambda claim: claim.start - claim.stop):  # more rows first; sorting keeps the order
        for other in counted:
            if one.base == other.base or not one.meets(other):
                continue
            if other.covers(one) and _is_same_change(other, one, shapes):
                left_out.add((one.base, one.target))
                break
            problems.append(
                f"{one.base}: changes the same rows as {other.base} ({one.target.weight}) in another way; remove one of"
                " the two from the file"
            )
        else:
            counted.append(one)


def _is_same_change(wide: _NamedChange, narrow: _NamedChange, shapes: Shapes) -> bool:
    """Whether a claim does to the rows of another one what that does."""
    if all(layer.is_additive for layer in (*wide.layers, *narrow.layers)):
        first = _delta(wide, shapes)[narrow.start - wide.start : narrow.stop - wide.start]
        second = _delta(narrow, shapes)
        return bool((first - second).abs().max() <= _TOLERANCE * second.abs().max())
    if wide.target.function != narrow.target.function or len(wide.layers) != len(narrow.layers):
        return False
    shape = _shape(wide, shapes)
    start, length = narrow.start - wide.start, narrow.stop - narrow.start
    for layer, expected in zip(wide.layers, narrow.layers, strict=True):
        rows = layer if wide.covers(narrow) and narrow.covers(wide) else slice_rows(layer, start, length, shape)
        if rows is None or rows.kind != expected.kind or not _has_same_tensors(rows, expected):
            return False
    return True


def _has_same_tensors(one: Layer, other: Layer) -> bool:
    pairs = list(zip(one.tensors(), other.tensors(), strict=False))
    same_count = len(one.tensors()) == len(other.tensors())
    return same_count and all(a.shape == b.shape and torch.equal(a.float(), b.float()) for a, b in pairs)


def _delta(held: _NamedChange, shapes: Shapes) -> Tensor:
    """The difference that a claim's layers make, for the model's own order of rows."""
    shape = _shape(held, shapes)
    delta = sum((cast(AdditiveLayer, layer).delta(shape) for layer in held.layers), torch.zeros(tuple(shape)))
    if held.target.function is not None:
        return held.target.function(delta)
    return delta


def _shape(held: _NamedChange, shapes: Shapes) -> Sequence[int]:
    shape = list(shapes[held.target.model, held.target.weight])
    if held.target.part is not None:
        shape[held.target.part[0]] = held.target.part[2]
    return shape
