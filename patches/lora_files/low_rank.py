"""The best product of two factors at a given rank, by SVD (randomised for large matrices, Halko 2011)."""

from __future__ import annotations

import torch
from torch import Tensor

_SMALL = 384  # up to this side a full SVD is quick


def cut_to_rank(up: Tensor, down: Tensor, rank: int) -> tuple[Tensor, Tensor, float, float]:
    """The nearest product of at most `rank` to (out, r) @ (r, columns), with the squared norms of the whole and of what
    was cut.

    Its factors are balanced. It works on the small matrix between two orthogonal ones, so it never forms the full-size
    product.
    """
    (left_side, first), (right_side, second) = torch.linalg.qr(up), torch.linalg.qr(down.T)
    inner = first @ second.T
    inner_up, inner_down, residual = best(inner, rank)
    return left_side @ inner_up, inner_down @ right_side.T, float(inner.norm()) ** 2, residual


def best(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    """(up, down, squared norm of what was cut): the best rank-limited product for a matrix, with the singular values
    split evenly between the factors.

    Beyond a few hundred rows and columns it uses Halko's randomised SVD, with its own fixed seed.
    """
    rank = min(rank, *matrix.shape)
    basis = None
    if min(matrix.shape) > max(_SMALL, 4 * rank):
        projection = torch.randn(matrix.shape[1], rank + 16, generator=torch.Generator().manual_seed(0)).to(matrix)
        basis = torch.linalg.qr(matrix @ projection).Q
        for _ in range(3):
            basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.T @ basis).Q).Q
    left, values, right = torch.linalg.svd(matrix if basis is None else basis.T @ matrix, full_matrices=False)
    if basis is not None:
        left = basis @ left
    roots = values[:rank].sqrt()
    residual = float(matrix.norm()) ** 2 - float(values[:rank].square().sum())
    return left[:, :rank] * roots, roots[:, None] * right[:rank], max(residual, 0.0)
