"""One training step: images, noise and timesteps are drawn from (seed, step), then the trained tensors are updated."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ...patches.token_downsampling.unet import TRAINING
from ...patches.token_routing.route import ROUTING
from ..data.batches import Batch
from ..distributed import fsdp, process_group
from ..memory.offload import to_device
from ..optimizers.learning_rate_schedule import rate_at
from ..optimizers.precision import LEAST_SCALE
from ..random_draws import generator as seeded_generator
from ..tasks.draws import Draws
from ..trainable import install, words
from .workspace import StepResult, Workspace


class Diverged(ArithmeticError):
    """The loss or the gradient is not finite; the tensors are those after the last good step."""


def batch_losses(work: Workspace, batch: Batch, generator: torch.Generator, options: dict[str, Any]) -> Tensor:
    """Losses (B,) of one group of pictures, with the graph that leads to the trained tensors."""
    return work.task.losses(work, batch, Draws(generator, options))


def backward_(work: Workspace) -> float:
    """Compute the gradients of the next step into `.grad` of the trained tensors; returns the loss.

    Every image of the step counts the same, however many are in its micro-batch: sizes and the end of an epoch make
    some of them small. With several ranks, each computes one micro-batch at a time, and all have the gradients of all
    of them in the end.
    """
    parts, total, ranks = work.start_state.settings.optimizer.accumulation, 0.0, work.gradients.size
    work.gradients.begin_step(work.step, parts)
    for first in range(0, parts, ranks):
        local_part = first + work.gradients.rank
        local_loss = 0.0
        if local_part < parts:
            reader = _ReadAtOnce(work)
            _backward_part(work, local_part, reader)
            local_loss = reader.total
        for loss in work.gradients.finish_round(min(ranks, parts - first), local_loss):
            total += loss
            if not math.isfinite(total):
                return total
    return total


def _backward_part(work: Workspace, part: int, take_loss: Callable[[Tensor], bool]) -> None:
    """Compute one micro-batch of the next step, with its gradients on their way to `work.gradients`.

    Each loss goes to `take_loss`, which says whether to go backward.
    """
    work.raise_if_interrupted()
    with work.set_purpose(f"part {part}"):
        _pass_groups(work, part, take_loss)


def _pass_groups(work: Workspace, part: int, take_loss: Callable[[Tensor], bool]) -> None:
    """Every group of a micro-batch, at every strength that is trained."""
    settings = work.start_state.settings
    groups = work.loader.take(work.step, part)
    strengths = work.task.strengths(work.dataset)
    count = work.loader.images_of(work.step) * len(strengths)
    passes = [(strength, number) for strength in strengths for number in range(len(groups))]
    for strength, number in passes:
        if number == 0:  # every strength gets the same noise
            generator = seeded_generator(work.start_state.start.seed, work.step, f"noise {work.purpose}")
        batch, options = groups[number], step_options(work, number)
        is_first, is_last = (strength, number) == passes[0], (strength, number) == passes[-1]
        with work.at_strength(strength):
            per_image = _weigh(work, batch, batch_losses(work, batch, generator, options))
            loss = per_image.sum() / count
            if not take_loss(loss.detach()):  # before fused_backward updates anything
                return
            stepping: AbstractContextManager[None] = nullcontext()
            if is_last and part == settings.optimizer.accumulation - 1:
                stepping = work.stepper.last_backward()
            with stepping, work.gradients.backward(is_first, is_last):
                _backward(work, loss)


def step_options(work: Workspace, group: int) -> dict[str, Any]:
    """What a group's forward pass tells patches of the model: where the run is, and the seed of their own draws."""
    draws = seeded_generator(work.start_state.start.seed, work.step, f"routing {work.purpose} {group}")
    total_steps = work.start_state.settings.optimizer.total_steps
    return {TRAINING: {"step": work.step, "total_steps": total_steps, ROUTING: draws.initial_seed()}}


class _ReadAtOnce:
    """Adds up the losses of a micro-batch, and waits for each: the backward pass needs to know that it is finite."""

    def __init__(self, work: Workspace) -> None:
        self.work, self.total = work, 0.0

    def __call__(self, loss: Tensor) -> bool:
        self.total += float(loss)
        if _may_go_backward(self.work, self.total):
            return True
        if math.isfinite(self.total):
            self.total = math.nan  # another rank's is not finite
        return False


