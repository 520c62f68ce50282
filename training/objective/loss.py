"""The loss of a training step: the error of the model's own prediction (noise, velocity or flow), weighted and masked.

The prediction is recovered from the model's denoised output.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.parts import Parts, unpack_parts
from .loss_kinds import LOSSES
from .settings import ObjectiveSettings
from .weightings import WEIGHTINGS


def output_scale(prediction: str, sigma: Tensor) -> Tensor:
    """What an error of denoised latents is multiplied by to get the error of the prediction.

    That is 1/sigma (eps, flow) or sqrt(SNR + 1) (v).
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
    parts: Parts = (),
) -> Tensor:
    """The loss of each image (B,), from denoised latents and what they should be (B, C, …, h, w) or of sound
    (B, C, T), at sigma (B,).

    It is computed in float32 or wider. `mask` (B, 1, h, w) from 0 to 1 weights each place; as in kohya's scripts, the
    mean still goes over every place, masked or not. Of video with its sound, packed of those `parts`, it is the mean of
    the video plus the mean of the sound, as in LTX-2's own trainer, and the mask is the video's.
    """
    dtype = torch.promote_types(denoised.dtype, torch.float32)
    error = denoised.to(dtype) - target.to(dtype)
    sigma = sigma.to(dtype)
    per_image = [-1] + [1] * (error.ndim - 1)
    kind = LOSSES.get(settings.loss)
    if not kind.of_denoised:
        error = error * output_scale(prediction, sigma).view(per_image)
    value = kind.compute(error, prediction, sigma.view(per_image))
    first, *others = unpack_parts(value, parts)
    if mask is not None:
        first = first * fit_mask(mask.to(first), first)
    mean = first.flatten(1).mean(1)
    for part in others:
        mean = mean + part.flatten(1).mean(1)
    return mean * step_weights(settings, prediction, sigma)


def fit_mask(mask: Tensor, latents: Tensor) -> Tensor:
    """A mask (B, 1, H, W) at the size of latents (B, C, …, h, w), by area."""
    if mask.shape[-2:] != latents.shape[-2:]:
        mask = F.interpolate(mask, size=latents.shape[-2:], mode="area")
    return mask.view(mask.shape[0], *[1] * (latents.ndim - 3), *mask.shape[-2:])
