"""Stores weights in half precision: float16, with a float32 scale where float16's range is too small."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

SCALE_PREFIX = "graft_scale."  # followed by a tensor's name: where its scale is kept
# Bounds for a tensor's largest value: beyond them float16 overflows or loses more than bf16 would.
_LARGEST, _SMALLEST = 32768.0, 2.0**-7
_LEAST_EXPONENT = -126  # of a normal float32, as the scale is


def to_float16(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Floating tensors of two or more numbers as float16. Where the range is too small the values are divided by a
    power of two, which is kept as `graft_scale.<name>`.
    """
    halves: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.numel() < 2:
            halves[name] = tensor.clone()
            continue
        largest = float(tensor.abs().max())
        if largest == 0 or not math.isfinite(largest) or _SMALLEST <= largest <= _LARGEST:
            halves[name] = tensor.to(torch.float16)
            continue
        # The largest value becomes 1024 to 2048; dividing by a power of two rounds nothing.
        scale = 2.0 ** max(_LEAST_EXPONENT, math.floor(math.log2(largest)) - 10)
        halves[name] = (tensor.float() / scale).to(torch.float16)
        halves[SCALE_PREFIX + name] = torch.tensor(scale, dtype=torch.float32)
    return halves


def apply_scales(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The numbers of `from_float16` without copies: tensors without a scale stay float16."""
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if SCALE_PREFIX + name in tensors:
            whole[name] = tensor.float() * float(tensors[SCALE_PREFIX + name])
        elif not name.startswith(SCALE_PREFIX):
            whole[name] = tensor
    return whole


def from_float16(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """float32 tensors from the result of `to_float16`."""
    converted: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith(SCALE_PREFIX):
            continue
        value = tensor.float() if tensor.is_floating_point() else tensor
        scale = tensors.get(SCALE_PREFIX + name)
        if scale is not None:
            value = value * float(scale)
        converted[name] = value
    return converted
