"""Validation: the loss of held-out images, or of pairs, at noise and timesteps that never change."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from ..data.batches import Batch, BatchItem, collate, image_conditioning
from ..data.dataset import DatasetImage
from ..data.sliders import strengths_of
from ..data.stored_latent import read_latent
from ..memory.offload import to_device
from ..objective import preference
from ..objective.loss import losses
from ..objective.timesteps import NO_EXPERT, expert_levels_at
from ..optimizers.precision import autocast
from ..random_draws import generator as seeded_generator
from . import autoencoder
from .slider_step import from_noise, losses_at
from .workspace import HeldOutLoss, Workspace

NOISE_LEVELS = 4  # of each held-out image
MOST_IMAGES = 64


class Held(NamedTuple):
    """The held-out loss, and for pairs the implicit accuracy (`preference`)."""

    loss: float
    accuracy: float | None = None


def measure(work: Workspace) -> HeldOutLoss | None:
    """The held-out loss of the trained weights and of their running average, on the same images, noise and timesteps;
    None without held-out images. The base is as it was loaded.
    """
    with work.own_weights():
        weights = validate(work)
        if weights is None:
            return None
        autoencoder.check_latents(work)
        if not work.has_average:
            return HeldOutLoss(weights.loss, None, weights.accuracy)
        with work.averaged():
            average = validate(work)
    assert average is not None
    return HeldOutLoss(weights.loss, average.loss, weights.accuracy)


@torch.no_grad()
def validate(work: Workspace, numbers: Collection[int] | None = None) -> Held | None:
    """Mean loss of the held-out images with plain weights and without dropout; None without held-out images.

    With `numbers` only these images count, each with the noise that it always has.
    """
    images = work.dataset.held_out[:MOST_IMAGES]
    if not images:
        return None
    means, accuracies = [], []
    for number, image in enumerate(images):
        if numbers is not None and number not in numbers:
            continue
        work.raise_if_interrupted()
        losses, accuracy = _image_losses(work, number, image)
        means.append(losses.mean())
        if accuracy is not None:
            accuracies.append(accuracy)
    loss = float(torch.stack(means).mean())
    if not accuracies:
        return Held(loss)
    return Held(loss, float(torch.stack(accuracies).mean()))


def _levels(work: Workspace, offset: Tensor) -> Tensor:
    """NOISE_LEVELS noise levels, evenly spread over the model's schedule, or over the expert's part of it."""
    denoiser, objective = work.denoiser, work.start_state.settings.objective
    shares = (torch.arange(NOISE_LEVELS) + offset) / NOISE_LEVELS
    if objective.expert != NO_EXPERT:
        return to_device(expert_levels_at(objective, shares, denoiser.sigma), denoiser.device)
    return denoiser.sigma(to_device(shares, denoiser.device))


def _image_losses(work: Workspace, number: int, image: DatasetImage) -> tuple[Tensor, Tensor | None]:
    """The losses of one image, at NOISE_LEVELS levels that depend on the run's seed and its number alone; of a pair
    also its implicit accuracy; of a VAE those of its tiles.
    """
    if autoencoder.settings_of(work) is not None:
        return autoencoder.held_out_losses(work, image), None
    objective = work.start_state.settings.objective
    generator = seeded_generator(work.start_state.start.seed, number, "validation")
    sigma = _levels(work, torch.rand((), generator=generator))
    if work.dataset.slider is not None:
        return _slider_losses(work, number, image, sigma, generator), None
    clean = _clean(work, read_latent(image.latent))
    noise = to_device(torch.randn(clean.shape, generator=generator), work.denoiser.device)
    if not objective.compares_pairs:
        return _errors(work, image, clean, noise, sigma), None
    assert image.worse is not None
    pair = clean, _clean(work, image.worse.latent_as(False))
    errors = torch.cat([_errors(work, image, latents, noise, sigma) for latents in pair])
    with work.plain():
        reference = torch.cat([_errors(work, image, latents, noise, sigma, True) for latents in pair])
    pair_losses = preference.pair_losses(objective.beta, preference.margins(errors, reference))
    return pair_losses, preference.implicit_accuracy(errors, reference)


def _clean(work: Workspace, latent: Tensor) -> Tensor:
    """A latent (C, …, h, w) as the network expects it, NOISE_LEVELS times."""
    latents = latent[None].expand(NOISE_LEVELS, *latent.shape)
    return work.denoiser.process_in(to_device(latents, work.denoiser.device, torch.float32))


def _errors(
    work: Workspace, image: DatasetImage, clean: Tensor, noise: Tensor, sigma: Tensor, is_reference: bool = False
) -> Tensor:
    """The weighted errors of one image, of the model as it is now. The reference reads the captions as they came."""
    denoiser, state = work.denoiser, work.start_state
    with work.stepper.evaluated(), autocast(state.settings.optimizer, denoiser):
        conditioning = image_conditioning(work.dataset, image.caption, image.crop(0))
        if not is_reference:
            (conditioning,) = work.encoded([image.caption], [conditioning])
        denoised = denoiser.denoise(
            denoiser.noisy(clean, noise, sigma), sigma, (conditioning,) * NOISE_LEVELS, {"graft_evaluating": True}
        )
    mask = None
    if image.mask is not None:
        mask = to_device(image.mask[None], denoiser.device)
    return losses(state.settings.objective, denoiser.prediction, denoised, clean, sigma, mask, image.parts)


def _slider_losses(
    work: Workspace, number: int, image: DatasetImage, sigma: Tensor, generator: torch.Generator
) -> Tensor:
    """The losses of one image of a slider, at each strength that is trained."""
    item = BatchItem(work.dataset, image, 0, False, image.caption, False)
    batch, device = collate([item] * NOISE_LEVELS), work.denoiser.device
    sides = {}
    for strength in strengths_of(work.dataset):
        latents = to_device(batch.at_strength(strength), device, torch.float32)
        sides[strength] = work.denoiser.process_in(latents)
    noise = to_device(torch.randn(sides[1.0].shape, generator=generator), device)
    found = []
    for strength, clean in sides.items():
        with work.at_strength(strength):
            if batch.directions is None:
                found.append(_errors(work, image, clean, noise, sigma))
            else:
                found.append(_direction_losses(work, number, batch, clean, noise, sigma))
    return torch.cat(found)


def _direction_losses(
    work: Workspace, number: int, batch: Batch, clean: Tensor, noise: Tensor, sigma: Tensor
) -> Tensor:
    """The losses of a slider's prompts. Without pictures, the noise is denoised by the model itself, so that it is the
    same however far the training is.
    """
    options = {"graft_evaluating": True}
    if work.dataset.has_pictures:
        x = work.denoiser.noisy(clean, noise, sigma)
    else:
        if number not in work.held_out_starts:
            with work.plain():
                work.held_out_starts[number] = from_noise(work, batch, noise, sigma, options)
        x = work.held_out_starts[number]
    with work.stepper.evaluated():
        return losses_at(work, batch, x, sigma, options)
