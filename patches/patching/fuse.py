"""Merges a stack of LoRAs into one weight.

All up and down matrices become one matrix product, which is added up in float32 and rounded once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...storage.digest import sha256, tensor_bytes
from ..adapters.layer import MAX_FACTOR_RANK, Layer
from ..adapters.registry import plain_fields
from ..core.host_memory import upload
from .rounding import round_stochastically
from .strength_schedule import MaskedRanks, Schedule

Slice = tuple[int, int, int]  # (dimension, start, length): the part of a fused weight that a layer is for

# Weights in these types can be compared, and changed by any kind of layer; the others are quantized.
MERGEABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_serial = itertools.count(1)
_BLOCK = 2**18  # elements processed at once if float32 copies are needed
DEVICE_BLOCK = 2**24  # on a device; of larger weights half at once
FACTOR_ELEMENTS = 2**19  # elements of `up` that are split at once
_NOISE = 3e-5  # allowed noise, as a fraction of the energy of rounding: adds less than 0.01% to the mean error
# cheaper methods for some components pay only if at least 1 in this many components can use them
_WORTH = 8
_LEFT = 1 / 400  # the fraction of the noise of rounding both factors that two products leave


@dataclass(frozen=True, eq=False)
class Patch:
    """One layer of one LoRA, for one weight.

    A schedule multiplies its strength during sampling; it works only at the activations. `file` is the LoRA's place in
    the stack, for merges that treat files by themselves.
    """

    layer: Layer
    strength: float
    part: Slice | None = None
    schedule: Schedule | None = None
    file: int = 0

    @property
    def masked_ranks(self) -> MaskedRanks | None:
        """The layer's ranks, if fewer of them work the more noise there is."""
        mask = getattr(self.layer, "rank_mask", None)
        if mask is None:
            return None
        return MaskedRanks(mask, self.schedule)

    @property
    def changes(self) -> Schedule | MaskedRanks | None:
        """What makes it change during sampling; None if it stays as it is."""
        return self.masked_ranks or self.schedule


class WeightChange(NamedTuple):
    """What a stack does to one weight of a model: its patches, the weight's shape, and how to read the weight in
    float32.
    """

    patches: Sequence[Patch]
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


class Stack:
    """The LoRA stack of one node for one model: the patches of each weight, in order.

    `bypass` names the weights that are patched at the activations.
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
        """sha256 of everything that the stack does (weights, strengths, tensors). It is the same in every process, for
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
    """All patches of one weight as one change: up @ down + diff, with R components.

    - `ups`: the up matrices (out, r) in the types of their files.
    - `scale` (R,), float32: strength times scale of each component. `up` (out, R), float32, is `ups` times `scale`.
    - `down` (R, columns): in the common type of the files. R may be 0.
    - `diff`: float32 in the weight's shape, or None.
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
        return _concatenate([up[rows] for up in self.ups], 1).to(torch.float32, copy=True).mul_(self.scale)


def fuse(
    patches: Sequence[Patch], shape: Sequence[int], device: torch.device | str = "cpu", max_rank: int = MAX_FACTOR_RANK
) -> Fused:
    """Combine the patches of one weight: concatenate up and down matrices, and sum full differences.

    Args:
        patches: additive ones.
        shape: the weight's (out, in, *kernel).
        device: where they are put together.
        max_rank: a LoHa counts as up and down matrices if it has at most so many components.
    """
    ups, downs, scales, diff = [], [], [], None
    out, columns, kernel = _rows_of(shape), torch.Size(shape[1:]).numel(), torch.Size(shape[2:]).numel()
    for patch in patches:
        layer: Any = patch.layer  # checked by attribute, not by class: the package may be imported twice
        factors = layer.factors(max_rank)
        if factors is not None:
            up, down = (upload(factor, torch.device(device)) for factor in factors)
            ups.append(_pad_part(up, patch.part, 0, out))
            downs.append(_pad_part(down, patch.part, 1, columns, kernel))
            scales += [patch.strength * layer.scale] * up.shape[1]
        else:
            if diff is None:
                diff = torch.zeros(tuple(shape), device=device)
            target = _part_of(diff, patch)
            target.add_(layer.delta(target.shape, device), alpha=patch.strength)
    if not ups:
        ups, downs = [torch.zeros(out, 0, device=device)], [torch.zeros(0, columns, device=device)]
    scale = upload(torch.tensor(scales, dtype=torch.float32), torch.device(device))
    return Fused(ups, scale, _concatenate(downs, 0), diff)


def _rows_of(shape: Sequence[int]) -> int:
    """The rows of a weight of `shape`: a scalar is one."""
    return shape[0] if len(shape) else 1


def _part_of(weight: Tensor, patch: Patch) -> Tensor:
    """The part of a weight that a patch is for, as a view."""
    return weight if patch.part is None else weight.narrow(*patch.part)


def _concatenate(factors: Sequence[Tensor], dimension: int) -> Tensor:
    """Concatenate factors in their common type, or float32 if they differ."""
    if len(factors) == 1:
        return factors[0]
    same_dtype = len({factor.dtype for factor in factors}) == 1
    return torch.cat(list(factors) if same_dtype else [factor.float() for factor in factors], dimension)


def _pad_part(factor: Tensor, part: Slice | None, dimension: int, size: int, kernel: int = 1) -> Tensor:
    """Pad a factor for a part of a weight with zeros to the size of the whole weight.

    A convolution has `kernel` columns per channel.
    """
    if part is None or part[0] != dimension:
        return factor
    shape = list(factor.shape)
    shape[dimension] = size
    placed = torch.zeros(shape, dtype=factor.dtype, device=factor.device)
    placed.narrow(dimension, part[1] * kernel, part[2] * kernel).copy_(factor)
    return placed


def apply_patches(base: Tensor, patches: Sequence[Patch], out: Tensor | None = None, seed: int | None = None) -> Tensor:
    """A weight with all patches applied in order, computed in float32 and rounded once to the weight's type.

    Args:
        base: a floating weight (out, ...) of any shape.
        patches: of any kind. Those that do more than add (DoRA, OFT, set_weight …) get the result of those before them.
        out: where the result is written, with the shape, type and device of `base`; it may be `base` itself.
        seed: makes the rounding stochastic; None rounds to the nearest.

    Returns:
        `out`, or a new tensor.
    """
    result = torch.empty(base.shape, dtype=base.dtype, device=base.device) if out is None else out
    if not result.is_contiguous():  # a convolution's weight in channels_last, changed in place
        return result.copy_(apply_patches(base, patches, seed=seed))
    generator = None if seed is None else torch.Generator(base.device).manual_seed(seed)
    if not are_additive(patches):
        return result.copy_(_round(apply_in_order(base.float(), patches), base.dtype, generator))
    fused = fuse(patches, base.shape, base.device)
    out_rows = _rows_of(base.shape)
    rows, target = base.reshape(out_rows, -1), result.view(out_rows, -1)
    if fused.diff is None and generator is None and multiplies_fast(base.dtype, base.device):
        _add_product(rows, fused, target)
    else:
        _add_in_float32(rows, fused, target, generator)
    return result


@functools.cache
def multiplies_fast(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a device multiplies matrices of a type with float32 sums and at full speed.

    float16 sums may be rounded on the way. A CPU without AVX-512 multiplies bfloat16 number by number, up to 50 times
    slower than float32; GPUs before compute capability 8.0 have no bfloat16 units.
    """
    if dtype != torch.bfloat16:
        return dtype == torch.float32
    if device.type == "cpu":
        return torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return True


