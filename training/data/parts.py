"""Latents of several parts, as LTX-2's video with its sound: training takes them packed, as ComfyUI's sampler does."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Parts = tuple[tuple[int, ...], ...]
"""The shape of each part, without the batch; () for latents of one part."""
ENTRY = "latent_shapes"  # of a conditioning, where the parts of its latents stand: ComfyUI's name


def pack_parts(parts: Sequence[Tensor]) -> Tensor:
    """Parts (B, C, …) as one tensor (B, 1, N)."""
    return torch.cat([part.reshape(part.shape[0], 1, -1) for part in parts], dim=-1)


def unpack_parts(latents: Tensor, parts: Parts) -> list[Tensor]:
    """The parts (B, C, …) of such latents; the latents themselves where they have one part."""
    if not parts:
        return [latents]
    pieces = latents.split([math.prod(shape) for shape in parts], dim=-1)
    return [piece.reshape(-1, *shape) for piece, shape in zip(pieces, parts, strict=True)]
