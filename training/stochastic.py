"""Float32 to bf16 so that the expected value stays (stochastic rounding, 2010.06192): small steps add up instead of
vanishing.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def round_into_(target: Tensor, value: Tensor, draws: torch.Generator) -> None:
    """Set `target` (bf16) to `value` (float32, same shape and device), up or down in proportion to what is nearer; not
    finite stays so.
    """
    if target.dtype != torch.bfloat16 or value.dtype != torch.float32 or target.shape != value.shape:
        raise ValueError(
            f"Stochastic rounding goes from float32 to bf16 of one shape, not from {value.dtype} {tuple(value.shape)}"
            f" to {target.dtype} {tuple(target.shape)}."
        )
    # bf16 is the upper half of a float32: a random lower half carries into it as often as the lower half is large.
    bits = torch.randint(0, 1 << 16, value.shape, dtype=torch.int32, device=value.device, generator=draws)
    bits.add_(value.contiguous().view(torch.int32)).bitwise_and_(-(1 << 16))
    target.copy_(torch.where(torch.isfinite(value), bits.view(torch.float32), value))
