"""What a format of quantized weights has: how a weight is kept, what it stands for, and how layers multiply with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor


class QuantizedWeight(NamedTuple):
    """A weight's numbers in few bits, and the float32 scales that they are multiplied with."""

    numbers: Tensor
    scales: Tensor


class WeightFormat(ABC):
    """A format of quantized weights (out, in); both sizes are multiples of 8."""

    name: str  # as Adapter Settings have it
    is_kept = False  # on disk, where a CPU computes: reading weights is faster than quantizing them

    def __init__(self, device: torch.device) -> None:
        self.device = device  # that layers compute on

    @abstractmethod
    def quantize(self, weight: Tensor) -> QuantizedWeight:
        """What a weight is kept as."""

    @abstractmethod
    def values(self, weight: QuantizedWeight) -> Tensor:
        """The weight (out, in) that it stands for, in float32."""

    @abstractmethod
    def product(self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """x (n, in) times the weight, plus the bias, in `dtype`. Its gradient goes to x alone."""


class UnpackedFormat(WeightFormat):
    """A format whose weights are unpacked to multiply, in the backward pass again. Unpacked weights are not kept."""

    def product(self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """See `WeightFormat.product`: the product in `dtype` itself."""
        return cast(Tensor, _UnpackedProduct.apply(x, *weight, self, bias, dtype))


class _UnpackedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        numbers: Tensor,
        scales: Tensor,
        weight_format: UnpackedFormat,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(numbers, scales)
        ctx.weight_format, ctx.dtype = weight_format, x.dtype
        weight = weight_format.values(QuantizedWeight(numbers, scales)).to(dtype)
        if bias is not None:
            bias = bias.to(dtype)
        return torch.nn.functional.linear(x.to(dtype), weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight = ctx.weight_format.values(QuantizedWeight(*ctx.saved_tensors)).to(gradient.dtype)
        return (gradient @ weight).to(ctx.dtype), None, None, None, None, None


def linear(x: Tensor, weight_format: WeightFormat, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear` with a quantized weight; under autocast in its type, else in that of x."""
    output = weight_format.product(x.reshape(-1, x.shape[-1]), weight, bias, product_type(x))
    return output.view(*x.shape[:-1], output.shape[-1])


def product_type(x: Tensor) -> torch.dtype:
    """The type of a layer's product with x: autocast's, or its own."""
    if x.is_meta:  # the autocast of a plan changes torch's functions
        empty = x.new_empty(0, 0)
        return torch.matmul(empty, empty).dtype
    if torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype
