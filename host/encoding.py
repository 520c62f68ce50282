"""Latents and conditionings from the host's VAE and text encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ..training.dataset import Conditioning


def encode_pictures(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Latents (B, C, h, w), float32 on the CPU, of pictures (B, H, W, 3) in 0..1."""
    latents = vae.encode(pixels[:, :, :, :3])
    return latents.detach().to("cpu", torch.float32)


def encode_captions(clip: Any, captions: Sequence[str], clip_skip: int = 0) -> dict[str, Conditioning]:
    """What the text encoder makes of each caption, float32 on the CPU; `clip_skip` 2 stops one layer before the last, 0 is as it is."""
    from ..training.dataset import Conditioning

    if clip_skip:
        clip = clip.clone()
        clip.clip_layer(-clip_skip)
    out = {}
    for caption in captions:
        context, extras = clip.encode_from_tokens_scheduled(clip.tokenize(caption))[0]
        kept = {name: _float_on_cpu(value) for name, value in extras.items() if not callable(value)}
        out[caption] = Conditioning(_float_on_cpu(context), kept)
    return out


def _float_on_cpu(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to("cpu", torch.float32 if value.is_floating_point() else value.dtype)
