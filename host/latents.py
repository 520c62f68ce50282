"""LATENTs in the shape that ComfyUI samples them in."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor


def sampled(patcher: Any, latent: Mapping[str, Any]) -> Tensor:
    """The samples (B, C, [frames,] h, w) that ComfyUI starts from.

    An empty LATENT takes the model's channels and, on newer hosts, its size.
    """
    import comfy.sample

    fix = comfy.sample.fix_empty_latent_channels
    ratios = [latent.get("downscale_ratio_spacial"), latent.get("downscale_ratio_temporal")]
    return fix(patcher, latent["samples"], *ratios[: len(inspect.signature(fix).parameters) - 2])
