"""Preference tuning: pairs of pictures of which people like one better (`training.objective.preference`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..data.batches import Batch, BatchItem, collate
from ..data.dataset import Dataset
from ..data.listing import first_names
from ..data.preference_files import missing_partner
from ..distributed.process_group import SingleProcess
from ..objective.denoiser import Denoiser
from ..objective.preference import implicit_accuracy, margins, pair_losses
from ..optimizers.precision import autocast
from ..state import TrainState
from .denoising import DenoisingTask, errors, latents_of, measure_errors, noisy
from .draws import NOISE_LEVELS, Draws
from .task import Measures, TrainingContext


class PreferenceTask(DenoisingTask):
    """The model learns to prefer the better picture of each pair more than it did before training."""

    def check(self, state: TrainState, denoiser: Denoiser, dataset: Dataset, group: SingleProcess) -> None:
        """Raise ValueError as in denoising, and when some images have no worse picture to compare with."""
        super().check(state, denoiser, dataset, group)
        images = dataset.images + dataset.held_out
        if dataset.regularization is not None:
            images += dataset.regularization.images
        alone = [image.name for image in images if image.worse is None]
        if not alone:
            return
        remedy = "Name the pictures of a pair name.win.png and name.lose.png, or choose another loss function."
        partner = missing_partner(alone[0])
        if partner:
            remedy = f"Beside {alone[0]} there is no {partner}. {remedy}"
        raise ValueError(
            f"Objective Settings: loss function {self.objective.loss} learns from pairs, and {len(alone)} of"
            f" {len(images)} images have no worse picture: {first_names(alone)}. {remedy}"
        )

    def losses(self, context: TrainingContext, batch: Batch, draws: Draws) -> Tensor:
        """The losses (B,) of pairs, whose better pictures are the batch's."""
        return self._pair_losses(*self._compare(context, batch, draws))

    def held_out(self, context: TrainingContext, item: BatchItem, draws: Draws) -> Measures:
        """The losses of a held-out pair at NOISE_LEVELS noise levels, and how often the better picture gained more."""
        compared = self._compare(context, collate([item] * NOISE_LEVELS), draws)
        return Measures(self._pair_losses(*compared), implicit_accuracy(*compared))

    def _pair_losses(self, found: Tensor, reference: Tensor) -> Tensor:
        return pair_losses(self.objective.beta, margins(found, reference))

    def _compare(self, context: TrainingContext, batch: Batch, draws: Draws) -> tuple[Tensor, Tensor]:
        """(errors (2B,) of the model, those of the model as it was): of the better pictures, then of the worse ones,
        with the same noise and levels. The reference reads the captions as they came.
        """
        assert batch.worse is not None
        better, worse = latents_of(context, batch.latents), latents_of(context, batch.worse)
        drawn = draws.draw(self.objective, context.denoiser, better, batch.parts).twice()
        x, target = noisy(context.denoiser, torch.cat([better, worse]), drawn)
        both = _both_of_pairs(batch)
        with context.switch_off_trained(), autocast(context.start_state.settings.optimizer, context.denoiser):
            base = context.denoiser.denoise(x, drawn.sigma, both.conditionings, draws.options)
        reference = measure_errors(context, both, base, target, drawn.sigma)
        return errors(context, both, x, target, drawn.sigma, draws.options), reference

    def report(self, state: TrainState) -> Sequence[str]:
        """The lines of denoising, and how many held-out pairs are preferred as people do, first and last."""
        lines = [*super().report(state)]
        if state.history.accuracy:
            (first_step, first), (last_step, last) = state.history.accuracy[0], state.history.accuracy[-1]
            lines.append(
                f"implicit accuracy on held-out pairs {first:.0%} at step {first_step}, {last:.0%} at {last_step}: how"
                " often the model leans more toward the better picture than it did before training"
            )
        return lines


def _both_of_pairs(batch: Batch) -> Batch:
    """The captions and masks of pairs twice: for the better pictures, then for the worse ones."""
    mask = batch.mask
    if mask is not None:
        mask = torch.cat([mask, mask])
    return replace(batch, conditionings=batch.conditionings * 2, captions=batch.captions * 2, mask=mask)
