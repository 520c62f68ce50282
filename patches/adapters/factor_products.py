"""Products of low-rank factors, with and without a Tucker core: their value, shape and errors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor, core: Tensor | None, device: torch.device | str) -> Tensor:
    """The product of two factors, or Tucker's with a core:

        a @ b
        sum_ij core[i, j, *kernel] a[i, out] b[j, in]

    Args:
        a: (out, r); with a core (i, out).
        b: (r, in, *kernel); with a core (j, in).
        core: (i, j, *kernel), or None.
        device: where it is computed.

    Returns:
        (out, in, *kernel) in float32.
    """
    a, b = a.to(device, torch.float32), b.to(device, torch.float32)
    if core is not None:
        return torch.einsum("ij...,ip,jr->pr...", core.to(device, torch.float32), a, b)
    return (a.flatten(1) @ b.flatten(1)).reshape(a.shape[0], *b.shape[1:])


def product_shape(a: Tensor, b: Tensor, core: Tensor | None) -> tuple[int, ...]:
    """The shape of `product`."""
    return (a.shape[0], *b.shape[1:]) if core is None else (a.shape[1], b.shape[1], *core.shape[2:])


def product_error(name: str, a: Tensor, b: Tensor, core: Tensor | None) -> str | None:
    """Why two factors cannot be multiplied, None where they can.

    Args:
        name: what the message calls them.
        a: (out, r); with a core (i, out), as in `product`.
        b: (r, in, *kernel); with a core (j, in).
        core: (i, j, *kernel), or None.
    """
    matrices = a.ndim >= 2 and b.ndim >= 2
    if core is not None:
        matrices = a.ndim == 2 and b.ndim == 2 and core.ndim >= 3
    if not matrices:
        return f"{name}: expected matrices, got {shape_text(a)} and {shape_text(b)}"
    if core is None:
        if a.flatten(1).shape[1] == b.shape[0]:
            return None
        return f"{name}: ranks differ: {shape_text(a)}, {shape_text(b)}"
    if core.shape[:2] == (a.shape[0], b.shape[0]):
        return None
    return f"{name}: ranks differ: {shape_text(a)}, {shape_text(b)}, core {shape_text(core)}"


def fits(found: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a change can be reshaped to a weight: the same rows, and as many columns.

    Args:
        found: the change's shape.
        shape: the weight's.
    """
    return len(shape) > 1 and found[0] == shape[0] and math.prod(found[1:]) == math.prod(shape[1:])


def factorize_side(side: int, factor: int = -1) -> tuple[int, int]:
    """Write a side as a product m * n with m <= n, as lycoris does it.

    Args:
        side: the product.
        factor: m or n, if it divides the side; else m is the largest divisor up to it. -1 is as square as possible.

    Returns:
        (m, n).
    """
    if factor > 0 and side % factor == 0:
        return min(factor, side // factor), max(factor, side // factor)
    limit = math.isqrt(side)
    if factor > 0:
        limit = min(limit, factor)
    m = next(m for m in range(limit, 0, -1) if side % m == 0)
    return m, side // m


def shape_text(tensor: Tensor) -> str:
    """A tensor's shape in messages: 4x8."""
    return sides_text(tensor.shape)


def sides_text(shape: Sequence[int]) -> str:
    """A shape in messages: 4x8, or "scalar"."""
    return "x".join(map(str, shape)) or "scalar"
