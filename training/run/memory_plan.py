"""Plans the memory of a training step before the first: it runs on PyTorch's meta device, where tensors have shapes and
no memory. It is the step that trains, with its model, adapter, optimizer, averages, checkpointing and offload.

Training Recipe needs a quicker answer for many settings, and has a formula: `recipes.estimate`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from ..data.dataset import Dataset, DatasetImage
from ..memory.allocations import Allocations, FusedAttention, on_meta
from ..objective.denoiser import Denoiser
from ..state import TrainState
from .step import advance_
from .workspace import Workspace

WEIGHTS, TRAINED, GRADIENTS = "weights", "trained", "gradients"
OPTIMIZER, ACTIVATIONS, AVERAGE = "optimizer", "activations", "average"
PARTS = (WEIGHTS, TRAINED, GRADIENTS, OPTIMIZER, ACTIVATIONS, AVERAGE)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a step takes on its device at its peak, by part: every name of PARTS."""

    parts: Mapping[str, int]

    @property
    def peak(self) -> int:
        """All parts together."""
        return sum(self.parts.values())


def plan(state: TrainState, denoiser: Denoiser, dataset: Dataset, on_host: bool = False) -> MemoryPlan:
    """The memory of a step of the largest batch, once the optimizer has its state.

    The denoiser's `device` is the meta device; it stands for the host's memory if `on_host`, where the model's own
    weights are beside int8 ones. ValueError for what cannot be planned.
    """
    check(state)
    state = _uncompiled(_with_bf16_for_fp16(state))
    optimizer = state.settings.optimizer
    counter = Allocations()
    with torch.inference_mode(False), ExitStack() as stack:
        stack.enter_context(FusedAttention())
        stack.enter_context(counter)
        is_elsewhere = state.start.adapter.int8_base and not on_host
        if optimizer.offload != "layers" and not is_elsewhere:
            stack.enter_context(on_meta(denoiser.module, partial(counter.count, part=WEIGHTS)))
        with counter.as_part(TRAINED):
            work = stack.enter_context(
                closing(Workspace(state, denoiser, largest_batch(dataset, optimizer.batch_size)))
            )
        work.loader.until = state.step + 2
        for shadow in work.shadows:
            for tensor in shadow.tensors.values():
                counter.count(tensor, AVERAGE)
        stack.enter_context(_named(work, counter))
        with counter.as_part(WEIGHTS):  # int8 ones are made here
            stack.enter_context(work.installed())
        with counter.as_part(ACTIVATIONS):
            advance_(work)
            counter.forget_peak()
            advance_(work)
    return MemoryPlan({part: counter.at_peak.get(part, 0) for part in PARTS})


def check(state: TrainState) -> None:
    """Raise ValueError for a run whose memory cannot be planned."""
    if state.start.encodes_captions:
        raise ValueError(
            "This training cannot be planned: the text encoder or words are trained. To plan the model alone, switch"
            " train text encoder of Adapter Settings off and disconnect Train Words."
        )


def _with_bf16_for_fp16(state: TrainState) -> TrainState:
    """fp16 as bf16, which takes as much: the loss scale, a few bytes, would ask tensors without memory for numbers."""
    settings = state.settings
    if settings.optimizer.precision != "fp16":
        return state
    return replace(state, settings=replace(settings, optimizer=replace(settings.optimizer, precision="bf16")))


def _uncompiled(state: TrainState) -> TrainState:
    """The state with blocks that are not compiled: there is no code for tensors without memory."""
    settings = state.settings
    return replace(state, settings=replace(settings, optimizer=replace(settings.optimizer, compile="off")))


@contextmanager
def _named(work: Workspace, counter: Allocations) -> Iterator[None]:
    """A context in which gradients and the optimizers' states are counted as such."""
    hooks = []
    for tensor in work.trained.values():
        if tensor.requires_grad:
            hooks.append(tensor.register_post_accumulate_grad_hook(lambda p: counter.count(p.grad, GRADIENTS)))
    with ExitStack() as steps:
        for optimizer in work.stepper.optimizers:
            hooks.append(optimizer.register_step_pre_hook(lambda *_: steps.enter_context(counter.as_part(OPTIMIZER))))
            hooks.append(optimizer.register_step_post_hook(lambda *_: steps.close()))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def largest_batch(dataset: Dataset, batch_size: int) -> Dataset:
    """A dataset whose every batch is the largest that `dataset` makes."""
    image = max(dataset.images, key=lambda image: _size(image) * (image.batch_size or batch_size))
    count = image.batch_size or batch_size
    regularisation = None
    if dataset.regularisation is not None:
        other = max(dataset.regularisation.images, key=_size)
        regularisation = replace(dataset.regularisation, images=(other,) * count, workers=0)
    return replace(dataset, images=(image,) * count, regularisation=regularisation, workers=0)


def _size(image: DatasetImage) -> int:
    return math.prod(image.latent.shape)
