"""The loss of a step: the model's own objective (noise, velocity or flow), recovered from its denoised output, with
weights and masks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .loss_kinds import LOSSES
from .settings import ObjectiveSettings
from .weightings import WEIGHTINGS


def output_scale(prediction: str, sigma: Tensor) -> Tensor:
    """Factor from an error of denoised latents to an error of the model's own output: 1/sigma (eps, flow), sqrt(SNR +
    1) (v).
    """
    sigma = sigma.clamp(min=1e-5)
    if prediction == "v":
        return (1 + sigma**-2).sqrt()
    return 1 / sigma


def step_weights(settings: ObjectiveSettings, prediction: str, sigma: Tensor) -> Tensor:
    """Weight (B,) of the model's own loss at sigma (B,), by the chosen weighting."""
    return WEIGHTINGS.get(settings.weighting).weights(sigma, prediction, settings.gamma)


def losses(
    settings: ObjectiveSettings,
    prediction: str,
    denoised: Tensor,
    target: Tensor,
    sigma: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """Loss per image (B,) in float32 or wider, from denoised latents and what they should be (B, C, …, h, w), at sigma
    (B,).

    `mask` (B, 1, h, w) from 0 to 1 weights each place; as kohya does, the mean still goes over every place, masked or
    not.
    """
    dtype = torch.promote_types(denoised.dtype, torch.float32)
    error = denoised.to(dtype) - target.to(dtype)
    sigma = sigma.to(dtype)
    per_image = [-1] + [1] * (error.ndim - 1)
    kind = LOSSES.get(settings.loss)
    if not kind.of_denoised:
        error = error * output_scale(prediction, sigma).view(per_image)
    value = kind.compute(error, prediction, sigma.view(per_image))
    if mask is not None:
        value = value * fitted(mask.to(value), value)
    return value.flatten(1).mean(1) * step_weights(settings, prediction, sigma)


def fitted(mask: Tensor, latents: Tensor) -> Tensor:
    """A mask (B, 1, H, W) at the size of latents (B, C, …, h, w), by area."""
    if mask.shape[-2:] != latents.shape[-2:]:
        mask = F.interpolate(mask, size=latents.shape[-2:], mode="area")
    return mask.view(mask.shape[0], *[1] * (latents.ndim - 3), *mask.shape[-2:])
