"""int8 (W8A8): linear layers multiply int8 by int8, forward and backward.

A weight has one scale for each row, activations and gradients one for each token, and sums are int32.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from .format import QuantizedWeight
from .int8_weights import Int8Weights, round_rows

LEAST_ROWS = 24  # CUDA's int8 product needs more than 16


class Int8(Int8Weights):
    """The weights of `Int8Weights`, which are not unpacked: what they multiply is rounded too."""

    name = "int8"

    def product(self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """See `WeightFormat.product`: in int8, and so is the gradient's."""
        return cast(Tensor, _Int8Product.apply(x, *weight, bias, dtype))


def _product(left: Tensor, right: Tensor) -> Tensor:
    """The int32 product of int8 matrices."""
    rows = len(left)
    if right.device.type != "cpu" and right.stride(0) != 1:  # CUDA's is slow unless columns lie together
        right = right.T.contiguous().T
    if rows >= LEAST_ROWS:
        return torch._int_mm(left, right)
    padded = left.new_zeros(LEAST_ROWS, left.shape[1])
    padded[:rows] = left
    return torch._int_mm(padded, right)[:rows]


class _Int8Product(torch.autograd.Function):
    """x (n, in) times an int8 weight, and the gradient of x. Nothing of x is kept."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, numbers: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(numbers, scales)
        ctx.dtype = x.dtype
        tokens, token_scales = round_rows(x)
        output = _product(tokens, numbers.T).float()
        output.mul_(token_scales).mul_(scales.T)
        if bias is not None:
            output.add_(bias)
        return output.to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        numbers, scales = ctx.saved_tensors
        tokens, token_scales = round_rows(gradient * scales.T)
        return _product(tokens, numbers).float().mul_(token_scales).to(ctx.dtype), None, None, None, None
