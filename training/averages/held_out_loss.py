"""Held-out loss of weights other than the run's last ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from ..data.dataset import Dataset
from ..objective.denoiser import Denoiser
from ..run.validation import MOST_IMAGES, validate
from ..run.workspace import Workspace
from ..state import TrainState
from ..trainable.install import read_lora
from ..trainable.settings import AS_LOADED


def held_out_loss(
    state: TrainState,
    denoiser: Denoiser,
    dataset: Dataset,
    lora: Mapping[str, Tensor] | None = None,
    numbers: Collection[int] | None = None,
) -> float | None:
    """The held-out loss of a run's weights, as Train Step measures it. The model is left as it was.

    Args:
        state: the run.
        denoiser: its model.
        dataset: with the pictures that are held out.
        lora: a LORA_MODEL of the run's own kind; None is the state's last weights.
        numbers: the held-out pictures that count; None is all.

    Returns:
        None without held-out pictures.

    Raises:
        ValueError: when the LORA_MODEL is not of this run's layers.
    """
    trained = state.trained
    if lora is not None:
        trained = read_lora(lora, state.start.adapter, state.base_of_differences())
        if trained.keys() != state.trained.keys():
            raise ValueError("The weights to score are not of this run: they have other layers.")
    with open_for_measuring(replace(state, trained=trained), denoiser, dataset) as work:
        held = validate(work, numbers)
    if held is None:
        return None
    return held.loss


@contextmanager
def open_for_measuring(
    state: TrainState,
    denoiser: Denoiser,
    dataset: Dataset,
    raise_if_interrupted: Callable[[], None] | None = None,
) -> Iterator[Workspace]:
    """A context with a state's weights on the model as Train Step measures them: without an average beside them, and
    with the base as it was loaded.
    """
    with torch.inference_mode(False):
        start = replace(state.start, ema=None, adapter=replace(state.start.adapter, base_weights=AS_LOADED))
        start_state = replace(state, start=start, optimizer={}, average={}, powers={})
        work = Workspace(start_state, denoiser, dataset, raise_if_interrupted=raise_if_interrupted)
        with work.install():
            yield work


def halves(dataset: Dataset) -> tuple[range, range]:
    """The numbers of the held-out pictures that a search sees, and of those that are kept for the answer."""
    count = min(len(dataset.held_out), MOST_IMAGES)
    if count < 2:
        raise ValueError(
            f"averaging profile search needs at least 2 held-out images, because half of them are kept for the answer,"
            f" and there are {count}: raise validation split in Dataset, or choose a width"
        )
    return range(0, count, 2), range(1, count, 2)
