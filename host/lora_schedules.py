"""Schedules of LoRA strengths, and ranks by noise level, that follow ComfyUI's sampling."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from ..patches.patching import stack_ledger
from .comfyui_objects import BaseModel, Model, Sampling
from .model_sampling import timestep_of

SHARES = 100_000  # the steps in which a share of sampling is counted
_NONE: Mapping[str, Any] = MappingProxyType({})  # older ComfyUIs give no options


def follow_schedules(executor: Any, x: torch.Tensor, t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Wraps one model call: sets scheduled strengths to their values at this noise level."""
    _set_strengths(executor.class_obj, t)
    return executor(x, t, *args, **kwargs)


def on_prepare_state(patcher: Model, timestep: torch.Tensor, model_options: Mapping[str, Any] = _NONE, *_: Any) -> None:
    """Before each step of sampling: a guider's second model (DualModelGuider) has the wrappers of the first alone.

    Wan Animate 2 keeps what its pose branch computed, beside the model (ComfyUI's WanAnimate2Cache).
    """
    poses = model_options.get("transformer_options", {}).get("animate2_cache")
    if _set_strengths(patcher.model, timestep) and poses is not None:
        poses.free()


def _set_strengths(model: BaseModel, sigma: torch.Tensor) -> bool:
    """Set every scheduled strength to its value at a noise level; returns whether any of them has changed."""
    first = sigma.flatten()[:1]
    timestep = float(timestep_of(model.model_sampling, first))
    return stack_ledger.tick(model, sampled_share(model.model_sampling, float(first)), timestep)


def sampled_share(sampling: Sampling, sigma: float) -> float:
    """How much of sampling is done at a noise level, from 0 to 1, as ComfyUI counts start_percent and end_percent.

    It is exact to 0.00001.
    """
    left, right = 0, SHARES
    while left < right:  # noise falls as sampling goes on
        middle = (left + right) // 2
        if float(sampling.percent_to_sigma(middle / SHARES)) > sigma * (1 + 1e-5):
            left = middle + 1
        else:
            right = middle
    if left == 1:
        return 0.0
    return left / SHARES
