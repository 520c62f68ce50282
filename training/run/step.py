"""One training step: images, noise and timesteps are drawn from (seed, step), then the trained tensors are updated."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ...patches.token_downsampling.unet import TRAINING
from ...patches.token_routing.route import ROUTING
from ..data.batches import Batch
from ..memory.offload import to_device
from ..optimizers.learning_rate_schedule import rate_at
from ..optimizers.precision import LEAST_SCALE
from ..random_draws import generator as seeded_generator
from ..tasks.draws import Draws
from ..trainable import install, words
from .loss_readers import LossReader, ReadAtOnce, ReadLater, reads_later
from .workspace import StepResult, Workspace


class Diverged(ArithmeticError):
    """The loss or the gradient is not finite; the tensors are those after the last good step."""


def batch_losses(work: Workspace, batch: Batch, generator: torch.Generator, options: dict[str, Any]) -> Tensor:
    """The losses of one group of pictures.

    Args:
        work: the run.
        batch: pictures of one size.
        generator: draws noise and noise levels, on the CPU.
        options: what patches of the model are told (`step_options`).

    Returns:
        Losses (B,), with the graph that leads to the trained tensors.
    """
    return work.task.losses(work, batch, Draws(generator, options))


def backward_(work: Workspace, reader: LossReader | None = None) -> float:
    """Compute the gradients of the next step into `.grad` of the trained tensors.

    Every image of the step counts the same, however many are in its micro-batch: sizes and the end of an epoch make
    some of them small. With several ranks, each computes one micro-batch at a time, and all have the gradients of all
    of them in the end.

    Args:
        work: the run.
        reader: takes the losses; without one each is read at once.

    Returns:
        The loss, as far as `reader` has read it. Not finite as soon as a micro-batch's is: what follows is then not
        computed.
    """
    reader = reader or ReadAtOnce(work)
    parts, total, ranks = work.start_state.settings.optimizer.accumulation, 0.0, work.gradients.size
    work.gradients.begin_step(work.step, parts)
    for first in range(0, parts, ranks):
        part = first + work.gradients.rank
        reader.begin_part()
        if part < parts:
            work.raise_if_interrupted()
            with work.set_purpose(f"part {part}"):
                _backward_part(work, part, reader)
        for loss in work.gradients.finish_round(min(ranks, parts - first), reader.part_loss):
            total += loss
            if not math.isfinite(total):
                return total
    return total


def _backward_part(work: Workspace, part: int, reader: LossReader) -> None:
    """Every group of pictures of a micro-batch, at every strength that is trained; the gradients are on their way to
    `work.gradients` afterward.

    The loss of a step is the mean over its N pictures and S strengths: each pass adds the sum of its losses / (N S).
    """
    groups, strengths = work.loader.take(work.step, part), work.task.strengths(work.dataset)
    count = work.loader.images_of(work.step) * len(strengths)
    passes = [(strength, number) for strength in strengths for number in range(len(groups))]
    is_last_part = part == work.start_state.settings.optimizer.accumulation - 1
    for strength, number in passes:
        if number == 0:  # every strength gets the same noise
            generator = seeded_generator(work.start_state.start.seed, work.step, f"noise {work.purpose}")
        batch, options = groups[number], step_options(work, number)
        is_first, is_last = (strength, number) == passes[0], (strength, number) == passes[-1]
        with work.at_strength(strength):
            loss = _weigh(work, batch, batch_losses(work, batch, generator, options)).sum() / count
            if not reader.take(loss.detach()):  # before fused_backward updates anything
                return
            moves = work.stepper.last_backward() if is_last and is_last_part else nullcontext()
            with moves, work.gradients.backward(is_first, is_last):
                _backward(work, loss)


def step_options(work: Workspace, group: int) -> dict[str, Any]:
    """What a group's forward pass tells patches of the model: where the run is, and the seed of their own draws.

    Args:
        work: the run.
        group: the number of the group in its micro-batch.
    """
    draws = seeded_generator(work.start_state.start.seed, work.step, f"routing {work.purpose} {group}")
    total_steps = work.start_state.settings.optimizer.total_steps
    return {TRAINING: {"step": work.step, "total_steps": total_steps, ROUTING: draws.initial_seed()}}


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


def advance_(work: Workspace) -> StepResult:
    """Make one step inside `work.install()`.

    Args:
        work: the run, whose tensors change.

    Returns:
        Loss, learning rate, and the norm of the gradients before they are clipped.

    Raises:
        Diverged: where the loss or a gradient is not finite; the tensors are as they were, unless `work.is_consistent`
            says otherwise.
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
    if reads_later(work):
        reader = ReadLater()
        backward_(work, reader)
        norm, *numbers = work.stepper.norm_and(reader.losses)
        return reader.add_up(numbers), norm
    loss = backward_(work)
    while work.loss_scale is not None and math.isfinite(loss) and not work.loss_scale.unscale_(work.trained):
        work.stepper.drop_gradients()
        if work.loss_scale.scale < LEAST_SCALE:
            raise Diverged(f"Step {work.step + 1} overflows in fp16 however the loss is scaled: use bf16 or float32.")
        loss = backward_(work)
    return loss, work.stepper.norm()
