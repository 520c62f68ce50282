"""Weights in half precision for keeping: float16, with a float32 scale where float16's range would lose them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

SCALE = "graft_scale."  # prefix of the name under which a tensor's scale is kept
_LARGEST, _SMALLEST = (
    32768.0,
    2.0**-7,
)  # of a tensor's largest value: outside, its values overflow or lose more than bf16 would


def packed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Floating tensors of two or more numbers as float16; what needs it divided by a power of two, kept as
    `graft_scale.<name>`.
    """
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.numel() < 2:
            out[name] = tensor.clone()
            continue
        largest = float(tensor.abs().max())
        if largest == 0 or not math.isfinite(largest) or _SMALLEST <= largest <= _LARGEST:
            out[name] = tensor.to(torch.float16)
            continue
        scale = 2.0 ** (
            math.floor(math.log2(largest)) - 10
        )  # the largest value becomes 1024 to 2048; a power of two rounds nothing
        out[name] = (tensor.float() / scale).to(torch.float16)
        out[SCALE + name] = torch.tensor(scale, dtype=torch.float32)
    return out


def unpacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """float32 tensors from what `packed` gave."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith(SCALE):
            continue
        scale = tensors.get(SCALE + name)
        if tensor.is_floating_point():
            value = tensor.float()
        else:
            value = tensor
        out[name] = value if scale is None else value * float(scale)
    return out
