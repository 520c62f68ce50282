"""Encodes images and captions with ComfyUI's VAE and text encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..training.data.dataset import Conditioning


def encode_pictures(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Encode images (B, H, W, 3) in 0..1 as latents (B, C, h, w), float32 on the CPU."""
    latents = vae.encode(pixels[:, :, :, :3])
    return latents.detach().to("cpu", torch.float32)


def encode_captions(clip: Any, captions: Sequence[str], clip_skip: int = 0) -> dict[str, Conditioning]:
    """Encode each caption, float32 on the CPU; `clip_skip` 2 stops one layer before the last, 0 leaves it as it is."""
    clip = with_clip_skip(clip, clip_skip)
    conditionings = {}
    for caption in captions:
        context, extras = _encode(clip, caption)
        for name, value in extras.items():
            extras[name] = _float_on_cpu(value)
        conditionings[caption] = Conditioning(_float_on_cpu(context), extras)
    return conditionings


def with_clip_skip(clip: Any, clip_skip: int) -> Any:
    """A clone of a CLIP that stops at that layer, counted from the end. 0 leaves it as it is."""
    if not clip_skip:
        return clip
    clone = clip.clone()
    clone.clip_layer(-clip_skip)
    return clone


def _encode(clip: Any, caption: str) -> tuple[torch.Tensor, dict[str, Any]]:
    context, extras = clip.encode_from_tokens_scheduled(clip.tokenize(caption))[0]
    return context, {name: value for name, value in extras.items() if not callable(value)}


class LiveEncoder:
    """A loaded CLIP's text encoder that is being trained: its conditionings carry gradients."""

    def __init__(self, clip: Any, clip_skip: int = 0) -> None:
        self.clip = with_clip_skip(clip, clip_skip).clone()
        # Already loaded: loading it again would move the weights that are being trained.
        self.clip.load_model = lambda *_, **__: self.clip.patcher
        self.module: torch.nn.Module = self.clip.cond_stage_model

    def __call__(self, captions: Sequence[str], known: Sequence[Conditioning]) -> list[Conditioning]:
        """Encodes the captions with the current weights. `known` are the dataset's conditionings; their other entries
        (sizes) are kept.
        """
        encoded = {caption: _encode(self.clip, caption) for caption in dict.fromkeys(captions)}
        conditionings = []
        for caption, old in zip(captions, known, strict=True):
            context, extras = encoded[caption]
            conditionings.append(Conditioning(context, {**old.extras, **extras}))
        return conditionings


def _float_on_cpu(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_floating_point():
        return value.detach().to("cpu", torch.float32)
    return value.detach().cpu()
