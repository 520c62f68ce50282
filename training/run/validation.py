"""Validation: what the kind of training measures on held-out images, at noise and timesteps that never change."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..data.batches import BatchItem
from ..tasks.draws import HeldOutDraws
from ..tasks.task import Measures
from .workspace import HeldOutLoss, Workspace

MOST_IMAGES = 64


class HeldOut(NamedTuple):
    """The held-out loss, and for pairs the implicit accuracy (`preference`)."""

    loss: float
    accuracy: float | None = None


def measure(work: Workspace) -> HeldOutLoss | None:
    """The held-out loss of the trained weights and of their running average, on the same images, noise and timesteps.
    The base is as it was loaded.

    Args:
        work: the run, inside `install`.

    Returns:
        None without held-out images.
    """
    with work.use_own_weights():
        weights = validate(work)
        if weights is None:
            return None
        with torch.no_grad(), work.stepper.use_sampling_weights():
            work.task.watch(work)
        if not work.has_average:
            return HeldOutLoss(weights.loss, None, weights.accuracy)
        with work.use_average():
            average = validate(work)
    assert average is not None
    return HeldOutLoss(weights.loss, average.loss, weights.accuracy)


@torch.no_grad()
def validate(work: Workspace, numbers: Collection[int] | None = None) -> HeldOut | None:
    """The mean loss of the held-out images, with the weights to sample with and without dropout.

    Args:
        work: the run, inside `install`.
        numbers: which of the held-out images count, each with the noise that it always has; None is all of them, up to
            `MOST_IMAGES`.

    Returns:
        None without held-out images.
    """
    images = work.dataset.held_out[:MOST_IMAGES]
    if not images:
        return None
    means, accuracies = [], []
    with work.stepper.use_sampling_weights():
        for number, image in enumerate(images):
            if numbers is not None and number not in numbers:
                continue
            work.raise_if_interrupted()
            measures = measure_picture(work, BatchItem(work.dataset, image, 0, False, image.caption, False), number)
            means.append(mean_loss(measures))
            accuracies += [one.accuracy for one in measures if one.accuracy is not None]
    loss = float(torch.stack(means).mean())
    if not accuracies:
        return HeldOut(loss)
    return HeldOut(loss, float(torch.stack(accuracies).mean()))


def measure_picture(work: Workspace, item: BatchItem, number: int) -> list[Measures]:
    """What one picture measures at each strength of the task, with the noise levels and the noise of a number."""
    measures = []
    for strength in work.task.strengths(work.dataset):
        draws = HeldOutDraws(work.start_state.start.seed, number)  # the same at each strength
        with work.at_strength(strength):
            measures.append(work.task.held_out(work, item, draws))
    return measures


def mean_loss(measures: Sequence[Measures]) -> Tensor:
    """The mean over noise levels and strengths."""
    return torch.cat([one.losses for one in measures]).mean()
