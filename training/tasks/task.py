"""The interface of a kind of training, and what a run gives it.

To add a kind, write its class in a file of its own and list it in `registry.py`. `denoising.DenoisingTask` is the one
to derive from where a diffusion model learns from noisy latents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..data.batches import Batch, BatchItem
from ..data.dataset import Conditioning, Dataset, DatasetImage
from ..distributed.process_group import SingleProcess
from ..objective.denoiser import Denoiser
from ..state import TrainState
from .draws import Draws


class Companion(Protocol):
    """Another network that learns beside the model, with an optimizer of its own. A run steps it and stores it."""

    def prepare(self, step: int) -> None:
        """Begin step `step` (from 0): drop the gradients of an earlier one."""

    def finish_gradients(self) -> float:
        """Complete the gradients of the step; returns their norm, which is not finite where training has diverged."""

    def step_(self) -> None:
        """Move the weights."""

    def state(self) -> Mapping[str, Tensor]:
        """Every tensor that the next step depends on, by name."""


class TrainingContext(Protocol):
    """What a task may read and call of a run (`run.workspace.Workspace`). It writes nothing there."""

    start_state: TrainState
    """The state that the run goes on from, with its settings."""
    denoiser: Denoiser
    """The model that is trained."""
    dataset: Dataset
    """What it is trained on."""
    trained: dict[str, Tensor]
    """The live tensors that are trained, by name."""
    step: int
    """How many steps are done."""
    strength: float
    """The adapter's strength now."""

    def encode(self, captions: Sequence[str], known: Sequence[Conditioning]) -> Sequence[Conditioning]:
        """Conditionings of captions: the known ones, or new ones where what is trained changes them."""

    def switch_off_trained(self) -> AbstractContextManager[None]:
        """A context without what is trained and without gradients."""

    def switch_off_dropout(self) -> AbstractContextManager[None]:
        """A context in which the adapter drops nothing, as while sampling."""


class Measures(NamedTuple):
    """What one held-out picture measures: losses (n,), and of a pair the implicit accuracy (`objective.preference`)."""

    losses: Tensor
    accuracy: Tensor | None = None


@dataclass(frozen=True)
class Preview:
    """What previews show: samples at these strengths of the adapter beside each other; or, with `shown`, what it makes
    of each of `images`: a picture (H, W, 3) in 0..1, from the loaded model.
    """

    strengths: tuple[float, ...] = (1.0,)
    shown: Callable[[Any, DatasetImage], Tensor] | None = None
    images: Sequence[DatasetImage] = ()


class TrainingTask(Protocol):
    """A kind of training. Each run makes its own (`registry.task_of`), which may keep what it needs between steps. What
    has a body here is so for most kinds.
    """

    casts_frozen_weights: bool = True
    """Whether what is not trained may be cast to the type that autocast computes in."""

    def check(self, state: TrainState, denoiser: Denoiser, dataset: Dataset, group: SingleProcess) -> None:
        """Raise ValueError for what does not go together, before anything is put on the device.

        Args:
            state: the run.
            denoiser: its model.
            dataset: what is trained on.
            group: the processes that train together.
        """

    def companions(self, state: TrainState, device: torch.device) -> Mapping[str, Companion]:
        """What else is trained, by name, as the state has it (`companion_tensors`). It is called once, before the first
        step.

        Args:
            state: the run.
            device: where it is trained.
        """
        return {}

    def strengths(self, dataset: Dataset) -> tuple[float, ...]:
        """The strengths of the adapter that each step trains and each validation measures."""
        return (1.0,)

    def losses(self, context: TrainingContext, batch: Batch, draws: Draws) -> Tensor:
        """The losses of a training step, and of a validation.

        Args:
            context: the run.
            batch: B pictures of one size.
            draws: what is drawn with.

        Returns:
            Losses (B,), with the graph that leads to what is trained.
        """

    def held_out(self, context: TrainingContext, item: BatchItem, draws: Draws) -> Measures:
        """What a held-out picture measures at one strength, without gradients and with the weights to sample with.

        Args:
            context: the run.
            item: the picture.
            draws: what is drawn with, the same in each validation.
        """

    def watch(self, context: TrainingContext) -> None:
        """Look at the weights after their held-out loss was measured; an error ends the run."""

    def previews(self, state: TrainState, dataset: Dataset) -> Preview:
        """What previews show."""
        return Preview()

    def lora_model(self, state: TrainState, ema: bool = False) -> dict[str, Tensor]:
        """What was trained as a LORA_MODEL.

        Args:
            state: the run.
            ema: whether it is the running average instead.

        Raises:
            ValueError: where it is none.
        """
        return state.lora_model(ema)

    def saves_memory(self, state: TrainState) -> Sequence[str]:
        """What would need less memory, beside the optimizer's settings, those that cost least first."""

    def beginning(self, state: TrainState, dataset: Dataset) -> Sequence[str]:
        """Lines for the report before the first step."""
        return ()

    def report(self, state: TrainState) -> Sequence[str]:
        """Lines for the report after some steps."""


@dataclass(frozen=True)
class TaskKind:
    """A kind of training by name. `make` makes the task of a run from its state, and `settings` is the dataclass of
    `Start.task_settings`, None without any. `network` is what it trains, as messages call it.
    """

    name: str
    make: Callable[[TrainState], TrainingTask]
    settings: type | None = None
    network: str = "model"
