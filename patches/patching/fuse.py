"""Merges a stack of LoRAs into a weight: concatenates the factor pairs into one product, accumulates in float32, rounds
once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...storage.digest import sha256, tensor_bytes
from ..adapters.layer import MAX_FACTOR_RANK, Layer
from ..adapters.registry import plain_fields
from .rounding import stochastic
from .strength_schedule import Schedule

Slice = tuple[int, int, int]  # (dimension, start, length): the part of a fused weight that a layer is for

_serial = itertools.count(1)
_BLOCK = 2**21  # elements processed at once if float32 copies are needed
FACTOR_ELEMENTS = 2**20  # elements of `up` that are split at once
_NOISE = 3e-5  # share of the rounding energy: raises the mean error by less than 0.01 %
# splitting off cheaper components pays only if at least 1 in this many qualifies
_WORTH = 8
_LEFT = 1 / 400  # two products leave this share of the noise of rounding both factors


@dataclass(frozen=True, eq=False)
class Patch:
    """One layer of one LoRA on one weight. A schedule multiplies its strength during sampling, and works only at the
    activations.
    """

    layer: Layer
    strength: float
    part: Slice | None = None
    schedule: Schedule | None = None


class Stack:
    """The LoRA stack of one node on one model: patches by weight name, in order; `bypass` names the weights patched at
    the activations.
    """

    def __init__(self, patches: Mapping[str, Sequence[Patch]], bypass: Iterable[str] = ()):
        self.patches = {name: tuple(weight_patches) for name, weight_patches in patches.items()}
        self.bypass = frozenset(bypass)
        self.serial = next(_serial)
        self._identity: str | None = None

    def __deepcopy__(self, memo: dict) -> Stack:
        return self

    @property
    def identity(self) -> str:
        """sha256 of everything the stack does (weights, strengths, tensors): the same in every process, for
        fingerprints.
        """
        if self._identity is None:
            digest = sha256()
            for name in sorted(self.patches):
                for patch in self.patches[name]:
                    layer = patch.layer
                    settings = (
                        name,
                        name in self.bypass,
                        patch.strength,
                        patch.part,
                        patch.schedule,
                        plain_fields(layer),
                    )
                    digest.update(repr((settings, [(str(t.dtype), tuple(t.shape)) for t in layer.tensors()])).encode())
                    for tensor in layer.tensors():
                        digest.update(tensor_bytes(tensor))
            self._identity = digest.hexdigest()
        return self._identity


@dataclass(frozen=True, eq=False)
class Fused:
    """All patches of one weight: delta = up @ down + diff, with R components.

    `ups` are (out, r) in the files' types; `scale` (R,) in float32 holds each component's strength times scale; `up`
    (out, R) in float32 combines the two. `down` (R, columns) has the files' common type; R may be 0. `diff` is float32
    in the weight's shape, or None.
    """

    ups: Sequence[Tensor]
    scale: Tensor
    down: Tensor
    diff: Tensor | None

    @property
    def up(self) -> Tensor:
        return self.up_of(slice(None))

    def up_of(self, rows: slice) -> Tensor:
        """Some rows of `up`."""
        return _joined([up[rows] for up in self.ups], 1).to(torch.float32, copy=True).mul_(self.scale)


def fuse(
    patches: Sequence[Patch], shape: Sequence[int], device: torch.device | str = "cpu", max_rank: int = MAX_FACTOR_RANK
) -> Fused:
    """Concatenate the factor pairs of one weight of `shape` and sum the full differences; every patch must be additive.

    A LoHa counts as a factor pair if it has at most `max_rank` components.
    """
    ups, downs, scales, diff = [], [], [], None
    out, columns, kernel = shape[0], torch.Size(shape[1:]).numel(), torch.Size(shape[2:]).numel()
    for patch in patches:
        layer: Any = patch.layer  # checked by attribute, not by class: the package may be imported twice
        factors = layer.factors(max_rank)
        if factors is not None:
            up, down = (factor.to(device, non_blocking=True) for factor in factors)
            ups.append(_placed(up, patch.part, 0, out))
            downs.append(_placed(down, patch.part, 1, columns, kernel))
            scales += [patch.strength * layer.scale] * up.shape[1]
        else:
            if diff is None:
                diff = torch.zeros(tuple(shape), device=device)
            target = diff.narrow(*(patch.part or (0, 0, out)))
            target.add_(layer.delta(target.shape, device), alpha=patch.strength)
    if not ups:
        ups, downs = [torch.zeros(out, 0, device=device)], [torch.zeros(0, columns, device=device)]
    return Fused(ups, torch.tensor(scales, dtype=torch.float32, device=device), _joined(downs, 0), diff)


def _joined(factors: Sequence[Tensor], dimension: int) -> Tensor:
    """Concatenate factors in their common type, or float32 if they differ."""
    if len(factors) == 1:
        return factors[0]
    same_dtype = len({factor.dtype for factor in factors}) == 1
    return torch.cat(list(factors) if same_dtype else [factor.float() for factor in factors], dimension)


def _placed(factor: Tensor, part: Slice | None, dimension: int, size: int, kernel: int = 1) -> Tensor:
    """A factor for a part of the weight, padded with zeros to the whole weight; a convolution has `kernel` columns per
    channel.
    """
    if part is None or part[0] != dimension:
        return factor
    shape = list(factor.shape)
    shape[dimension] = size
    placed = torch.zeros(shape, dtype=factor.dtype, device=factor.device)
    placed.narrow(dimension, part[1] * kernel, part[2] * kernel).copy_(factor)
    return placed


def patched(base: Tensor, patches: Sequence[Patch], out: Tensor | None = None, seed: int | None = None) -> Tensor:
    """base with every patch applied in order: one product accumulated in float32 and rounded once to base's type,
    written to `out` if given.

    `base` is a floating weight (out, ...) of any shape but a scalar; `out` has its shape, type and device, and may be
    `base` itself. Patches that do more than add (DoRA, OFT, set_weight …) see the result of the patches before them. A
    `seed` makes the rounding stochastic.
    """
    if out is None:
        result = torch.empty(base.shape, dtype=base.dtype, device=base.device)
    else:
        result = out
    if not result.is_contiguous():  # a convolution's weight in channels_last, changed in place
        return result.copy_(patched(base, patches, seed=seed))
    if seed is None:
        generator = None
    else:
        generator = torch.Generator(base.device).manual_seed(seed)
    if not additive(patches):
        return result.copy_(_rounded(in_order(base.float(), patches), base.dtype, generator))
    fused = fuse(patches, base.shape, base.device)
    rows, target = base.reshape(base.shape[0], -1), result.view(base.shape[0], -1)
    if fused.diff is None:
        diff = None
    else:
        diff = fused.diff.reshape(target.shape)
    if diff is None and generator is None and base.dtype in (torch.float32, torch.bfloat16):
        half = base.dtype == torch.bfloat16
        if half and fused.down.dtype == torch.bfloat16:
            down = fused.down
        else:
            down = fused.down.float()
        for block in _blocks(len(rows), FACTOR_ELEMENTS // max(1, len(fused.scale))):
            up = fused.up_of(block)
            torch.addmm(
                rows[block], *(bfloat16_factors(up, down, rows[block]) if half else (up, down)), out=target[block]
            )
        return result
    down = fused.down.float()
    for block in _blocks(len(rows), _BLOCK // rows.shape[1]):  # float32 copies of a few rows at a time
        total = rows[block].to(torch.float32, copy=True)
        if diff is not None:
            total += diff[block]
        target[block] = _rounded(total.addmm_(fused.up_of(block), down), base.dtype, generator)
    return result


def _blocks(rows: int, step: int) -> Iterator[slice]:
    return (slice(start, start + step) for step in [max(1, step)] for start in range(0, rows, step))


def _rounded(values: Tensor, dtype: torch.dtype, draws: torch.Generator | None) -> Tensor:
    if draws is None:
        return values.to(dtype)
    return stochastic(values, dtype, draws)


def additive(patches: Iterable[Patch]) -> bool:
    """Whether all of these only add to the weight, whatever it is; then their order does not matter, and they work at
    the activations too.
    """
    return all(patch.layer.additive for patch in patches)


def in_order(weight: Tensor, patches: Sequence[Patch]) -> Tensor:
    """A float32 weight (left unchanged) with patches of any kind applied one after the other; consecutive additive
    patches become one product.
    """
    result = weight
    for is_additive, batch in itertools.groupby(patches, lambda patch: patch.layer.additive):
        if is_additive:
            result = patched(result, list(batch))
            continue
        for patch in batch:
            layer: Any = patch.layer
            if result is weight:
                result = result.clone()
            part = result.narrow(*(patch.part or (0, 0, result.shape[0])))
            part.lerp_(layer.apply(part.clone()), patch.strength)
    return result


def bfloat16_factors(up: Tensor, down: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """bfloat16 factors (out, K), (K, columns) of the product `up` (out, R) float32 @ `down` (R, columns), precise
    enough to add to `base`.

    Rounding both factors of component r to bfloat16 adds noise of energy 2 |up_r|^2 |down_r|^2 e^2 to the result;
    rounding the result itself always adds |base|^2 e^2. The total noise stays below _NOISE of that: each component gets
    the cheapest method that allows it. On devices other than a CPU, checking costs more than multiplying, so every
    component gets the most precise method.
    """
    exact = down.dtype == torch.bfloat16
    if not exact:
        down = down.float()
    if exact:
        ways = [_once, _high_and_low]
    else:
        ways = [_once, _twice, _high_and_low]
    shares = _shared_out(up, down, base, (1.0,) if exact else (2.0, 2.0 * _LEFT))
    factors = [
        way(up[:, components], down[components])
        for way, components in zip(ways, shares, strict=True)
        if components is not None
    ]
    ups, downs = zip(*factors, strict=True)
    return _joined(ups, 1), _joined(downs, 0)


def _once(up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Each component as one product of rounded factors."""
    return up.bfloat16(), down.bfloat16()


