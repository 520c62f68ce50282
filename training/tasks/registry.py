"""The kinds of training by name. To add one, list its record here."""

from __future__ import annotations

from ...patches.registry import Registry
from ..data.dataset import Dataset
from ..objective.loss_kinds import PREFERENCE
from ..state import DENOISING, TrainState
from ..trainable.vae_parts import VaeSettings
from .denoising import DenoisingTask
from .preference import PreferenceTask
from .slider import SliderTask
from .task import TaskKind, TrainingTask
from .vae import VaeTask

_SLIDER = "slider"

TASKS: Registry[TaskKind] = Registry(
    "kind of training",
    (
        TaskKind(DENOISING, DenoisingTask),
        TaskKind(PREFERENCE, PreferenceTask),
        TaskKind(_SLIDER, SliderTask),
        TaskKind("vae", VaeTask, VaeSettings, network="VAE"),
    ),
)


def task_of(state: TrainState) -> TrainingTask:
    """A task for a run that goes on from a state."""
    return TASKS.get(state.task).make(state)


def task_for(dataset: Dataset) -> str:
    """The kind of training that a dataset is made for, by name."""
    if dataset.slider is None:
        return DENOISING
    return _SLIDER


def trains_vae(state: TrainState) -> bool:
    """Whether what a state trains is a VAE, and no diffusion model."""
    return TASKS.get(state.task).network == "VAE"