class _ReadLater:
    """Keeps the losses of a micro-batch on the device, to be read together with the norm."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def __call__(self, loss: Tensor) -> bool:
        self.losses.append(loss)
        return True


def _weigh(work: Workspace, batch: Batch, per_image: Tensor) -> Tensor:
    """Losses (B,) times the weights of their images and of the prior."""
    objective = work.start_state.settings.objective
    if batch.weights is not None:
        per_image = per_image * to_device(batch.weights, per_image.device)
    if objective.prior == "none":
        return per_image
    regularization = to_device(batch.is_regularization, per_image.device)
    return torch.where(regularization, per_image * objective.prior_weight, per_image)


def _backward(work: Workspace, loss: Tensor) -> None:
    if _has_no_graph(work, loss):
        return
    if work.loss_scale is not None:
        loss = work.loss_scale.scale_loss(loss)
    loss.backward()


def _has_no_graph(work: Workspace, loss: Tensor) -> bool:
    """Whether module_dropout has dropped every module, or no caption has a word that is trained alone, so that there
    are no gradients.

    Ranks that shard a model go backward together, so there it is always false.
    """
    start = work.start_state.start
    may_be = start.adapter.module_dropout > 0 or (start.words is not None and start.words.alone)
    return not loss.requires_grad and may_be and not work.group.shard


def _may_go_backward(work: Workspace, loss: float) -> bool:
    """Whether the loss is finite; ranks that shard a model run the backward pass together or not at all."""
    if not isinstance(work.group, process_group.ProcessGroup) or not work.group.shard:
        return math.isfinite(loss)
    doing = fsdp.NOT_FINITE
    if math.isfinite(loss):
        doing = "backward"
    return fsdp.NOT_FINITE not in fsdp.check_same_pass(work.group, doing)


def advance_(work: Workspace) -> StepResult:
    """Make one step inside `installed()`.

    Raises Diverged when the loss or a gradient is not finite; the tensors are as they were, unless `is_consistent` says
    otherwise.
    """
    rate = rate_at(work.start_state.settings.optimizer, work.step)
    work.stepper.prepare(rate, work.step)
    for companion in work.companions.values():
        companion.prepare(work.step)
    if work.stepper.early:
        work.begin_moving()
    loss, norm = _gradients(work)
    if not all(math.isfinite(companion.finish_gradients()) for companion in work.companions.values()):
        norm = math.nan
    if not (math.isfinite(loss) and math.isfinite(norm)):
        work.drop_step(has_moved=math.isfinite(loss) and work.stepper.early)  # a loss is read before anything moves
        raise Diverged(f"Step {work.step + 1} has loss {loss} and gradient norm {norm}: training has diverged.")
    if not work.stepper.early:
        work.begin_moving()
    work.stepper.step_()
    for companion in work.companions.values():
        companion.step_()
    if work.loss_scale is not None:
        work.loss_scale.step_()
    install.limit_norms_(work.trained, work.start_state.start.adapter)
    words.limit_norms_(work.trained, work.start_state.start.words)
    result = StepResult(loss, rate, norm)
    work.finish_step(result)
    return result


def _gradients(work: Workspace) -> tuple[float, float]:
    """Compute and clip the gradients of the next step; returns the loss and the gradient norm.

    In fp16 a step that overflows is computed again with half the loss scale.
    """
    if _reads_later(work):
        return _read_gradients_together(work)
    loss = backward_(work)
    while work.loss_scale is not None and math.isfinite(loss) and not work.loss_scale.unscale_(work.trained):
        work.stepper.drop_gradients()
        if work.loss_scale.scale < LEAST_SCALE:
            raise Diverged(f"Step {work.step + 1} overflows in fp16 however the loss is scaled: use bf16 or float32.")
        loss = backward_(work)
    return loss, work.stepper.norm()


def _reads_later(work: Workspace) -> bool:
    """Whether nothing depends on the loss before the gradients are complete, so that the step waits only once."""
    is_alone = not isinstance(work.group, process_group.ProcessGroup)
    return is_alone and not work.stepper.early and work.loss_scale is None


def _read_gradients_together(work: Workspace) -> tuple[float, float]:
    """The same for one process: the device is waited for once, at the end."""
    parts = work.start_state.settings.optimizer.accumulation
    readers = []
    work.gradients.begin_step(work.step, parts)
    for part in range(parts):
        reader = _ReadLater()
        _backward_part(work, part, reader)
        work.gradients.finish_round(1, 0.0)
        readers.append(reader)
    norm, *numbers = work.stepper.norm_and([loss for reader in readers for loss in reader.losses])
    total = 0.0
    for reader in readers:  # added in the order of `backward_`
        count = len(reader.losses)
        total += sum(numbers[:count], 0.0)
        del numbers[:count]
    return total, norm
