"""A model's original weights, as its file had them, whatever patches it carries now."""

from __future__ import annotations

import torch

from ..patches.patching import stack_ledger
from .comfyui_objects import Clip, Model


def base_weights(patcher: Model) -> dict[str, torch.Tensor]:
    """A model's tensors as its file had them (after the loader's cast), whatever patches it carries now. Not copies."""
    # Before the state dict: a clone that is collected while that is made takes off what it had put on, and the patched
    # tensors are in it.
    bases: dict[str, torch.Tensor] = dict(stack_ledger.base_weights(patcher.model))
    bases.update({key: saved.weight for key, saved in patcher.backup.items()})
    bases.update({key: saved[0] for key, saved in patcher.hook_backup.items()})
    weights = dict(patcher.model.state_dict())
    weights.update({key: base for key, base in bases.items() if key in weights})
    return weights


def trained_weights(patcher: Model, clip: Clip) -> dict[str, torch.Tensor]:
    """`unet_weights`, and with a CLIP (not None) the weights of its text encoder under `text_encoders.`."""
    text = {} if clip is None else base_weights(clip.patcher)
    return {**unet_weights(patcher), **{f"text_encoders.{key}": value for key, value in text.items()}}


def unet_weights(patcher: Model) -> dict[str, torch.Tensor]:
    """`base_weights` of the diffusion model alone, by parameter name inside it."""
    prefix = "diffusion_model."
    return {key.removeprefix(prefix): value for key, value in base_weights(patcher).items() if key.startswith(prefix)}
