"""Reduces a matrix or a product to a rank by SVD (randomized for large matrices, Halko 2011), and chooses ranks.

A rank rule says how many singular values of a layer stay. To add one, list its record here. sv_fro, sv_cumulative and
sv_ratio are those of kohya's resize_lora.py (sd-scripts).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..registry import Registry

_SMALL = 384  # up to this side a full SVD is quick
_CANCELED = 1e-14  # singular values of a product below this share of its factors' norms are rounding of float64


def cut_to_rank(up: Tensor, down: Tensor, rank: int) -> tuple[Tensor, Tensor, float, float]:
    """Reduce a product to a rank by SVD, in float64.

    Args:
        up: (out, r).
        down: (r, columns).
        rank: the largest rank of the result.

    Returns:
        (up (out, rank), down (rank, columns), squared norm of the whole, squared norm of what is lost). The factors are
        balanced, and have the type of `up`.
    """
    change = svd_of_product(up, down)
    energies = change.values.square()
    first, second = change.truncate(rank).balance()
    return first.to(up.dtype), second.to(up.dtype), float(energies.sum()), float(energies[rank:].sum())


def best_factors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    """Reduce a matrix to a rank. Beyond a few hundred rows and columns by Halko's randomized SVD (2011, arXiv
    0909.4061), with a fixed seed of its own.

    What is lost is measured by itself, never as the difference of two large norms: rounding would be more than most of
    what a LoRA leaves out.

    Args:
        matrix: (out, columns).
        rank: the largest rank of the result.

    Returns:
        (up (out, rank), down (rank, columns), squared norm of what is lost), with the singular values split evenly
        between the factors.
    """
    rank = min(rank, *matrix.shape)
    if min(matrix.shape) <= max(_SMALL, 4 * rank):
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        lost = float(values[rank:].double().square().sum())
    else:
        projection = torch.randn(matrix.shape[1], rank + 16, generator=torch.Generator().manual_seed(0)).to(matrix)
        basis = torch.linalg.qr(matrix @ projection).Q
        for _ in range(3):
            basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.T @ basis).Q).Q
        left, values, right = torch.linalg.svd(basis.T @ matrix, full_matrices=False)
        left = basis @ left
        rest = matrix - (left[:, :rank] * values[:rank]) @ right[:rank]
        lost = float(torch.linalg.vector_norm(rest, dtype=torch.float64)) ** 2
    return *SVD(left, values, right).truncate(rank).balance(), lost


class SVD(NamedTuple):
    """An SVD: left (out, r) @ diag(values (r,)) @ right (r, columns), the largest value first."""

    left: Tensor
    values: Tensor
    right: Tensor

    def truncate(self, rank: int) -> SVD:
        """The largest singular values only.

        Args:
            rank: how many.
        """
        return SVD(self.left[:, :rank], self.values[:rank], self.right[:rank])

    def balance(self) -> tuple[Tensor, Tensor]:
        """(up, down), with the singular values split evenly between them."""
        roots = self.values.sqrt()
        return self.left * roots, roots[:, None] * self.right

    def factors(self) -> tuple[Tensor, Tensor]:
        """`balance` in float32."""
        up, down = self.balance()
        return up.float(), down.float()


def svd(matrix: Tensor) -> SVD:
    """The exact SVD of a matrix.

    Args:
        matrix: (out, columns).

    Returns:
        r = min(out, columns) singular values with their vectors, computed in float64 up to a few hundred rows or
        columns, else in float32; the result is float64.
    """
    if min(matrix.shape) <= _SMALL:
        matrix = matrix.double()
    return SVD(*(part.double() for part in torch.linalg.svd(matrix, full_matrices=False)))


def svd_of_product(up: Tensor, down: Tensor) -> SVD:
    """The exact SVD of a product, from the small matrix between orthogonal sides. Factors that cancel out, as those of
    a file and of its negative do, leave singular values of exactly 0.

    Args:
        up: (out, r).
        down: (r, columns).

    Returns:
        r singular values with their vectors, in float64.
    """
    (left_side, first), (right_side, second) = torch.linalg.qr(up.double()), torch.linalg.qr(down.double().T)
    left, values, right = torch.linalg.svd(first @ second.T, full_matrices=False)
    rounding = _CANCELED * float(first.norm()) * float(second.norm())
    return SVD(left_side @ left, values * (values > rounding), right @ right_side.T)


# --- a rank for each layer --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RankRule:
    """One rule. `rank(values, target)` is the rank for singular values, the largest first; it is at least 1."""

    name: str
    help: str
    rank: Callable[[Tensor, float], int]
    target_is_ratio: bool = False
    """The target is a ratio above 1, not a share between 0 and 1."""

    def problem(self, target: float) -> str | None:
        """What is wrong with a target, or None."""
        if self.target_is_ratio:
            if target > 1.0:
                return None
            return f"{target:g}, expected above 1 with {self.name}, such as 20"
        if 0.0 < target <= 1.0:
            return None
        return f"{target:g}, expected above 0 and at most 1 with {self.name}, such as 0.9"


def _first_reaching(parts: Tensor, share: float) -> int:
    """How many of `parts` it takes until they add up to a share of all."""
    sums = parts.cumsum(0)
    return min(int(torch.searchsorted(sums, share * sums[-1])) + 1, len(parts))


RANK_RULES: Registry[RankRule] = Registry(
    "resize",
    (
        RankRule(name="none", help="maximum rank alone decides", rank=lambda values, target: len(values)),
        RankRule(
            name="energy",
            help="keeps this share of the squared singular values",
            rank=lambda values, target: _first_reaching(values.square(), target),
        ),
        RankRule(
            name="sv_fro",
            help="keeps this share of the Frobenius norm",
            rank=lambda values, target: _first_reaching(values.square(), target**2),
        ),
        RankRule(name="sv_cumulative", help="keeps this share of the sum of the singular values", rank=_first_reaching),
        RankRule(
            name="sv_ratio",
            help="keeps singular values above the largest divided by this",
            rank=lambda values, target: max(1, int((values > values[0] / target).sum())),
            target_is_ratio=True,
        ),
    ),
)
