"""Validation: the loss of held-out images at noise and timesteps that never change."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from ..data.batches import image_conditioning
from ..data.dataset import DatasetImage
from ..memory.offload import to_device
from ..objective.loss import losses
from ..objective.timesteps import NO_EXPERT, expert_levels_at
from ..optimizers.precision import autocast
from ..random_draws import generator as seeded_generator
from .workspace import HeldOutLoss, Workspace

NOISE_LEVELS = 4  # of each held-out image
MOST_IMAGES = 64


def measure(work: Workspace) -> HeldOutLoss | None:
    """The held-out loss of the trained weights and of their running average, on the same images, noise and timesteps;
    None without held-out images.
    """
    weights = validate(work)
    if weights is None:
        return None
    if not work.has_average:
        return HeldOutLoss(weights)
    with work.averaged():
        return HeldOutLoss(weights, validate(work))


@torch.no_grad()
def validate(work: Workspace, numbers: Collection[int] | None = None) -> float | None:
    """Mean loss of the held-out images with plain weights and without dropout; None without held-out images.

    With `numbers` only these images count, each with the noise that it always has.
    """
    images = work.dataset.held_out[:MOST_IMAGES]
    if not images:
        return None
    means = []
    for number, image in enumerate(images):
        if numbers is None or number in numbers:
            means.append(_image_losses(work, number, image).mean())
    return float(torch.stack(means).mean())


def _levels(work: Workspace, offset: Tensor) -> Tensor:
    """NOISE_LEVELS noise levels, evenly spread over the model's schedule, or over the expert's part of it."""
    denoiser, objective = work.denoiser, work.start_state.settings.objective
    shares = (torch.arange(NOISE_LEVELS) + offset) / NOISE_LEVELS
    if objective.expert != NO_EXPERT:
        return to_device(expert_levels_at(objective, shares, denoiser.sigma), denoiser.device)
    return denoiser.sigma(to_device(shares, denoiser.device))


def _image_losses(work: Workspace, number: int, image: DatasetImage) -> Tensor:
    """The losses of one image, at NOISE_LEVELS levels that depend on the run's seed and its number alone."""
    denoiser, state = work.denoiser, work.start_state
    generator = seeded_generator(state.start.seed, number, "validation")
    latents = image.latent[None].expand(NOISE_LEVELS, *image.latent.shape)
    clean = denoiser.process_in(to_device(latents, denoiser.device, torch.float32))
    sigma = _levels(work, torch.rand((), generator=generator))
    noise = to_device(torch.randn(clean.shape, generator=generator), denoiser.device)
    with work.stepper.evaluated(), autocast(state.settings.optimizer, denoiser.device):
        stored = image_conditioning(work.dataset, image.caption, image.crop(0))
        (conditioning,) = work.encoded([image.caption], [stored])
        denoised = denoiser.denoise(
            denoiser.noisy(clean, noise, sigma), sigma, (conditioning,) * NOISE_LEVELS, {"graft_evaluating": True}
        )
    mask = None
    if image.mask is not None:
        mask = to_device(image.mask[None], denoiser.device)
    return losses(state.settings.objective, denoiser.prediction, denoised, clean, sigma, mask)