def _add_product(rows: Tensor, fused: Fused, target: Tensor) -> None:
    """Write rows + up @ down in the weight's own type, a block of rows and columns at a time."""
    half = rows.dtype == torch.bfloat16
    step = FACTOR_ELEMENTS // max(1, len(fused.scale))
    if rows.device.type != "cpu":  # where each block would be a few more kernels, and no cache is gained
        step = max(rows.shape)
    for columns in _blocks(rows.shape[1], step):
        down = fused.down[:, columns]
        if not half or down.dtype != torch.bfloat16:
            down = down.float()
        for block in _blocks(len(rows), step):
            base = rows[block, columns]
            up = fused.up_of(block)
            factors = bfloat16_factors(up, down, base) if half else (up, down)
            torch.addmm(base, *factors, out=target[block, columns])


def _add_in_float32(rows: Tensor, fused: Fused, target: Tensor, draws: torch.Generator | None) -> None:
    """Write rows + up @ down + diff through float32 copies of a few rows at a time."""
    down, step = fused.down.float(), _BLOCK // rows.shape[1]
    if rows.device.type != "cpu":
        step = len(rows) if rows.numel() <= DEVICE_BLOCK else -(-len(rows) // 2)
    for block in _blocks(len(rows), step):
        target[block] = _round(_float32_rows(rows, fused, down, block), rows.dtype, draws)


def _float32_rows(rows: Tensor, fused: Fused, down: Tensor, block: slice) -> Tensor:
    """Some rows of the sum in float32."""
    total = rows[block].to(torch.float32, copy=True)
    if fused.diff is not None:
        total += fused.diff.reshape(rows.shape)[block]
    return total.addmm_(fused.up_of(block), down)


def _blocks(rows: int, step: int) -> Iterator[slice]:
    return (slice(start, start + step) for step in [max(1, step)] for start in range(0, rows, step))


def _round(values: Tensor, dtype: torch.dtype, draws: torch.Generator | None) -> Tensor:
    return values.to(dtype) if draws is None else round_stochastically(values, dtype, draws)


def are_additive(patches: Iterable[Patch]) -> bool:
    """Whether all patches just add something to the weight, whatever the weight is.

    Then their order does not matter, and they work at the activations too.
    """
    return all(patch.layer.is_additive for patch in patches)


def apply_in_order(weight: Tensor, patches: Sequence[Patch]) -> Tensor:
    """Apply patches one after the other. Consecutive additive patches become one product.

    Args:
        weight: (out, ...) in float32; it stays as it is.
        patches: of any kind.

    Returns:
        The new weight, in float32; the same object where nothing changes it.
    """
    result = weight
    for is_additive, batch in itertools.groupby(patches, lambda patch: patch.layer.is_additive):
        if is_additive:
            result = apply_patches(result, list(batch))
            continue
        for patch in batch:
            layer: Any = patch.layer
            if result is weight:
                result = result.clone()
            part = _part_of(result, patch)
            part.lerp_(layer.apply(part.clone()), patch.strength)
    return result


def bfloat16_factors(up: Tensor, down: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """Round two factors to bfloat16 so that their product stays precise enough to add to a weight.

    Rounding both factors of component r to bfloat16 adds noise of energy 2 |up_r|^2 |down_r|^2 e^2 to the result.
    Rounding the result itself always adds |base|^2 e^2. The noise of the factors stays below _NOISE of that: each
    component gets the cheapest method that is precise enough. On devices other than a CPU, checking costs more than
    multiplying, so every component gets the most precise method.

    Args:
        up: (out, R) in float32.
        down: (R, columns); bfloat16 ones are exact already.
        base: the weight (out, columns), whose size says how much noise is allowed.

    Returns:
        bfloat16 factors (out, K) and (K, columns), where K grows with the precision.
    """
    exact = down.dtype == torch.bfloat16
    if not exact:
        down = down.float()
    ways = [_round_once, _split_high_and_low] if exact else [_round_once, _round_twice, _split_high_and_low]
    shares = _choose_ways(up, down, base, (1.0,) if exact else (2.0, 2.0 * _LEFT))
    factors = [
        way(up[:, components], down[components])
        for way, components in zip(ways, shares, strict=True)
        if components is not None
    ]
    ups, downs = zip(*factors, strict=True)
    return _concatenate(ups, 1), _concatenate(downs, 0)


def _round_once(up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """The cheapest method: one product of rounded factors per component."""
    return up.bfloat16(), down.bfloat16()


def _round_twice(up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """The middle method: two products per component that cancel each other's rounding.

    B A = (B h + (B - B h)) A with h = 31/32. With e = bf16(h B) - h B and f = bf16(A) - A the second product is (B / 32
    - e) (A - 31 f). What remains in the sum is 32 e f and the rounding of the second product, which is 32 times
    smaller: _LEFT of the noise of `_once`.
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


def _split_high_and_low(up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """The most precise method: split each factor into a high and a low part and multiply all but low times low.

    Its error is negligible beside the rounding of the result.
    """
    high, coarse = _round_once(up, down)
    ups, downs = [high, (up - high).bfloat16()], [coarse, coarse]
    if down.dtype != torch.bfloat16:
        ups.append(high)
        downs.append((down - coarse).bfloat16())
    return torch.cat(ups, 1), torch.cat(downs, 0)


def _choose_ways(up: Tensor, down: Tensor, base: Tensor, left: Sequence[float]) -> list[slice | Tensor | None]:
    """Choose the cheapest precise enough method for each component; returns the components of each method.

    Method n leaves noise of left[n] |up_r|^2 |down_r|^2 e^2; the last method leaves none. The weakest components get
    the cheapest method, until the allowed noise is used up.
    """
    all_components = slice(None)
    if up.device.type != "cpu":
        return [*(None for _ in left), all_components]
    noise = up.square().sum(0) * down.float().square().sum(1)
    sample = base[:: max(1, base.shape[0] // 64)]
    # the root mean square of the weight, if its values are normally distributed
    size = 1.25 * float(sample.float().abs().sum()) / sample.numel()
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


def split_stacks(stacks: Iterable[Stack], weight: str) -> tuple[list[Stack], list[Stack]]:
    """Divide the stacks on a weight by where they are applied.

    The activations come after everything that is merged. So a stack to merge that follows one at the activations goes
    to the activations too, if the order matters because some patches do more than add.

    Args:
        stacks: those of a model, in order.
        weight: its name.

    Returns:
        (those that are merged, those that are applied at the activations), each in order.
    """
    merged: list[Stack] = []
    activations: list[Stack] = []
    for stack in stacks:
        if weight in stack.patches:
            late = bool(activations) and not are_additive(
                patch for other in (*activations, stack) for patch in other.patches[weight]
            )
            (activations if weight in stack.bypass or late else merged).append(stack)
    return merged, activations


def effective_patches(stacks: Iterable[Stack], weight: str, bypass: bool) -> list[Patch]:
    """The patches of all stacks for one weight, in order: with `bypass` those at the activations, else the merged."""
    return [patch for stack in split_stacks(stacks, weight)[bypass] for patch in stack.patches[weight]]
