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

    eps is (x - denoised) / sigma, and flow is the same, so their errors differ by 1 / sigma; v's by
    sqrt(1 + 1 / sigma^2), which is sqrt(SNR + 1).

    Args:
        prediction: eps, v or flow.
        sigma: noise levels (B,).

    Returns:
        The factors (B,).
    """
    sigma = sigma.clamp(min=1e-5)
    if prediction == "v":
        return (1 + sigma**-2).sqrt()
    return 1 / sigma


def step_weights(settings: ObjectiveSettings, prediction: str, sigma: Tensor) -> Tensor:
    """The weights w(sigma) of the model's own losses, by the chosen weighting; `weightings.py` has the formulas and
    their papers.

    Args:
        settings: the weighting, and its gamma.
        prediction: what the network predicts: eps, v or flow.
        sigma: noise levels (B,).

    Returns:
        The weights (B,), without a unit.
    """
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
    """The loss of each image, in float32 or wider:

        loss = w(sigma) * mean(mask * kind(s(sigma) * (denoised - target)))

    with `output_scale` s, which makes the error that of noise, velocity or flow (kinds that measure denoised latents
    leave it out), and `step_weights` w.

    Args:
        settings: the kind of loss and the weighting.
        prediction: what the network predicts: eps, v or flow.
        denoised: the model's denoised latents (B, C, …, h, w), of sound (B, C, T).
        target: what they should be, of the same shape.
        sigma: noise levels (B,).
        mask: weights (B, 1, h, w) of places, from 0 to 1. As in kohya's scripts, the mean still goes over every place,
            masked or not.
        parts: the parts that latents are packed of, as video with its sound. Then the loss is the mean of the video
            plus the mean of the sound, as in LTX-2's own trainer, and the mask is the video's.

    Returns:
        The losses (B,).
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
    """A mask at the size of latents, by area: each place of a latent gets the mean of the pixels over it.

    Args:
        mask: weights (B, 1, H, W) of pixels, from 0 to 1.
        latents: what the mask is for, (B, C, h, w) or (B, C, frames, h, w); its values don't matter.

    Returns:
        The mask (B, 1, h, w), with a 1 for each dimension between that broadcasts over frames.
    """
    if mask.shape[-2:] != latents.shape[-2:]:
        mask = F.interpolate(mask, size=latents.shape[-2:], mode="area")
    return mask.view(mask.shape[0], *[1] * (latents.ndim - 3), *mask.shape[-2:])
