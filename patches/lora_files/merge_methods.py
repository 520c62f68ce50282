"""The merge methods by name: how the changes that several LoRAs make to one weight become one. To add one, list its
record here.

Sources: TIES (Yadav 2023, arXiv 2306.01708), DARE (Yu 2023, 2311.03099) alone and with TIES' election as in PEFT, DELLA
(Deep 2024, 2406.11617), the Karcher mean on the sphere as mergekit has it, and TSV-Merge (Gargiulo 2024, 2412.00081) as
the orthogonal sum. A file's change has its strength in it, so a negative strength votes with the opposite sign.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...settings.declaration import read_values, setting
from ...storage.digest import sha256
from ..registry import Registry
from . import low_rank

_PARALLEL = 1e-6  # singular values of stacked unit vectors below this share of the largest are rounding
_OPPOSITE = 1e-6  # a mean of unit vectors shorter than this has no direction
_NO_STEP = 1e-12
_KARCHER_STEPS = 500


@dataclass(frozen=True, eq=False)
class FileChange:
    """What one file does to a weight of `shape`: up @ down in float32, or `diff` if it has no factors.

    `file` is its place in the stack. `strength` is in the factors already; methods that weigh directions need it too.
    """

    file: int
    strength: float
    shape: tuple[int, ...]
    up: Tensor | None = None
    down: Tensor | None = None
    diff: Tensor | None = None

    @property
    def factors(self) -> tuple[Tensor, Tensor] | None:
        """(up, down), or None."""
        return None if self.up is None or self.down is None else (self.up, self.down)

    def whole(self) -> Tensor:
        """The difference (shape) in float32."""
        if self.diff is not None:
            return self.diff
        assert self.up is not None and self.down is not None
        return (self.up @ self.down).reshape(self.shape)


class MergedChange(NamedTuple):
    """One change made of several: up @ down, or `diff`. `left_out` is the squared norm of what each file lost."""

    up: Tensor | None
    down: Tensor | None
    diff: Tensor | None
    left_out: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class MergeMethod:
    """One method. `merge(changes, settings, layer)` makes one change of those of the files for a layer.

    Without `merge` all factors are put side by side, in order: the plain sum.
    """

    name: str
    help: str
    merge: Callable[[Sequence[FileChange], MergeSettings, str], MergedChange] | None
    drops: bool = False
    """Whether it drops elements, down to the density."""
    ranks_rows: bool = False
    """Whether the chance of an element depends on its rank in its row, by epsilon."""
    about_zeros: str = ""
    """What the report says of a file whose change is zero in some layers, where that needs to be known."""


# --- methods that drop elements ---------------------------------------------------------------------------------------


class _Sparse(NamedTuple):
    """Which elements of a change stay, and what those are divided by."""

    kept: Tensor
    divisor: Tensor | float


def _largest(change: Tensor, settings: MergeSettings, generator: torch.Generator) -> _Sparse:
    """TIES' trim: the largest elements stay. Elements as large as the smallest of these stay too."""
    magnitudes = change.abs().flatten()
    count = max(1, int(settings.density * len(magnitudes)))
    threshold = magnitudes.kthvalue(len(magnitudes) - count + 1).values
    return _Sparse(change.abs() >= threshold, 1.0)


def _random(change: Tensor, settings: MergeSettings, generator: torch.Generator) -> _Sparse:
    """DARE: every element stays with the same chance, and is divided by it."""
    kept = torch.rand(change.shape, generator=generator) < settings.density
    return _Sparse(kept, settings.density)


def _random_by_rank(change: Tensor, settings: MergeSettings, generator: torch.Generator) -> _Sparse:
    """DELLA's MAGPRUNE: within a row, the larger an element, the better its chance to stay; it is divided by that.

    An element is dropped with density p = 1 - density: p - epsilon / 2 for the largest of n, and epsilon / n more for
    each place after it.
    """
    rows = change.flatten(1) if change.ndim > 1 else change[None]
    order = rows.abs().argsort(dim=1, descending=True, stable=True)
    by_place = settings.density + settings.epsilon / 2 - torch.arange(rows.shape[1]) * settings.epsilon / rows.shape[1]
    chances = torch.empty_like(rows).scatter_(1, order, by_place.to(rows).expand_as(rows))
    kept = torch.rand(rows.shape, generator=generator) < chances
    return _Sparse(kept.reshape(change.shape), chances.reshape(change.shape))


