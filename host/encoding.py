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

    clip = skipping(clip, clip_skip)
    out = {}
    for caption in captions:
        context, extras = _encoded(clip, caption)
        out[caption] = Conditioning(_float_on_cpu(context), {name: _float_on_cpu(value) for name, value in extras.items()})
    return out


def skipping(clip: Any, clip_skip: int) -> Any:
    """A clone of a CLIP that stops at that layer from the end; 0 leaves it as it is."""
    if not clip_skip:
        return clip
    clone = clip.clone()
    clone.clip_layer(-clip_skip)
    return clone


def _encoded(clip: Any, caption: str) -> tuple[torch.Tensor, dict[str, Any]]:
    context, extras = clip.encode_from_tokens_scheduled(clip.tokenize(caption))[0]
    return context, {name: value for name, value in extras.items() if not callable(value)}


class LiveEncoder:
    """The text encoder of a CLIP that is loaded, for captions whose conditionings carry gradients to what is trained in it."""

    def __init__(self, clip: Any, clip_skip: int = 0) -> None:
        self.clip = skipping(clip, clip_skip).clone()
        self.clip.load_model = lambda *_, **__: self.clip.patcher  # it is loaded, and another load would move it under the trained tensors
        self.module: torch.nn.Module = self.clip.cond_stage_model

    def __call__(self, captions: Sequence[str], known: Sequence[Conditioning]) -> list[Conditioning]:
        """Conditionings of the captions as the encoder computes now; `known` are the dataset's, whose other entries (sizes) are kept."""
        from ..training.dataset import Conditioning

        made = {caption: _encoded(self.clip, caption) for caption in dict.fromkeys(captions)}
        return [
            Conditioning(made[caption][0], {**old.extras, **made[caption][1]}) for caption, old in zip(captions, known, strict=True)
        ]

def _float_on_cpu(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to("cpu", torch.float32 if value.is_floating_point() else value.dtype)
