"""Convolutions with a weight other than the module's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_CONV: dict[int, Any] = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}


def _convolution(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> Tensor:
    return _CONV[weight.ndim](x, weight, None, stride, padding, dilation, groups)


# The same as an operation that torch.compile does not look into: it would compile its own kernel for every rank, and
# refuse dynamic ones.
_opaque = torch.library.custom_op(re.sub(r"\W", "_", __name__) + "::convolution", _convolution, mutates_args=())
_opaque.register_fake(_convolution)


def _operation(x: Tensor, compiled: bool) -> Callable[..., Tensor]:
    """How to convolve x. Where a gradient is wanted torch.compile looks into it, as what it does not look into has
    none.
    """
    if compiled and not (torch.is_grad_enabled() and x.requires_grad):
        return _opaque
    return _convolution


def convolve(module: Any, x: Tensor, weight: Tensor, groups: int = 1, compiled: bool = False) -> Tensor:
    """A convolution with another weight instead of the module's, using its stride, dilation and padding, without bias.

    Args:
        module: a convolution.
        x: (B, in, *size).
        weight: (out, in / groups, *kernel).
        groups: those of the other weight.
        compiled: whether it runs under torch.compile, which then does not look into it.
    """
    padding = module.padding
    if module.padding_mode != "zeros" or isinstance(padding, str):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        x, padding = F.pad(x, module._reversed_padding_repeated_twice, mode=mode), (0,) * (weight.ndim - 2)
    return _operation(x, compiled)(x, weight, module.stride, padding, module.dilation, groups)


def convolve_pointwise(x: Tensor, weight: Tensor, compiled: bool = False) -> Tensor:
    """A convolution without kernel and bias.

    Args:
        x: (B, in, *size).
        weight: (out, in, 1 …).
        compiled: as for `convolve`.
    """
    ones, zeros = [1] * (weight.ndim - 2), [0] * (weight.ndim - 2)
    return _operation(x, compiled)(x, weight, ones, zeros, ones, 1)
