"""Training a slider: from prompts, where what the model itself predicts for them makes the target of the adapter, or
from pairs of pictures, of which strength 1 learns one and strength -1 the other (`training.objective.slider`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..data import sliders
from ..data.batches import Batch
from ..data.dataset import Conditioning, Dataset
from ..distributed.process_group import SingleProcess
from ..objective.denoiser import Denoiser
from ..objective.slider import (
    SliderSettings,
    add_anchor,
    denoise_partly,
    denoised_of,
    move_prediction,
    normalize_like,
    prediction_of,
)
from ..optimizers.precision import autocast
from ..state import TrainState
from .denoising import DenoisingTask, Options, errors, latents_of, switch_off_routing
from .draws import Draws
from .task import Preview, TrainingContext

PREVIEW_STRENGTHS = (-1.0, 0.0, 1.0)  # from left to right
_NEAR_NOISE = 1 - 2**-24  # the last timestep of `Denoiser.sigma`


class SliderTask(DenoisingTask):
    """The adapter's strength learns to move a property one way and the other."""

    takes_sliders = True

    def __init__(self, state: TrainState) -> None:
        super().__init__(state)
        self._held_out_starts: dict[int, Tensor] = {}  # what held-out noise is denoised to

    def check(self, state: TrainState, denoiser: Denoiser, dataset: Dataset, group: SingleProcess) -> None:
        """Raise ValueError as in denoising, and for what a slider cannot be trained with."""
        sliders.check(dataset, state.start.adapter, state.start.words is not None, self.objective)
        if group.shard:  # the ranks would run different numbers of forward passes
            raise ValueError("Slider: --shard divides the model among ranks: start without --shard.")
        super().check(state, denoiser, dataset, group)

    def strengths(self, dataset: Dataset) -> tuple[float, ...]:
        """Those of the slider's method."""
        assert dataset.slider is not None
        return dataset.slider.strengths

    def losses(self, context: TrainingContext, batch: Batch, draws: Draws) -> Tensor:
        """Losses (B,) at the adapter's strength. Pairs of pictures are denoised. For prompts without pictures, the
        noise is first denoised to its level by the model as it is now.
        """
        if batch.directions is None:
            return super().losses(context, batch, draws)
        if context.dataset.has_pictures:
            x, _, drawn = self.add_noise(context, batch, draws)
        else:
            clean = latents_of(context, batch.latents)
            drawn = draws.draw(self.objective, context.denoiser, clean, batch.parts)
            x = self._denoise_to(context, batch, drawn.noise, drawn.sigma, draws)
        return losses_at(context, batch, x, drawn.sigma, draws.options)

    def _denoise_to(self, context: TrainingContext, batch: Batch, noise: Tensor, sigma: Tensor, draws: Draws) -> Tensor:
        """Noise denoised to `sigma`. Held-out noise is denoised by the model itself, so that it is the same however far
        the training is.
        """
        if draws.number is None:
            return _denoise_with_adapter(context, batch, noise, sigma, draws.options)
        if draws.number not in self._held_out_starts:
            with context.switch_off_trained():
                self._held_out_starts[draws.number] = _denoise_with_adapter(context, batch, noise, sigma, draws.options)
        return self._held_out_starts[draws.number]

    def previews(self, state: TrainState, dataset: Dataset) -> Preview:
        """Samples at both ends of the slider and in its middle."""
        return Preview(PREVIEW_STRENGTHS)

    def beginning(self, state: TrainState, dataset: Dataset) -> list[str]:
        """The slider's prompts or pairs, and the lines of denoising."""
        return [*sliders.describe(dataset), *super().beginning(state, dataset)]


def losses_at(context: TrainingContext, batch: Batch, x: Tensor, sigma: Tensor, options: Options) -> Tensor:
    """Losses (B,) for the noisy latents `x` at `sigma`."""
    assert batch.directions is not None
    slider, anchor = _slider(context), batch.directions.anchor
    teacher = _teach(context, batch, x, sigma, switch_off_routing(options))
    direction = errors(context, batch, x, teacher.target, sigma, options)
    if teacher.anchor is not None:
        held = errors(context, replace(batch, conditionings=anchor), x, teacher.anchor, sigma, options)
        return add_anchor(direction, held, slider.anchor_strength)
    if slider.is_normalized:
        return add_anchor(direction, torch.zeros_like(direction), 0.0)
    return direction


@torch.no_grad()
def _denoise_with_adapter(
    context: TrainingContext, batch: Batch, noise: Tensor, sigma: Tensor, options: Options
) -> Tensor:
    """Noise that was denoised down to `sigma` for the target prompt, with the adapter as it is now."""
    slider, denoiser = _slider(context), context.denoiser
    assert batch.directions is not None
    empty, options = batch.directions.empty, switch_off_routing(options)

    def denoise(x: Tensor, level: Tensor) -> Tensor:
        denoised = denoiser.denoise(x, level, batch.conditionings, options)
        if slider.cfg == 1:
            return denoised
        without = denoiser.denoise(x, level, empty, options)
        return without + slider.cfg * (denoised - without)

    shares = torch.linspace(_NEAR_NOISE, 0.0, slider.steps + 1, device=denoiser.device)
    levels = denoiser.sigma(shares)
    start = denoiser.noisy(torch.zeros_like(noise), noise, torch.maximum(levels[:1], sigma))
    with context.switch_off_dropout(), autocast(context.start_state.settings.optimizer, denoiser):
        return denoise_partly(denoise, start, levels, sigma)


class _Teacher(NamedTuple):
    """What the adapter learns to predict: for the target prompt, and for the anchor if there is one."""

    target: Tensor
    anchor: Tensor | None


def _teach(context: TrainingContext, batch: Batch, x: Tensor, sigma: Tensor, options: Options) -> _Teacher:
    """The model's own prediction for the neutral prompt, moved along the direction of the others, and for the anchor.
    All are denoised latents.
    """
    slider, strength, denoiser = _slider(context), context.strength, context.denoiser
    directions, anchor = batch.directions, None
    assert directions is not None
    with context.switch_off_trained(), autocast(context.start_state.settings.optimizer, denoiser):

        def seen(conditionings: Sequence[Conditioning]) -> Tensor:
            return denoiser.denoise(x, sigma, conditionings, options)

        neutral = seen(directions.neutral)
        positive, negative = seen(directions.positive), seen(directions.negative)
        if directions.anchor:
            anchor = seen(directions.anchor)
    target = move_prediction(neutral, positive, negative, strength * slider.guidance)
    if slider.is_normalized:
        outputs = (prediction_of(denoiser.prediction, x, one, sigma) for one in (target, neutral))
        target = denoised_of(denoiser.prediction, x, normalize_like(*outputs), sigma)
    return _Teacher(target, anchor)


def _slider(context: TrainingContext) -> SliderSettings:
    assert context.dataset.slider is not None
    return context.dataset.slider
