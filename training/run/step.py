"""One training step: images, noise and timesteps are drawn from (seed, step), then the trained tensors are updated."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...patches.token_downsampling.unet import TRAINING
from ...patches.token_routing.route import ROUTING
from ..data.batches import Batch
from ..data.parts import Parts
from ..data.sliders import strengths_of
from ..distributed import fsdp, process_group
from ..memory.offload import to_device
from ..objective import preference
from ..objective.loss import losses
from ..objective.noise import noise_like, perturbation
from ..objective.timesteps import NO_EXPERT, draw_expert_levels, draw_timesteps, levels_at, tokens_of
from ..optimizers.learning_rate_schedule import rate_at
from ..optimizers.precision import LEAST_SCALE, autocast
from ..random_draws import generator as seeded_generator
from ..trainable import install, words
from . import autoencoder
from .slider_step import slider_losses, without_routing
from .workspace import StepResult, Workspace


class Diverged(ArithmeticError):
    """The loss or the gradient is not finite; the tensors are those after the last good step."""


class _Draws(NamedTuple):
    """What is drawn for latents (B, C, …, h, w): noise levels (B,), noise, and the noise of input perturbation."""

    sigma: Tensor
    noise: Tensor
    extra: Tensor | None

    def twice(self) -> _Draws:
        """The same draws for the worse pictures of pairs, behind those for the better ones."""
        extra = self.extra
        if extra is not None:
            extra = torch.cat([extra, extra])
        return _Draws(torch.cat([self.sigma, self.sigma]), torch.cat([self.noise, self.noise]), extra)


def batch_losses(work: Workspace, batch: Batch, generator: torch.Generator, options: dict[str, Any]) -> Tensor:
    """Losses (B,) of one group of pictures, with the graph that leads to the trained tensors."""
    if autoencoder.settings_of(work) is not None:
        return autoencoder.batch_losses(work, batch, generator)
    objective = work.start_state.settings.objective
    clean = _clean(work, batch.at_strength(work.strength))
    draws = _drawn(work, clean, generator, batch.parts)
    if batch.directions is not None:
        return slider_losses(work, batch, clean, draws.noise, draws.sigma, options)
    if objective.compares_pairs:
        return _pair_losses(work, batch, clean, draws, options)
    x, target = _noisy(work, clean, draws)
    if objective.prior == "output-preservation" and batch.is_regularisation.any():
        target = _base_predictions(work, batch, x, draws.sigma, target, options)
    return _errors(work, batch, x, target, draws.sigma, options)


def _clean(work: Workspace, latents: Tensor) -> Tensor:
    return work.denoiser.process_in(to_device(latents, work.denoiser.device, torch.float32))


def _drawn(work: Workspace, clean: Tensor, generator: torch.Generator, parts: Parts) -> _Draws:
    objective = work.start_state.settings.objective
    shape = parts[0] if parts else clean.shape[1:]
    sigma = _noise_levels(work, len(clean), tokens_of(shape), generator)
    noise = noise_like(clean, objective.offset_noise, objective.pyramid_noise, generator, parts)
    noise = to_device(noise, clean.device)
    if not objective.ip_noise:
        return _Draws(sigma, noise, None)
    extra = objective.ip_noise * to_device(torch.randn(clean.shape, generator=generator), clean.device)
    return _Draws(sigma, noise, extra)


def _noisy(work: Workspace, clean: Tensor, draws: _Draws) -> tuple[Tensor, Tensor]:
    """(what the network sees, the latents that it should denoise to)."""
    denoiser = work.denoiser
    sigma, noise, extra = draws
    target = clean
    if extra is not None:
        target = clean + perturbation(denoiser.prediction, sigma).view(-1, *[1] * (clean.ndim - 1)) * extra
        noise = noise + extra
    return denoiser.noisy(clean, noise, sigma), target


def _errors(work: Workspace, batch: Batch, x: Tensor, target: Tensor, sigma: Tensor, options: dict[str, Any]) -> Tensor:
    """The weighted errors (B,) of the model as it is now."""
    with autocast(work.start_state.settings.optimizer, work.denoiser):
        denoised = work.denoiser.denoise(x, sigma, work.encoded(batch.captions, batch.conditionings), options)
    return _measured(work, batch, denoised, target, sigma)


def _measured(work: Workspace, batch: Batch, denoised: Tensor, target: Tensor, sigma: Tensor) -> Tensor:
    denoiser = work.denoiser
    mask = None
    if batch.mask is not None:
        mask = to_device(batch.mask, denoiser.device)
    objective = work.start_state.settings.objective
    return losses(objective, denoiser.prediction, denoised, target, sigma, mask, batch.parts)


def _pair_losses(work: Workspace, batch: Batch, clean: Tensor, draws: _Draws, options: dict[str, Any]) -> Tensor:
    """The losses (B,) of preference pairs, whose better pictures these latents are."""
    assert batch.worse is not None
    clean = torch.cat([clean, _clean(work, batch.worse)])
    draws, both = draws.twice(), _both_of_pairs(batch)
    x, target = _noisy(work, clean, draws)
    with work.plain(), autocast(work.start_state.settings.optimizer, work.denoiser):
        base = work.denoiser.denoise(x, draws.sigma, both.conditionings, options)
    reference = _measured(work, both, base, target, draws.sigma)
    errors = _errors(work, both, x, target, draws.sigma, options)
    beta = work.start_state.settings.objective.beta
    return preference.pair_losses(beta, preference.margins(errors, reference))


def _both_of_pairs(batch: Batch) -> Batch:
    """The captions and masks of pairs twice: for the better pictures, then for the worse ones."""
    mask = batch.mask
    if mask is not None:
        mask = torch.cat([mask, mask])
    return replace(batch, conditionings=batch.conditionings * 2, captions=batch.captions * 2, mask=mask)


def _noise_levels(work: Workspace, count: int, tokens: int, generator: torch.Generator) -> Tensor:
    """Noise levels (B,) for so many latents of so many tokens, on the model's device."""
    denoiser, objective = work.denoiser, work.start_state.settings.objective
    if objective.expert != NO_EXPERT:
        return to_device(draw_expert_levels(objective, count, generator, tokens, denoiser.sigma), denoiser.device)
    drawn = to_device(draw_timesteps(objective, count, generator, tokens, denoiser.sigma), denoiser.device)
    return levels_at(objective, drawn, denoiser.sigma)


