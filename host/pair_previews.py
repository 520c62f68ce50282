"""Preview images of a pair of experts: the high noise expert samples down to the boundary, the low noise one below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .comfyui_objects import Conditioning, Latent
from .previews import keep_generators, prepare_sampling, set_up_guider


@torch.no_grad()
def sample_pair(
    models: Sequence[Any],
    boundary: float,
    positive: Conditioning,
    negative: Conditioning | None,
    latent: Latent,
    seed: int,
    steps: int = 0,
    cfg: float | None = None,
    sampler: str = "euler",
) -> torch.Tensor:
    """Sample latents (B, C, [frames,] h, w) with two MODELs, the high noise expert and the low noise one, by `steps`
    (0: 20) steps of a sampler over the noise levels of the first, with the guidance `cfg` (None: that of all previews).

    The step at the boundary itself is the high noise expert's. ComfyUI loads each MODEL when its turn comes. Guidance,
    noise and generators are those of `previews.sample`.
    """
    import comfy.samplers

    high, low = models
    start, noise, sigmas = prepare_sampling(high, latent, seed, steps)
    border = int((sigmas[:-1].to("cpu", torch.float64) >= boundary).sum())
    latents = start
    with keep_generators(high):
        for patcher, levels in ((high, sigmas[: border + 1]), (low, sigmas[border:])):
            if len(levels) < 2:
                continue
            guider = set_up_guider(comfy.samplers.CFGGuider(patcher), positive, negative, cfg)
            chosen = comfy.samplers.sampler_object(sampler)
            latents = guider.sample(noise, latents, chosen, levels, disable_pbar=True, seed=seed).cpu()
            noise = torch.zeros_like(noise)
    return latents


def unload_models() -> None:
    """Takes every model off the device, so that the expert whose turn it is has all of it."""
    import comfy.model_management

    comfy.model_management.unload_all_models()
