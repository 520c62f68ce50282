"""A frozen base in int8 while training (W8A8): linear layers multiply int8 by int8, forward and backward.

A weight has one scale for each row, activations and gradients one for each token, and sums are int32. Adapters stay in
full precision, as their hooks are beside the layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ...patches.models.layers import is_changed_by_host, why_not_plain
from .offload import call_with_weights_on, weights_on

LARGEST = 127.0  # of int8 numbers; -128 is not used, so that both signs have the same range
LEAST_ROWS = 24  # CUDA's int8 product needs more than 16
MULTIPLE = 8  # of both sizes of a weight, for CUDA's int8 product


class Int8Weight(NamedTuple):
    """A weight (out, in) as int8 numbers and the scale (out, 1) of each row."""

    numbers: Tensor
    scales: Tensor

    @property
    def values(self) -> Tensor:
        """The weight that these stand for, in float32."""
        return self.numbers * self.scales


def quantised(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 numbers (n, k), float32 scales (n, 1)) of rows (n, k): each is divided by a 127th of its largest number and
    rounded to the nearest integer. A row with a number that is not finite has a scale that is not.
    """
    rows = rows.float()
    largest = torch.maximum(rows.amax(1, keepdim=True), -rows.amin(1, keepdim=True))
    scales = (largest / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return (rows / scales).round_().to(torch.int8), scales


def _product(left: Tensor, right: Tensor) -> Tensor:
    """The int32 product of int8 matrices."""
    rows = len(left)
    if rows >= LEAST_ROWS:
        return torch._int_mm(left, right)
    padded = left.new_zeros(LEAST_ROWS, left.shape[1])
    padded[:rows] = left
    return torch._int_mm(padded, right)[:rows]


class _Int8Linear(torch.autograd.Function):
    """x (n, in) times an int8 weight, and the gradient of x. Nothing of x is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Int8Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.weight, ctx.dtype = weight, x.dtype
        numbers, scales = quantised(x)
        output = _product(numbers, weight.numbers.T).float()
        output.mul_(scales).mul_(weight.scales.T)
        if bias is not None:
            output.add_(bias)
        return output.to(dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        numbers, scales = quantised(gradient * ctx.weight.scales.T)
        return _product(numbers, ctx.weight.numbers).float().mul_(scales).to(ctx.dtype), None, None, None


def int8_linear(x: Tensor, weight: Int8Weight, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear` with an int8 weight; under autocast in its type, else in that of x."""
    output = _Int8Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias, _product_type(x))
    return output.view(*x.shape[:-1], output.shape[-1])


def _product_type(x: Tensor) -> torch.dtype:
    """The type of a layer's output for x."""
    if x.is_meta:  # the autocast of a plan changes torch's functions
        empty = x.new_empty(0, 0)
        return torch.matmul(empty, empty).dtype
    if torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


class _Int8Forward:
    """The forward of a linear layer while its weight is int8."""

    def __init__(self, layer: nn.Linear, device: torch.device, base: Int8Base) -> None:
        self._layer, self._device, self._base = layer, device, base
        self._own_forward = layer.forward
        self._weight = Int8Weight(*quantised(layer.weight.detach().to(device)))

    def __call__(self, x: Tensor) -> Tensor:
        if self._base.is_off:
            return cast(Tensor, call_with_weights_on(self._own_forward, [self._layer], self._device, x))
        return int8_linear(x, self._weight, self._layer.bias)

    def weight_values(self) -> Tensor:
        """The weight that the layer computes with now, in float32."""
        if self._base.is_off:
            return self._layer.weight.detach().to(self._device).float()
        return self._weight.values


class Int8Base:
    """The int8 weights of a model, which can be switched off."""

    def __init__(self) -> None:
        self.is_off = False

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside the block, which makes no gradients, the model computes with its own weights; what waits in host
        memory comes over layer by layer.
        """
        before, self.is_off = self.is_off, True
        try:
            yield
        finally:
            self.is_off = before


def why_not_int8(layer: nn.Linear) -> str | None:
    """Why a linear layer keeps its weight while the base is in int8; None if it does not."""
    if why_not_plain(layer, "weight") is not None:
        return "quantized already"
    if "forward" in vars(layer) or is_changed_by_host(layer, "weight") or is_changed_by_host(layer, "bias"):
        return "patched"
    if type(layer) is nn.modules.linear.NonDynamicallyQuantizableLinear:  # nn.MultiheadAttention reads its weight
        return "read by another module"
    if layer.in_features % MULTIPLE or layer.out_features % MULTIPLE:
        return f"a size that is no multiple of {MULTIPLE}"
    return None


def _linear_layers(module: nn.Module) -> list[nn.Linear]:
    return [part for part in module.modules() if isinstance(part, nn.Linear)]


def chosen_layers(module: nn.Module) -> list[nn.Linear]:
    """The layers of a model whose weights can be int8."""
    return [layer for layer in _linear_layers(module) if why_not_int8(layer) is None]


def remark(module: nn.Module) -> str:
    """How many layers of a model are int8 and how many stay, as a sentence for a report."""
    layers = _linear_layers(module)
    reasons = Counter(reason for layer in layers if (reason := why_not_int8(layer)) is not None)
    text = f"base weights: int8 in {len(layers) - reasons.total()} of {len(layers)} linear layers"
    if reasons:
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        text += f"; as loaded: {counts}"
    return text


@contextmanager
def in_int8(module: nn.Module, device: torch.device) -> Iterator[Int8Base]:
    """A context in which the frozen linear layers of `module` compute in int8 on `device`.

    Their own weights stay where they are: in host memory, if `device` is another one. All other tensors come over for
    the block. Afterwards the module is as before.
    """
    base, layers = Int8Base(), chosen_layers(module)
    with ExitStack() as stack:
        staying = {id(layer.weight) for layer in layers}
        stack.enter_context(weights_on(list(module.modules()), device, staying))
        with torch.no_grad():
            for layer in layers:
                forward = _Int8Forward(layer, device, base)
                stack.callback(partial(vars(layer).pop, "forward"))
                vars(layer)["forward"] = forward
        yield base


def weight_in_int8(module: nn.Module) -> Tensor | None:
    """The weight that a layer computes with while its base is in int8, in float32; None for any other layer."""
    forward = vars(module).get("forward")
    if isinstance(forward, _Int8Forward):
        return forward.weight_values()
    return None