def _base_predictions(
    work: Workspace, batch: Batch, x: Tensor, sigma: Tensor, target: Tensor, options: dict[str, Any]
) -> Tensor:
    """Output preservation: replace the target of regularization images by what the model predicts without the trained
    tensors.
    """
    rows = batch.is_regularisation.nonzero().flatten()
    conditionings = [batch.conditionings[i] for i in rows.tolist()]
    rows = to_device(rows, x.device)
    options = without_routing(options)
    with work.plain(), autocast(work.start_state.settings.optimizer, work.denoiser):
        base = work.denoiser.denoise(x[rows], sigma[rows], conditionings, options)
    return target.index_copy(0, rows, base.to(target))


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
    work.purpose = ""
    return total


def _backward_part(work: Workspace, part: int, take_loss: Callable[[Tensor], bool]) -> None:
    """Compute one micro-batch of the next step, with its gradients on their way to `work.gradients`.

    Each loss goes to `take_loss`, which says whether to go backward.
    """
    work.raise_if_interrupted()
    settings = work.start_state.settings
    work.purpose = f"part {part}"
    groups = work.loader.take(work.step, part)
    strengths = strengths_of(work.dataset)
    count = work.loader.images_of(work.step) * len(strengths)
    passes = [(strength, number) for strength in strengths for number in range(len(groups))]
    for strength, number in passes:
        if number == 0:  # every strength gets the same noise
            generator = seeded_generator(work.start_state.start.seed, work.step, f"noise {work.purpose}")
        batch, options = groups[number], step_options(work, number)
        is_first, is_last = (strength, number) == passes[0], (strength, number) == passes[-1]
        with work.at_strength(strength):
            per_image = _weighted(work, batch, batch_losses(work, batch, generator, options))
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


