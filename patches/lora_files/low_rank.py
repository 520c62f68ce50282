"""Reduces a matrix or a product to a rank by SVD (randomized for large matrices, Halko 2011)."""

from __future__ import annotations

import torch
from torch import Tensor

_SMALL = 384  # up to this side a full SVD is quick


def cut_to_rank(up: Tensor, down: Tensor, rank: int) -> tuple[Tensor, Tensor, float, float]:
    """Reduce a product (out, r) @ (r, columns) to a rank: (up, down, squared norm of the whole, squared norm of what is
    lost).

    The factors are balanced. It works on the small matrix between two orthogonal ones, so it never forms the full-size
    product.
    """
    (left_side, first), (right_side, second) = torch.linalg.qr(up), torch.linalg.qr(down.T)
    inner = first @ second.T
    inner_up, inner_down, residual = best(inner, rank)
    return left_side @ inner_up, inner_down @ right_side.T, float(inner.norm()) ** 2, residual


def best(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    """Reduce a matrix to a rank: (up, down, squared norm of what is lost).

    The singular values are split evenly between the factors. Beyond a few hundred rows and columns it uses Halko's
    randomized SVD, with a fixed seed of its own.
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
