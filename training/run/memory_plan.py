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
from torch import Tensor

from ...patches.token_downsampling.unet import EVALUATING
from ..data.dataset import Dataset, DatasetImage
from ..data.epoch_order import regularization_count
from ..memory.allocations import META, Allocations, FusedAttention, off_meta, on_meta
from ..memory.offload import to_device
from ..objective.denoiser import Denoiser
from ..state import TrainState
from .step import advance_
from .workspace import Workspace

WEIGHTS, TRAINED, GRADIENTS = "weights", "trained", "gradients"
OPTIMIZER, ACTIVATIONS, AVERAGE = "optimizer", "activations", "average"
PARTS = (WEIGHTS, TRAINED, GRADIENTS, OPTIMIZER, ACTIVATIONS, AVERAGE)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a step takes on its device at its peak, by part: every name of PARTS.

    `preview`: those in all while a preview as large as the largest picture is sampled with guidance. `blocks`: those of
    each block of the model, if as few wait in host memory as there is room for; else empty.
    """

    parts: Mapping[str, int]
    preview: int = 0
    blocks: tuple[int, ...] = ()

    @property
    def peak(self) -> int:
        """All parts together."""
        return sum(self.parts.values())


def plan(state: TrainState, denoiser: Denoiser, dataset: Dataset, on_host: bool = False) -> MemoryPlan:
    """The memory of a step of the largest batch, once the optimizer has its state. The step runs on tensors without
    memory.

    Args:
        state: the run.
        denoiser: its model. Its `device` is the meta device, and so is a trained text encoder's.
        dataset: whose largest batch counts.
        on_host: whether the meta device stands for the host's memory, where the model's own weights are beside
            quantized ones.

    Returns:
        Bytes at the peak, by part.
    """
    optimizer = state.settings.optimizer
    precision = optimizer.precision
    if precision == "fp16":  # bf16 takes as much; a loss scale would ask tensors without memory for numbers
        precision = "bf16"
    # There is no code to compile for tensors without memory, and all micro-batches after the first take the same.
    state = state.with_optimizer(precision=precision, compile="off", accumulation=min(2, optimizer.accumulation))
    # Copies of these in the host's memory have no values either, and take none.
    state = replace(state, trained=_without_values(state.trained), optimizer=_without_values(state.optimizer))
    counter = Allocations()
    with torch.inference_mode(False), ExitStack() as stack:
        stack.enter_context(FusedAttention())
        stack.enter_context(counter)
        is_elsewhere = state.start.adapter.quantized_base and not on_host
        if optimizer.offload != "layers" and not is_elsewhere:
            stack.enter_context(on_meta(denoiser.module, partial(counter.count, part=WEIGHTS)))
        else:
            stack.enter_context(off_meta(denoiser.module))
        if state.start.encodes_captions:
            assert denoiser.text_encoder is not None
            stack.enter_context(on_meta(denoiser.text_encoder, partial(counter.count, part=WEIGHTS)))
        with counter.count_as(TRAINED):
            work = stack.enter_context(
                closing(
                    Workspace(state, denoiser, largest_batch(dataset, optimizer.batch_size), in_main_memory=on_host)
                )
            )
        work.load_until(state.step + 2)
        for shadow in work.shadows:
            for tensor in shadow.tensors.values():
                counter.count(tensor, AVERAGE)
        stack.enter_context(_name_allocations(work, counter))
        with counter.count_as(WEIGHTS):  # int8 ones are made here
            stack.enter_context(work.install())
        with counter.count_as(ACTIVATIONS):
            advance_(work)
            counter.forget_peak()
            advance_(work)
            parts = {part: counter.at_peak.get(part, 0) for part in PARTS}
            counter.forget_peak()
            _preview(work)
            preview = counter.peak
    return MemoryPlan(parts, preview, () if optimizer.swapped_blocks else work.block_sizes)


@torch.no_grad()
def _preview(work: Workspace) -> None:
    """One call of the network in a preview: with guidance it sees the picture twice."""
    denoiser, batch = work.denoiser, work.loader.take(work.step, 0)[0]
    with work.use_own_weights(), work.stepper.use_sampling_weights():
        x = denoiser.process_in(to_device(torch.cat([batch.latents[:1]] * 2), denoiser.device, torch.float32))
        level = denoiser.sigma(torch.full((2,), 0.5, device=denoiser.device))
        denoiser.denoise(x, level, batch.conditionings[:1] * 2, {EVALUATING: True})


def _without_values(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(META) if tensor.ndim else tensor for name, tensor in tensors.items()}


def plan_in_main_memory(state: TrainState) -> TrainState:
    """The state as it takes memory where the model computes in main memory: nothing can be moved there."""
    optimizer, ema = state.settings.optimizer, state.start.ema
    state = state.with_optimizer(offload="none", checkpointing=optimizer.checkpointing or optimizer.offload == "layers")
    if ema is None:
        return state
    return replace(state, start=replace(state.start, ema=replace(ema, device="same")))


@contextmanager
def _name_allocations(work: Workspace, counter: Allocations) -> Iterator[None]:
    """A context in which gradients and the optimizers' states are counted as such."""
    hooks = []
    for leaf in work.stepper.leaves.values():
        if leaf.requires_grad:
            hooks.append(leaf.register_post_accumulate_grad_hook(lambda p: counter.count(p.grad, GRADIENTS)))
    with ExitStack() as steps:
        for optimizer in work.stepper.optimizers:
            hooks.append(optimizer.register_step_pre_hook(lambda *_: steps.enter_context(counter.count_as(OPTIMIZER))))
            hooks.append(optimizer.register_step_post_hook(lambda *_: steps.close()))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def largest_batch(dataset: Dataset, batch_size: int) -> Dataset:
    """A dataset whose every batch is the largest that another one makes, with captions that do not vary.

    Args:
        dataset: the other one.
        batch_size: that of the run, for images without their own.
    """
    image = max(dataset.images, key=lambda image: _size(image) * (image.batch_size or batch_size))
    size = image.batch_size or batch_size
    count = size - regularization_count(dataset, size)
    image = replace(_keep_one_caption(image), repeats=1)
    regularization = None
    if dataset.regularization is not None:
        other = _keep_one_caption(max(dataset.regularization.images, key=_size))
        regularization = replace(dataset.regularization, images=(replace(other, repeats=1),) * size, workers=0)
    return replace(dataset, images=(image,) * count, regularization=regularization, workers=0)


def _keep_one_caption(image: DatasetImage) -> DatasetImage:
    """The image with the caption that is encoded already, so that a plan needs no text encoder."""
    return replace(image, caption_template=None)


def _size(image: DatasetImage) -> int:
    return math.prod(image.latent.shape)
