"""Preview images of a pair of experts: the high noise expert samples down to the boundary, the low noise one below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..training.run.preview_prompts import PLAIN, PromptLine
from .comfyui_objects import Conditioning, Latent
from .previews import SAMPLER, keep_generators, prepare_sampling, seed_of, set_up_guider


@torch.no_grad()
def sample_pair(
    models: Sequence[Any],
    boundary: float,
    positive: Conditioning,
    negative: Conditioning | None,
    latent: Latent,
    seed: int,
    line: PromptLine = PLAIN,
) -> torch.Tensor:
    """Sample latents (B, C, [frames,] h, w) with two MODELs, the high noise expert and the low noise one, as `line`
    says, over the noise levels of the first.

    The step at the boundary itself is the high noise expert's. ComfyUI loads each MODEL when its turn comes. Guidance,
    noise and generators are those of `previews.sample`.
    """
    import comfy.samplers

    high, low = models
    start, noise, sigmas = prepare_sampling(high, latent, seed, line)
    border = int((sigmas[:-1].to("cpu", torch.float64) >= boundary).sum())
    latents = start
    with keep_generators(high):
        for patcher, levels in ((high, sigmas[: border + 1]), (low, sigmas[border:])):
            if len(levels) < 2:
                continue
            guider = set_up_guider(comfy.samplers.CFGGuider(patcher), positive, negative, line.cfg)
            sampler = comfy.samplers.sampler_object(line.sampler or SAMPLER)
            latents = guider.sample(noise, latents, sampler, levels, disable_pbar=True, seed=seed_of(line, seed)).cpu()
            noise = torch.zeros_like(noise)
    return latents


def unload_models() -> None:
    """Takes every model off the device, so that the expert whose turn it is has all of it."""
    import comfy.model_management

    comfy.model_management.unload_all_models()