Sparsify = Callable[[Tensor, "MergeSettings", torch.Generator], _Sparse]
Merge = Callable[[Sequence[FileChange], "MergeSettings", str], MergedChange]


def mask_generator(seed: int, layer: str, file: int) -> torch.Generator:
    """The random draws for one file's elements of one layer; the same in every process."""
    digest = sha256(repr((seed, layer, file)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _dropping_merge(sparsify: Sparsify, elects: bool) -> Merge:
    """A method that drops elements of every change, and adds the rest up, or with `elects` takes TIES' election."""

    def merge(changes: Sequence[FileChange], settings: MergeSettings, layer: str) -> MergedChange:
        kept_elements, masks = [], []
        for change in changes:
            whole = change.whole()
            mask, divisor = sparsify(whole, settings, mask_generator(settings.mask_seed, layer, change.file))
            kept_elements.append(whole * mask / divisor)
            masks.append(mask)
        total = _elect(kept_elements, masks) if elects else _add_up(kept_elements)
        left_out = []
        for change, mask in zip(changes, masks, strict=True):
            left_out.append(energy(change.whole() * ~mask))
        return MergedChange(None, None, total, tuple(left_out))

    return merge


def _elect(changes: Sequence[Tensor], masks: list[Tensor]) -> Tensor:
    """TIES: the sign of the sum is elected for each element, and the mean of the elements that have it is the result.

    The elements that are outvoted leave the masks.
    """
    positive = _add_up(changes) >= 0
    total, count = torch.zeros_like(changes[0]), torch.zeros_like(changes[0])
    for number, change in enumerate(changes):
        agrees = torch.where(positive, change > 0, change < 0)
        total += change * agrees
        count += agrees
        masks[number] = masks[number] & agrees
    return total / count.clamp(min=1.0)


# --- methods that keep low ranks --------------------------------------------------------------------------------------


def _karcher(changes: Sequence[FileChange], settings: MergeSettings, layer: str) -> MergedChange:
    """The Karcher mean of the directions of the changes, weighted by strength, as long as they are on average.

    Every step of it is a combination of the changes, so their inner products are all it takes, and the result has the
    factors of the files. A change of zero counts neither in the direction nor in the length: a file that changes
    nothing leaves the merge as it is. mergekit counts it in the length, with 0, so that one zero change of two halves
    the result.
    """
    products = _inner_products(changes)
    norms = products.diagonal().clamp(min=0).sqrt()
    present = norms > 0
    if not bool(present.any()):
        return _sum(changes)
    divisors = torch.where(present, norms, 1.0)  # a file whose change is zero has no direction
    cosines = products / divisors.outer(divisors)
    shares = torch.tensor([abs(change.strength) for change in changes], dtype=torch.float64) * present
    mean = _mean_on_sphere(cosines, shares / shares.sum(), layer)
    weights = norms[present].mean() * mean / divisors
    on_mean = (cosines @ mean).clamp(0.0, 1.0)
    left_out = norms.square() * (1.0 - on_mean.square())
    return MergedChange(*_combine(changes, weights.tolist()), tuple(left_out.tolist()))


def _inner_products(changes: Sequence[FileChange]) -> Tensor:
    """The inner product of every two changes, in float64."""
    products = torch.zeros(len(changes), len(changes), dtype=torch.float64)
    for row, one in enumerate(changes):
        for column, other in enumerate(changes[: row + 1]):
            products[row, column] = products[column, row] = inner_product(one, other)
    return products


def _mean_on_sphere(cosines: Tensor, shares: Tensor, layer: str) -> Tensor:
    """The weighted Karcher mean of unit vectors with these cosines, as coefficients of the vectors."""
    mean = shares
    length = _length(cosines, mean)
    if length < _OPPOSITE:
        raise ValueError(_opposite_text(layer))
    mean = mean / length
    for _ in range(_KARCHER_STEPS):
        on_mean = (cosines @ mean).clamp(-1.0, 1.0)
        angles = on_mean.acos()
        if bool(((math.pi - angles < _OPPOSITE) & (shares > 0)).any()):
            raise ValueError(_opposite_text(layer))
        pulls = shares * torch.where(angles > 1e-7, angles / angles.sin(), 1.0)
        tangent = pulls - (pulls * on_mean).sum() * mean
        length = _length(cosines, tangent)
        if length < _NO_STEP:
            return mean
        mean = math.cos(length) * mean + math.sin(length) / length * tangent
        mean = mean / _length(cosines, mean)
    if length > _OPPOSITE:
        raise ValueError(_opposite_text(layer))
    return mean


def _length(cosines: Tensor, coefficients: Tensor) -> float:
    return math.sqrt(max(float(coefficients @ cosines @ coefficients), 0.0))


def _opposite_text(layer: str) -> str:
    return (
        f"{layer}: the changes of the files point in opposite directions, which have no Karcher mean; use merge method"
        " sum"
    )


def _orthogonal(changes: Sequence[FileChange], settings: MergeSettings, layer: str) -> MergedChange:
    """TSV-Merge: the singular vectors of all files are made orthogonal to each other, and keep their singular values.

    The nearest orthogonal vectors are taken (U of a polar decomposition), so no file comes first. A direction that
    several files share exactly counts once. If the ranks add up to more than the weight's, each file keeps its largest
    singular values. Biases and norms are added up.
    """
    parts = [_exact_svd(change) for change in changes] if len(changes[0].shape) > 1 else []
    if not any(len(part.values) for part in parts):
        return _sum(changes)
    most = min(parts[0][0].shape[0], parts[0][2].shape[1])
    if sum(len(values) for _, values, _ in parts) > most:
        each = max(1, most // len(parts))
        parts = [part.truncate(each) for part in parts]
    lefts = torch.cat([left for left, _, _ in parts], 1)
    rights = torch.cat([right for _, _, right in parts], 0)
    values = torch.cat([values for _, values, _ in parts])
    new_lefts, new_rights = _nearest_orthogonal(lefts), _nearest_orthogonal(rights.T).T
    left_out, start = [], 0
    for change, (left, own, right) in zip(changes, parts, strict=True):
        rows = slice(start, start + len(own))
        start = rows.stop
        weights = own.outer(own)
        alike = ((left.T @ new_lefts[:, rows]) * (right @ new_rights[rows].T) * weights).sum()
        new = ((new_lefts[:, rows].T @ new_lefts[:, rows]) * (new_rights[rows] @ new_rights[rows].T) * weights).sum()
        left_out.append(max(inner_product(change, change) - 2 * float(alike) + float(new), 0.0))
    roots = values.sqrt()
    return MergedChange((new_lefts * roots).float(), (roots[:, None] * new_rights).float(), None, tuple(left_out))


def _exact_svd(change: FileChange) -> low_rank.SVD:
    """The exact SVD of a change in float64, without singular values that are only rounding."""
    if change.factors is not None:
        found = low_rank.svd_of_product(*change.factors)
    else:
        found = low_rank.svd(change.whole().flatten(1))
    return found.truncate(int((found.values > 1e-7 * found.values[0]).sum()))


def _nearest_orthogonal(vectors: Tensor) -> Tensor:
    """The nearest matrix whose columns are orthonormal; columns that depend on each other share their directions."""
    side, triangle = torch.linalg.qr(vectors)
    left, values, right = torch.linalg.svd(triangle, full_matrices=False)
    independent = values > _PARALLEL * values[0]
    return side @ (left[:, independent] @ right[independent])


# --- shared -----------------------------------------------------------------------------------------------------------


def energy(change: Tensor) -> float:
    """The squared norm."""
    return float(torch.linalg.vector_norm(change, dtype=torch.float64)) ** 2


def inner_product(one: FileChange, other: FileChange) -> float:
    """The inner product of two changes of one weight, in float64. Where both have factors it is computed from them, as
    sum((up^T up') * (down down'^T)), without forming the changes.

    Args:
        one: what one file does.
        other: what another one does.
    """
    first, second = one.factors, other.factors
    if first is None or second is None:
        return float((one.whole().double() * other.whole().double()).sum())
    (up, down), (other_up, other_down) = first, second
    return float(((up.double().T @ other_up.double()) * (down.double() @ other_down.double().T)).sum())


def _add_up(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of tensors of one shape."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def _combine(
    changes: Sequence[FileChange], weights: Sequence[float]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(up, down, diff) of a weighted sum of changes: factors side by side if every change has some."""
    ups, downs = [], []
    for change, weight in zip(changes, weights, strict=True):
        if change.up is not None and change.down is not None:
            ups.append(change.up * weight)
            downs.append(change.down)
    if len(ups) == len(changes):
        return torch.cat(ups, 1), torch.cat(downs, 0), None
    total = torch.zeros(changes[0].shape)
    for change, weight in zip(changes, weights, strict=True):
        total.add_(change.whole(), alpha=weight)
    return None, None, total


def _sum(changes: Sequence[FileChange]) -> MergedChange:
    return MergedChange(*_combine(changes, [1.0] * len(changes)), (0.0,) * len(changes))


METHODS: Registry[MergeMethod] = Registry(
    "merge method",
    (
        MergeMethod(name="sum", help="adds up the changes", merge=None),
        MergeMethod(
            name="ties",
            help="keeps the largest elements, and where the files disagree those of the stronger sign",
            merge=_dropping_merge(_largest, elects=True),
            drops=True,
        ),
        MergeMethod(
            name="dare_linear",
            help="drops elements at random, scales the rest up and adds",
            merge=_dropping_merge(_random, elects=False),
            drops=True,
        ),
        MergeMethod(
            name="dare_ties",
            help="drops like dare_linear, then the sign is elected as by ties",
            merge=_dropping_merge(_random, elects=True),
            drops=True,
        ),
        MergeMethod(
            name="della",
            help="like dare_ties, but large elements are dropped less often",
            merge=_dropping_merge(_random_by_rank, elects=True),
            drops=True,
            ranks_rows=True,
        ),
        MergeMethod(
            name="karcher",
            help="the mean direction, at the mean length; a change of zero counts in neither",
            merge=_karcher,
            about_zeros=(
                "There karcher counts it neither in the direction nor in the length; mergekit counts it in the length,"
                " with 0"
            ),
        ),
        MergeMethod(
            name="orthogonal", help="TSV-Merge: keeps the files out of each other's directions", merge=_orthogonal
        ),
    ),
)


def _describe(records: Iterable[Any]) -> str:
    """The names of records, each with what it does."""
    return " ".join(f"{record.name} {record.help}." for record in records)


@dataclass(frozen=True)
class MergeSettings:
    """How LoRAs are merged; plain values, checked on creation.

    - `method` is a name in METHODS; `density`, `epsilon` and `mask_seed` are for the methods that drop elements.
    - `resize` is a name in `low_rank.RANK_RULES`, which chooses the rank of each layer; `resize_to` is its target.
    """

    method: str = setting(
        "merge method",
        "sum",
        lambda: f"How the LoRAs become one. {_describe(METHODS)} Try ties if a sum looks overdone.",
        choices=METHODS.names,
    )
    density: float = setting(
        "density",
        0.5,
        "For ties, dare_linear, dare_ties and della: the share of each LoRA's elements that is kept. Lower it if the"
        " LoRAs still get in each other's way.",
        low=0.0,
        high=1.0,
        step=0.05,
    )
    resize: str = setting(
        "resize",
        "none",
        lambda: (
            f"Gives every layer its own rank, up to maximum rank. {_describe(low_rank.RANK_RULES)} The sv rules are"
            " kohya's."
        ),
        choices=low_rank.RANK_RULES.names,
        kohya=("--dynamic_method", "`sv_fro`, `sv_cumulative` and `sv_ratio`, as in `resize_lora.py`"),
    )
    resize_to: float = setting(
        "resize to",
        0.9,
        "The target of resize: a share such as 0.9 for energy, sv_fro and sv_cumulative, a ratio such as 20 for"
        " sv_ratio.",
        low=0.0,
        high=10000.0,
        step=0.01,
        kohya=("--dynamic_param", "as in `resize_lora.py`"),
    )
    epsilon: float = setting(
        "epsilon",
        0.1,
        "For della: how much the chance of being kept differs between the largest and the smallest element of a row."
        " 0 drops like dare_ties.",
        low=0.0,
        high=1.0,
        step=0.01,
        advanced=True,
    )
    mask_seed: int = setting(
        "seed",
        0,
        "For DARE and DELLA: which elements are dropped. The same seed and inputs give the same file.",
        low=0,
        high=0xFFFFFFFFFFFFFFFF,
        advanced=True,
    )

    def __post_init__(self) -> None:
        errors = read_values(self)
        if errors:
            raise ValueError("; ".join(errors))
        method, rule = METHODS.get(self.method), low_rank.RANK_RULES.get(self.resize)
        if method.drops and not self.density:
            raise ValueError("density is 0, expected above 0 and at most 1, such as 0.5")
        if method.ranks_rows:
            room = 2 * min(self.density, 1.0 - self.density)
            if self.epsilon > room:
                raise ValueError(
                    f"epsilon is {self.epsilon:g}, expected from 0 to {room:g}: with density {self.density:g} a larger"
                    " one keeps elements with a chance below 0 or above 1"
                )
        if self.resize != "none":
            problem = rule.problem(self.resize_to)
            if problem is not None:
                raise ValueError(f"resize to is {problem}")
