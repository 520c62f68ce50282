"""The loss of a slider between prompts: what the model itself predicts for them makes the target of the adapter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...patches.token_downsampling.unet import TRAINING
from ...patches.token_routing.route import ROUTING
from ..data.batches import Batch, SliderConditionings
from ..data.dataset import Conditioning
from ..memory.offload import to_device
from ..objective.loss import losses
from ..objective.slider import SliderSettings, denoised_by, moved, normalised, partly_denoised, predicted, with_anchor
from ..optimizers.precision import autocast
from .workspace import Workspace

Options = Mapping[str, Any]
_NEAR_NOISE = 1 - 2**-24  # the last timestep of `Denoiser.sigma`


def without_routing(options: Options) -> dict[str, Any]:
    """The options for the model that teaches: no token skips a block of it."""
    where = {key: value for key, value in options.get(TRAINING, {}).items() if key != ROUTING}
    return {**options, TRAINING: where}


def slider_losses(
    work: Workspace, batch: Batch, clean: Tensor, noise: Tensor, sigma: Tensor, options: Options
) -> Tensor:
    """Losses (B,) of a batch with prompts, at the adapter's strength of now. Without pictures, the noise is denoised
    to `sigma` by the model as it is now.
    """
    if work.dataset.has_pictures:
        x = work.denoiser.noisy(clean, noise, sigma)
    else:
        x = from_noise(work, batch, noise, sigma, options)
    return losses_at(work, batch, x, sigma, options)


def losses_at(work: Workspace, batch: Batch, x: Tensor, sigma: Tensor, options: Options) -> Tensor:
    """Losses (B,) for the noisy latents `x` at `sigma`."""
    assert batch.directions is not None
    slider, anchor = _slider(work), batch.directions.anchor
    teacher = _without_adapter(work, batch.directions, x, sigma, without_routing(options))
    direction = _errors(work, batch, batch.conditionings, x, teacher.target, sigma, options)
    if teacher.anchor is not None:
        held = _errors(work, batch, anchor, x, teacher.anchor, sigma, options)
        return with_anchor(direction, held, slider.anchor_strength)
    if slider.is_normalised:
        return with_anchor(direction, torch.zeros_like(direction), 0.0)
    return direction


def _errors(
    work: Workspace,
    batch: Batch,
    conditionings: Sequence[Conditioning],
    x: Tensor,
    target: Tensor,
    sigma: Tensor,
    options: Options,
) -> Tensor:
    """The weighted errors (B,) of the model with the adapter, for one prompt each."""
    objective, denoiser = work.start_state.settings.objective, work.denoiser
    with autocast(work.start_state.settings.optimizer, denoiser):
        denoised = denoiser.denoise(x, sigma, conditionings, options)
    mask = None
    if batch.mask is not None:
        mask = to_device(batch.mask, denoiser.device)
    return losses(objective, denoiser.prediction, denoised, target, sigma, mask)


@torch.no_grad()
def from_noise(work: Workspace, batch: Batch, noise: Tensor, sigma: Tensor, options: Options) -> Tensor:
    """Noise that was denoised down to `sigma` for the target prompt, with the adapter as it is now."""
    slider, denoiser = _slider(work), work.denoiser
    assert batch.directions is not None
    empty, options = batch.directions.empty, without_routing(options)

    def denoise(x: Tensor, level: Tensor) -> Tensor:
        denoised = denoiser.denoise(x, level, batch.conditionings, options)
        if slider.cfg == 1:
            return denoised
        without = denoiser.denoise(x, level, empty, options)
        return without + slider.cfg * (denoised - without)

    shares = torch.linspace(_NEAR_NOISE, 0.0, slider.steps + 1, device=denoiser.device)
    levels = denoiser.sigma(shares)
    start = denoiser.noisy(torch.zeros_like(noise), noise, torch.maximum(levels[:1], sigma))
    with _without_dropout(work), autocast(work.start_state.settings.optimizer, denoiser):
        return partly_denoised(denoise, start, levels, sigma)


class _Teacher(NamedTuple):
    """What the adapter learns to predict: for the target prompt, and for the anchor if there is one."""

    target: Tensor
    anchor: Tensor | None


def _without_adapter(
    work: Workspace, directions: SliderConditionings, x: Tensor, sigma: Tensor, options: Options
) -> _Teacher:
    """The model's own prediction for the neutral prompt, moved along the direction of the others, and for the anchor.
    All are denoised latents.
    """
    slider, strength, kind = _slider(work), work.strength, work.denoiser.prediction
    anchor = None
    with work.plain(), autocast(work.start_state.settings.optimizer, work.denoiser):

        def seen(conditionings: Sequence[Conditioning]) -> Tensor:
            return work.denoiser.denoise(x, sigma, conditionings, options)

        neutral = seen(directions.neutral)
        positive, negative = seen(directions.positive), seen(directions.negative)
        if directions.anchor:
            anchor = seen(directions.anchor)
    target = moved(neutral, positive, negative, strength * slider.guidance)
    if slider.is_normalised:
        outputs = (predicted(kind, x, one, sigma) for one in (target, neutral))
        target = denoised_by(kind, x, normalised(*outputs), sigma)
    return _Teacher(target, anchor)


def _slider(work: Workspace) -> SliderSettings:
    assert work.dataset.slider is not None
    return work.dataset.slider


@contextmanager
def _without_dropout(work: Workspace) -> Iterator[None]:
    """A context in which the adapter drops nothing, as while sampling."""
    purpose, work.purpose = work.purpose, ""
    try:
        yield
    finally:
        work.purpose = purpose
