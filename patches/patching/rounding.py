"""Stochastic rounding: rounds up or down at random such that the mean is exact.

It is for types whose steps are wider than the change that is added (fp8, and bf16 for small changes).
"""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor

ENVIRONMENT_VARIABLE = "GRAFT_ROUNDING"


def rounds_stochastically() -> bool:
    """Whether GRAFT_ROUNDING asks for stochastic rounding of merged bfloat16 and float16 weights.

    Raises ValueError if it is neither "nearest" nor "stochastic".
    """
    rounding = os.environ.get(ENVIRONMENT_VARIABLE, "") or "nearest"
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"{ENVIRONMENT_VARIABLE} is {rounding!r}, expected nearest or stochastic")
    return rounding == "stochastic"


def round_stochastically(values: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Round stochastically to a narrower floating type: the closer the upper neighbor, the more often up.

    Args:
        values: float32 of any shape. Those beyond the type's range become its largest; those that it can represent
            stay.
        dtype: the narrower type.
        generator: of the values' device; the same one gives the same bytes.

    Returns:
        The values in that type.
    """
    limits = torch.finfo(dtype)
    values = values.clamp(limits.min, limits.max)
    exponent = torch.frexp(values)[1].clamp(min=round(math.log2(limits.smallest_normal)) + 1)
    step = torch.exp2((exponent - 1).float()) * limits.eps  # distance between neighbors at this magnitude
    noise = torch.rand(values.shape, generator=generator, device=values.device)
    steps = values / step
    lower = torch.floor(steps)
    steps = lower + (noise < steps - lower)
    return (steps * step).clamp(limits.min, limits.max).to(dtype)


@torch.no_grad()
def round_to_bfloat16_(target: Tensor, value: Tensor, generator: torch.Generator) -> None:
    """Round stochastically into a bfloat16 tensor. Small steps then add up instead of vanishing (Zamirai 2020, arXiv
    2010.06192).

    Args:
        target: bfloat16 of any shape, changed in place.
        value: float32 of the same shape and device. What is not finite stays as it is.
        generator: of the same device.

    Raises:
        ValueError: for other types or shapes.
    """
    if target.dtype != torch.bfloat16 or value.dtype != torch.float32 or target.shape != value.shape:
        raise ValueError(
            f"Stochastic rounding goes from float32 to bf16 of one shape, not from {value.dtype} {tuple(value.shape)}"
            f" to {target.dtype} {tuple(target.shape)}."
        )
    # bf16 is the upper half of a float32: a random lower half carries into it as often as the lower half is large.
    bits = torch.randint(0, 1 << 16, value.shape, dtype=torch.int32, device=value.device, generator=generator)
    bits.add_(value.contiguous().view(torch.int32)).bitwise_and_(-(1 << 16))
    target.copy_(torch.where(torch.isfinite(value), bits.view(torch.float32), value))
