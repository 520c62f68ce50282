"""Random numbers for a trainer's network, so that no part of it is zero and every layer changes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

SPREAD = 0.2


def draw(parameters: Iterable[nn.Parameter], spread: float = SPREAD, seed: int = 1) -> None:
    """Add normal numbers to what a network starts with, in float32: files hold no more."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        moved = parameter.detach() + torch.randn(parameter.shape, generator=generator) * spread
        parameter.data = moved.float()
