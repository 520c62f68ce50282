"""Combines all patches of one weight into what happens at the activations (bypass).

y = outputs(W @ inputs(x)) + sum of multiplier * up @ down @ x + sum of multiplier * difference @ x + bias

The result is the same as with the weight that `fuse.apply_in_order` computes, for any order of patches. A Kronecker
product (LoKr) keeps its two small factors, as in the file. What does not fit this form becomes a difference of the
whole weight: rotations of a convolution's pixels, and maps on both sides of a part.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..adapters.channel_maps import Map, PartMap, Scale, apply_maps, is_scale, transpose_maps
from ..adapters.layer import MAX_FACTOR_RANK, ActivationForm
from .fuse import Patch, Slice, apply_in_order, are_additive, fuse
from .strength_schedule import MaskedRanks, Schedule

# Index of a schedule's multiplier, or of that of the first of masked ranks; the others follow it.
Place = Callable[[Schedule | MaskedRanks | None], int]


@dataclass(frozen=True, eq=False)
class Kron:
    """A LoKr at the activations: multiplies x (..., in) by kron(first (a, b), second (c, d)).

    It is for a weight (out, in) or a part of it. `second` may itself be two factors.
    """

    shape: tuple[int, ...]
    first: Tensor
    second: tuple[Tensor, ...]
    part: Slice | None = None

    def __call__(self, x: Tensor) -> Tensor:
        side, start, length = self.part or (0, 0, self.shape[0])
        columns = self.first.shape[1]
        hidden = (x if side == 0 else x.narrow(-1, start, length)).unflatten(-1, (columns, -1))
        for factor in reversed(self.second):
            hidden = F.linear(hidden, factor)
        product = torch.matmul(self.first, hidden).flatten(-2)
        if self.part and side == 0:
            return F.pad(product, (start, self.shape[0] - start - length))
        return product

    def to(self, dtype: torch.dtype, device: torch.device) -> Kron:
        """This product in another type, on another device."""
        return replace(
            self, first=self.first.to(device, dtype), second=tuple(factor.to(device, dtype) for factor in self.second)
        )

    def dense(self) -> Tensor:
        """The same change as a full difference of the weight (shape)."""
        return self(torch.eye(self.shape[1], dtype=self.first.dtype)).T


@dataclass
class Composed:
    """All patches of one module, combined.

    - `inputs`, `outputs`: maps of what goes into the module and of what comes out.
    - `pairs`: (multiplier indices, up, down): the components take the indices in turn.
    - `diffs`, `krons`, `biases`: (multiplier index, tensor or product).
    - `own` is false if nothing of the module's own output is used.
    """

    shape: tuple[int, ...]
    inputs: tuple[Map, ...] = ()
    outputs: tuple[Map, ...] = ()
    own: bool = True
    pairs: list[tuple[range, Tensor, Tensor]] = field(default_factory=list)
    diffs: list[tuple[int, Tensor]] = field(default_factory=list)
    krons: list[tuple[int, Kron]] = field(default_factory=list)
    biases: list[tuple[int, Tensor]] = field(default_factory=list)

    def add(self, patches: Sequence[Patch], place: Place, groups: int = 1) -> None:
        """Add additive patches.

        Args:
            patches: of the same weight.
            place: gives the index of a schedule's multiplier, 0 for none.
            groups: those of a convolution.
        """
        for schedule, patch_group in _group_by_schedule(patches):
            index, not_kronecker = place(schedule), []
            indices = range(index, index + 1)
            if isinstance(schedule, MaskedRanks):
                indices = range(index, index + schedule.mask.rank)
            for patch in patch_group:
                kron = self._kron(patch)
                if kron is None:
                    not_kronecker.append(patch)
                else:
                    self.krons.append((index, kron))
            fused = fuse(
                not_kronecker,
                self.shape,
                max_rank=max(MAX_FACTOR_RANK, min(self.shape[0], torch.Size(self.shape[1:]).numel()) // 4),
            )
            diff = fused.diff
            # the factors of a grouped convolution mix groups, so take their product, which is smaller
            if groups > 1 and len(indices) > 1:
                raise ValueError("a T-LoRA cannot change a grouped convolution by noise level: set patch mode to merge")
            if groups > 1 and fused.up.shape[1]:
                product = (fused.up @ fused.down.float()).reshape(self.shape)
                diff = product if diff is None else diff + product
            elif fused.up.shape[1]:
                self.pairs.append((indices, fused.up, fused.down.float()))
            if diff is not None:
                self.diffs.append((index, diff))

    def _kron(self, patch: Patch) -> Kron | None:
        """A patch as a separate Kronecker product; None if it is not one, or not of a matrix."""
        layer: Any = patch.layer
        factors = layer.kronecker_factors() if hasattr(layer, "kronecker_factors") and len(self.shape) == 2 else None
        if factors is None:
            return None
        return Kron(self.shape, patch.strength * factors[0], factors[1], patch.part)

    def wrap(self, around: ActivationForm, part: Slice | None) -> None:
        """Put a non-additive layer on top: wrap the result so far in its maps, and add its own product.

        Args:
            around: the layer at the activations.
            part: the part of the weight that its product is for; None is all of it.
        """
        if around.keeps_output:
            self.inputs, self.outputs = (*around.inputs, *self.inputs), (*self.outputs, *around.outputs)
            self._map_changes(around.inputs, around.outputs)
        else:
            self.inputs, self.outputs, self.own, self.pairs, self.diffs, self.krons = (), (), False, [], [], []
        if around.layer is not None:
            added = Composed(self.shape)
            added.add([Patch(around.layer, around.strength, part)], lambda _: 0)
            added._map_changes(around.layer_inputs, around.layer_outputs)
            self.pairs, self.diffs, self.krons = (
                self.pairs + added.pairs,
                self.diffs + added.diffs,
                self.krons + added.krons,
            )

    def _map_changes(self, inputs: Sequence[Map], outputs: Sequence[Map]) -> None:
        """Apply the maps to the added changes too."""
        if not inputs and not outputs:
            return
        self.expand()
        columns = transpose_maps(inputs)

        def mapped(down: Tensor) -> Tensor:
            return apply_maps(columns, down.view(-1, *self.shape[1:]), 1).reshape(down.shape)

        self.pairs = [(place, apply_maps(outputs, up, 0), mapped(down)) for place, up, down in self.pairs]
        self.diffs = [(place, mapped(apply_maps(outputs, diff, 0))) for place, diff in self.diffs]

    def expand(self) -> None:
        """Turn Kronecker products into differences of the whole weight."""
        self.diffs, self.krons = self.diffs + [(place, kron.dense()) for place, kron in self.krons], []

    def add_bias(self, patches: Sequence[Patch], read: Callable[[], Tensor | None], place: Place) -> None:
        """Add the changes of the bias. Maps of the weight do not apply to it.

        Args:
            patches: of the bias.
            read: gives the bias in float32, None where the module has none.
            place: gives the index of a schedule's multiplier, 0 for none.
        """
        constant = [patch for patch in patches if patch.schedule is None]
        changed = self.outputs or not self.own or not are_additive(constant)
        base_bias = read() if changed else None
        if base_bias is None:
            remaining = patches
        else:
            # the part of the bias that the mapped output contains already
            mapped_bias = apply_maps(self.outputs, base_bias, 0) if self.own else torch.zeros_like(base_bias)
            self.biases.append((0, apply_in_order(base_bias, constant) - mapped_bias))
            remaining = [patch for patch in patches if patch.schedule is not None]
        for schedule, patch_group in _group_by_schedule(remaining):
            self.biases += [
                (place(schedule), diff) for diff in [fuse(patch_group, self.shape[:1]).diff] if diff is not None
            ]

    def join_pairs(self) -> tuple[Tensor, Tensor, list[int]]:
        """(up (out, R), down (R, columns), the multiplier index of every component) of all pairs."""
        columns = torch.Size(self.shape[1:]).numel()
        ups = [torch.zeros(self.shape[0], 0), *(up for _, up, _ in self.pairs)]
        downs = [torch.zeros(0, columns), *(down for _, _, down in self.pairs)]
        return (
            torch.cat(ups, 1),
            torch.cat(downs, 0),
            [places[rank % len(places)] for places, up, _ in self.pairs for rank in range(up.shape[1])],
        )


def compose(
    patches: Sequence[Patch],
    shape: Sequence[int],
    read: Callable[[], Tensor],
    place: Place = lambda _: 0,
    groups: int = 1,
) -> Composed:
    """Combine the patches of a weight for the activations, in order.

    Args:
        patches: of any kind.
        shape: the weight's (out, in / groups, *kernel).
        read: gives the weight in float32 to patches that need it.
        place: gives the index of a schedule's multiplier, 0 for none.
        groups: those of a convolution.
    """
    composed, applied = Composed(tuple(shape)), []  # type: Composed, list[Patch]
    for is_additive, batch_patches in itertools.groupby(patches, lambda patch: patch.layer.is_additive):
        if is_additive:
            batch = list(batch_patches)
            composed.add(batch, place, groups)
            applied += batch
            continue
        for patch in batch_patches:
            form = None
            if groups == 1:
                form = _activation_form(patch, composed.shape, lambda: apply_in_order(read(), applied))  # noqa: B023 (called at once)
            applied.append(patch)
            if form is None:
                base = read()
                composed = Composed(composed.shape, diffs=[(0, (apply_in_order(base, applied) - base).cpu())])
            else:
                composed.wrap(form, patch.part)
    return composed


def make_uniform(
    made: Composed, patches: Sequence[Patch], read: Callable[[], Tensor], place: Place, groups: int = 1
) -> Composed:
    """Bring the result of `compose` into one fixed structure, so that torch.compile never compiles again for another
    LoRA.

    Its only maps are scales, and it always uses some share of the module's own output. A map that is not a scale (a
    rotation, a mixture) becomes a difference of the whole weight. A difference becomes two factors, one of them a unit
    matrix. A grouped convolution gets no factors: all its constant changes become one difference.

    Args:
        made: what `compose` made.
        patches: those that it was made of.
        read: gives the weight in float32.
        place: gives the index of a schedule's multiplier, 0 for none.
        groups: those of a convolution.
    """
    if not all(map(is_scale, (*made.inputs, *made.outputs))):
        base = read()
        change = apply_in_order(base, [patch for patch in patches if patch.changes is None]) - base
        made = Composed(made.shape, diffs=[(0, change.cpu())])
        made.add([patch for patch in patches if patch.changes is not None], place, groups)
    made.expand()
    outputs = made.outputs if made.own else (Scale(torch.zeros(made.shape[0])),)
    constant_diffs = [diff for index, diff in made.diffs if not index]
    if groups > 1:
        diffs = [
            (0, sum(constant_diffs, torch.zeros(made.shape))),
            *(scheduled_diff for scheduled_diff in made.diffs if scheduled_diff[0]),
        ]
        return Composed(made.shape, made.inputs, outputs, diffs=diffs)
    summed = [(0, sum(constant_diffs, torch.zeros(made.shape)))] if constant_diffs else []
    factors = [
        (range(index, index + 1), *_factors(diff))
        for index, diff in (*summed, *(scheduled_diff for scheduled_diff in made.diffs if scheduled_diff[0]))
    ]
    return Composed(made.shape, made.inputs, outputs, pairs=made.pairs + factors)


def _factors(diff: Tensor) -> tuple[Tensor, Tensor]:
    """Write a difference as two factors (up, down) with exactly this product."""
    rows = diff.flatten(1)
    if len(rows) <= rows.shape[1]:
        return (torch.eye(len(rows)), rows)
    return (rows, torch.eye(rows.shape[1]))


def _activation_form(patch: Patch, shape: Sequence[int], read: Callable[[], Tensor]) -> ActivationForm | None:
    """What a patch does at the activations, limited to its channels if it is for a part of a fused weight.

    None if maps cannot express it.
    """
    layer: Any = patch.layer
    if patch.part is None:
        return layer.activation_form(patch.strength, shape, read)
    side, start, length = patch.part
    part_shape = [length if dimension == side else size for dimension, size in enumerate(shape)]
    form = layer.activation_form(patch.strength, part_shape, lambda: read().narrow(side, start, length))
    if form is None or (form.inputs if side == 0 else form.outputs):
        return None

    def within(maps: Sequence[Any]) -> tuple[Map, ...]:
        return tuple(PartMap(channel_map, start, length) for channel_map in maps)

    return form._replace(
        inputs=within(form.inputs),
        outputs=within(form.outputs),
        keeps_output=True,
        layer_inputs=within(form.layer_inputs),
        layer_outputs=within(form.layer_outputs),
    )


def _group_by_schedule(patches: Sequence[Patch]) -> list[tuple[Schedule | MaskedRanks | None, list[Patch]]]:
    groups: dict[Schedule | MaskedRanks | None, list[Patch]] = {}
    for patch in patches:
        groups.setdefault(patch.changes, []).append(patch)
    return list(groups.items())
