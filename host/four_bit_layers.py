"""Lets gradients through ComfyUI's 4-bit layers (convrot_w4a4, asym_w4a8_int8): their kernels multiply forward alone,
so the backward pass unpacks the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

LAYOUTS = (
    "TensorCoreConvRotW4A4Layout",
    "AsymW4A8Int8Layout",
)  # of comfy-kitchen, whose mm takes transposed weights only


def is_four_bit(weight: Any) -> bool:
    """Whether a weight has a layout without a backward pass."""
    return getattr(weight, "_layout_cls", None) in LAYOUTS


def allow_gradients(module: nn.Module) -> AbstractContextManager[Any]:
    """The context in which gradients go through a module's 4-bit layers; without such layers it costs nothing."""
    if any(map(is_four_bit, module.parameters())):
        return FourBitLayers()
    return nullcontext()


class FourBitLayers(TorchFunctionMode):
    """While it is entered, a 4-bit layer computes as ever, and its gradient with the unpacked weight."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        values = kwargs or {}
        if func is functional.linear and torch.is_grad_enabled():
            x, weight, bias = _arguments(*args, **values)
            if x.requires_grad and is_four_bit(weight):
                return _Linear.apply(x, weight, bias)
        return func(*args, **values)


def _arguments(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return functional.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return gradient @ weight.dequantize().to(gradient.dtype), None, None