def _twice(up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Each component as two products that cancel each other's rounding: B A = (B h + (B - B h)) A with h = 31/32.

    With e = bf16(h B) - h B and f = bf16(A) - A the second product is (B / 32 - e) (A - 31 f); what remains in the sum
    is 32 e f and the rounding of the second, which is 32 times smaller: _LEFT of the noise of `_once`.
    """
    rank = up.shape[1]
    ups, downs = (
        torch.empty(shape, dtype=torch.bfloat16, device=up.device)
        for shape in ((len(up), 2 * rank), (2 * rank, down.shape[1]))
    )
    ups[:, :rank] = up * (31 / 32)
    ups[:, rank:] = up - ups[:, :rank]
    downs[:rank] = down
    downs[rank:] = (32.0 * down).sub_(downs[:rank], alpha=31.0)
    return ups, downs


def _high_and_low(up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Each component as the products of its factors' high and low parts (except low times low), exact compared with the
    result's rounding.
    """
    high, coarse = _once(up, down)
    ups, downs = [high, (up - high).bfloat16()], [coarse, coarse]
    if down.dtype != torch.bfloat16:
        ups.append(high)
        downs.append((down - coarse).bfloat16())
    return torch.cat(ups, 1), torch.cat(downs, 0)


def _shared_out(up: Tensor, down: Tensor, base: Tensor, left: Sequence[float]) -> list[slice | Tensor | None]:
    """Assigns components to multiplication methods: method n leaves left[n] |up_r|^2 |down_r|^2 e^2 of noise, the last
    one none.
    """
    all_components = slice(None)
    if up.device.type != "cpu":
        return [*(None for _ in left), all_components]
    noise = up.square().sum(0) * down.float().square().sum(1)
    sample = base[:: max(1, base.shape[0] // 64)]
    size = 1.25 * float(sample.float().abs().sum()) / sample.numel()  # a normal weight's root mean square
    allowed_noise = _NOISE * size * size * base.numel()
    total_noise = float(noise.sum())
    for way, share in enumerate(left):
        if share * total_noise <= allowed_noise:
            return [all_components if place == way else None for place in range(len(left) + 1)]
    noise, order = noise.sort()
    ends = [int((share * noise.cumsum(0) <= allowed_noise / len(left)).sum()) for share in left]  # the weakest go first
    if sum(ends) < len(order) // _WORTH:
        return [*(None for _ in left), all_components]
    return [order[start:end] if start < end else None for start, end in itertools.pairwise([0, *ends, len(order)])]


def shared_out(stacks: Iterable[Stack], weight: str) -> tuple[list[Stack], list[Stack]]:
    """(stacks merged into a weight, stacks applied at the activations), each in order.

    The activations come after everything merged. If that would change the order of patches that do more than add, a
    stack to merge that follows one at the activations goes to the activations too.
    """
    merged: list[Stack] = []
    activations: list[Stack] = []
    for stack in stacks:
        if weight in stack.patches:
            late = bool(activations) and not additive(
                patch for other in (*activations, stack) for patch in other.patches[weight]
            )
            (activations if weight in stack.bypass or late else merged).append(stack)
    return merged, activations


def effective(stacks: Iterable[Stack], weight: str, bypass: bool) -> list[Patch]:
    """The patches of all stacks for one weight, in order: those applied at the activations if `bypass`, else the merged
    ones.
    """
    return [patch for stack in shared_out(stacks, weight)[bypass] for patch in stack.patches[weight]]