def _weighted(work: Workspace, batch: Batch, per_image: Tensor) -> Tensor:
    """Losses (B,) times the weights of their images and of the prior."""
    objective = work.start_state.settings.objective
    if batch.weights is not None:
        per_image = per_image * to_device(batch.weights, per_image.device)
    if objective.prior == "none":
        return per_image
    regularisation = to_device(batch.is_regularisation, per_image.device)
    return torch.where(regularisation, per_image * objective.prior_weight, per_image)


def _backward(work: Workspace, loss: Tensor) -> None:
    if _has_no_graph(work, loss):
        return
    if work.loss_scale is not None:
        loss = work.loss_scale.scaled(loss)
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
    if work.discriminator is not None:
        work.discriminator.prepare(work.step)
    if work.stepper.early:
        _begin_moving(work)
    loss, norm = _gradients(work)
    if work.discriminator is not None and not math.isfinite(work.discriminator.finish_gradients()):
        norm = math.nan
    if not (math.isfinite(loss) and math.isfinite(norm)):
        work.stepper.drop_gradients()
        if not math.isfinite(loss):  # checked before anything is updated
            work.is_consistent = True
        raise Diverged(f"Step {work.step + 1} has loss {loss} and gradient norm {norm}: training has diverged.")
    if not work.stepper.early:
        _begin_moving(work)
    work.stepper.step_()
    if work.discriminator is not None:
        work.discriminator.step_()
    if work.loss_scale is not None:
        work.loss_scale.step_()
    install.limit_norms_(work.trained, work.start_state.start.adapter)
    words.limit_norms_(work.trained, work.start_state.start.words)
    work.step += 1
    _average_(work)
    result = StepResult(loss, rate, norm)
    work.results.append(result)
    work.is_consistent = True
    return result


def _begin_moving(work: Workspace) -> None:
    work.is_consistent = False
    for shadow in work.shadows:
        shadow.protect()


def _gradients(work: Workspace) -> tuple[float, float]:
    """Compute and clip the gradients of the next step; returns the loss and the gradient norm.

    In fp16 a step that overflows is computed again with half the loss scale.
    """
    if _reads_later(work):
        return _gradients_read_together(work)
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


def _gradients_read_together(work: Workspace) -> tuple[float, float]:
    """The same for one process: the device is waited for once, at the end."""
    parts = work.start_state.settings.optimizer.accumulation
    readers = []
    work.gradients.begin_step(work.step, parts)
    for part in range(parts):
        reader = _ReadLater()
        _backward_part(work, part, reader)
        work.gradients.finish_round(1, 0.0)
        readers.append(reader)
    work.purpose = ""
    norm, *numbers = work.stepper.norm_and([loss for reader in readers for loss in reader.losses])
    total = 0.0
    for reader in readers:  # added in the order of `backward_`
        count = len(reader.losses)
        total += sum(numbers[:count], 0.0)
        del numbers[:count]
    return total, norm


def _average_(work: Workspace) -> None:
    """Updates the averages with this step's weights; every `switch_every` steps sets the weights to the average."""
    ema, total = work.start_state.start.ema, work.start_state.settings.optimizer.total_steps
    if ema is None:
        return
    if work.shadow is not None:
        work.shadow.update_(work.trained, ema, work.step, total)
    for settings, shadow in work.powers:
        shadow.update_(work.trained, settings, work.step, total)
    if ema.switch_every and work.step % ema.switch_every == 0:
        for _, shadow in work.powers:
            shadow.protect()
        if work.shadow is not None:
            work.shadow.switch_(work.trained)
        work.group.broadcast_(work.trained)
