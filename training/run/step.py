"""One training step: pictures, noise and timesteps are drawn from (seed, step), and the tensors of a workspace move."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...ema.decay import EMASettings
from ...ema.shadow import Shadow
from ..data.batches import Batch, with_size_conditioning
from ..data.dataset import Conditioning, Dataset
from ..distributed import fsdp, gradient_sum, process_group
from ..distributed.placement import RowSharded, placement_for
from ..memory.checkpointing import checkpointed
from ..memory.inference_tensors import as_normal_tensors
from ..memory.offload import activations_on_host, layers_on_host, to_device
from ..objective.denoiser import Denoiser
from ..objective.loss import losses
from ..objective.noise import LAST_SIGNAL, noise_like, perturbation
from ..objective.settings import check_for
from ..objective.timesteps import draw_timesteps
from ..optimizers.learning_rate_schedule import rate_at
from ..optimizers.precision import LEAST_SCALE, LossScale, autocast
from ..optimizers.stepper import OptimizerStepper
from ..random_draws import generator
from ..state import History, RunCost, TrainState, advance_position
from ..trainable import install
from .batch_loader import BatchLoader, BatchSchedule
from .out_of_memory import used

VALIDATION_DRAWS = 4  # noise levels a held-out picture
VALIDATION_PICTURES = 64


class Diverged(ArithmeticError):
    """The loss or the gradient is not finite; the tensors are those after the last good step."""


@dataclass(frozen=True)
class StepResult:
    """What one step measured."""

    loss: float
    rate: float
    norm: float
    seconds: float = 0.0


def check(state: TrainState, denoiser: Denoiser, dataset: Dataset, group: process_group.SingleProcess) -> None:
    """Raise ValueError when the state's objective does not fit the model or the pictures."""
    objective = state.settings.objective
    check_for(objective, denoiser.prediction)
    if state.settings.optimizer.fused_backward and group.size > 1:
        raise ValueError(
            "GraftOptimizer: fused_backward moves a weight before the ranks can add up their gradients: set it to off."
        )
    if group.shard:
        fsdp.check(state, group)
    if state.start.adapter.text_encoder and denoiser.text_encoder is None:
        raise ValueError("GraftAdapter: text_encoder is on, and there is no text encoder to train: connect clip.")
    if objective.prior != "none" and dataset.regularisation is None:
        raise ValueError(f"GraftObjective: prior {objective.prior} needs a regularisation dataset on GraftDataset.")
    if (
        objective.zero_terminal_snr
        and float(denoiser.sigma(torch.tensor([1 - 2**-24], device=denoiser.device))) ** -2 > 2 * LAST_SIGNAL
    ):
        raise ValueError(
            "GraftObjective: zero_terminal_snr, and the model's noise levels end with signal: rescale them"
            " (zero_terminal)."
        )


class Workspace:
    """Live copies of a state's tensors on the model's device, which steps move in place; `state()` freezes them again.

    The steps are those of a `group` of ranks that all have such a workspace; without one, of this process.
    """

    def __init__(
        self, state: TrainState, denoiser: Denoiser, dataset: Dataset, group: process_group.SingleProcess | None = None
    ) -> None:
        self.group = group or process_group.SingleProcess()
        check(state, denoiser, dataset, self.group)
        self.begun, self.denoiser, self.dataset = state, denoiser, dataset
        self.loader = BatchLoader(
            BatchSchedule.of(state, dataset), dataset.workers, every=(self.group.rank, self.group.size)
        )
        device = denoiser.device
        settings = state.settings.optimizer
        self.placement = placement = placement_for(state, self.group)
        self.stepper = OptimizerStepper(
            settings,
            placement.local(state.trained),
            placement.local(state.optimizer),
            device,
            state.start.seed,
            partial(placement.norm, device=device) if isinstance(placement, RowSharded) else None,
        )
        self.trained = self.stepper.trained
        self.gradients = gradient_sum.for_group(self.group, self.trained, placement.is_sharded)
        self.scale: LossScale | None = None
        if settings.precision == "fp16":
            self.scale = LossScale(device, state.optimizer)
        self.shadow: Shadow | None = None
        self.powers: list[tuple[EMASettings, Shadow]] = []  # power-function averages that snapshots are taken of
        ema = state.start.ema
        if ema is not None and (
            self.group.is_main_process or placement.is_sharded
        ):  # each number of the averages is kept once
            self.shadow = Shadow.beside(placement.local(state.average), state.step, self.trained, device, ema.device)
            for number, width in enumerate(ema.widths if ema.snapshots else ()):
                average = {name: state.powers[f"{number}/{name}"] for name in state.trained}
                own = replace(ema, schedule="power", widths=(width,), snapshots=0)
                self.powers.append((own, Shadow.beside(average, state.step, self.trained, device, ema.device)))
        self.step = state.step
        self.whole = (
            True  # False while a step is moving the tensors: an interruption there leaves nothing worth keeping
        )
        self.kept = state.step
        self.seconds = 0.0
        self.measured: list[StepResult] = []
        self.validation: list[tuple[int, float]] = []
        # Before the trained tensors are installed: differences of whole weights are taken from the model's own.
        self.base: Mapping[str, Tensor] | None = None
        if self.powers and state.base is not None and state.start.adapter.full_weights:
            self.base = state.base()
        self.attached = ExitStack()  # holds the trained tensors on the model
        self.before_encoding: Callable[[], None] = lambda: None
        self.purpose = ""  # what runs now: a micro-batch of the step, or "" outside training

    def moment(self) -> tuple[int, int, str]:
        """(seed, step, purpose) of the forward that runs now."""
        return self.begun.start.seed, self.step, self.purpose

    @contextmanager
    def installed(self) -> Iterator[None]:
        """For the block the model computes with the trained tensors; it is as before afterwards, whatever happens."""
        settings, module = self.begun.settings.optimizer, self.denoiser.module
        # Weights that are fetched from the host block by block must not be kept for the backward pass: they are fetched
        # again.
        forgetful: AbstractContextManager[None] = nullcontext()
        if settings.checkpointing or settings.offload == "layers":
            forgetful = checkpointed(module)
        away: AbstractContextManager[None] = nullcontext()
        if settings.offload == "activations":
            away = activations_on_host(module)
        elif settings.offload == "layers":
            away = layers_on_host(module, self.denoiser.device)
        with away, forgetful, torch.enable_grad(), self._divided(), self.attached:
            self._attach()
            yield

    @contextmanager
    def _divided(self) -> Iterator[None]:
        """For the block the ranks hold the base weights together, where that was asked for and adapters are trained
        beside them.
        """
        with ExitStack() as stack:
            if self.group.shard and not self.placement.is_sharded:
                stack.enter_context(as_normal_tensors(self.denoiser.module))
                stack.enter_context(fsdp.sharded(self.denoiser.module, self.denoiser.device, self.group))
            yield

    def _attach(self) -> None:
        adapter, denoiser = self.begun.start.adapter, self.denoiser
        if self.placement.is_sharded:
            whole = fsdp.sharded_trainable(
                denoiser.module, self.begun.trained, self.trained, denoiser.device, self.group
            )
            self.gradients.attach(*self.attached.enter_context(whole))
            return
        if adapter.text_encoder:
            text_encoder = denoiser.text_encoder
        else:
            text_encoder = None
        attached = install.attached(denoiser.module, adapter, self.trained, self.moment, text_encoder)
        self.before_encoding = self.attached.enter_context(attached)

    def encoded(self, captions: Sequence[str], known: Sequence[Conditioning]) -> Sequence[Conditioning]:
        """Conditionings of captions: the dataset's, or what the text encoder makes of them now where it is trained."""
        if not self.begun.start.adapter.text_encoder:
            return known
        assert self.denoiser.encode is not None
        self.before_encoding()
        return self.denoiser.encode(captions, known)

    @contextmanager
    def plain(self) -> Iterator[None]:
        """For the block, inside `installed()`, the model computes without the trained tensors and without gradients."""
        self.attached.close()
        try:
            with torch.no_grad():
                yield
        finally:
            self._attach()

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and held-out loss of the best validation so far."""
        history = self.begun.history
        return replace(history, validation=history.validation + tuple(self.validation)).best

    @property
    def shadows(self) -> list[Shadow]:
        """Every average that runs along."""
        return [*([] if self.shadow is None else [self.shadow]), *(shadow for _, shadow in self.powers)]

    def finish(self) -> None:
        """Wait for averages that move in host memory."""
        for shadow in self.shadows:
            shadow.finish()

    def close(self) -> None:
        """End what runs beside the steps."""
        self.loader.close()
        for shadow in self.shadows:
            shadow.close()

    def place(self) -> TrainState:
        """Where the workspace stands, as a state without tensors."""
        position = advance_position(self.begun.position, self.begun.settings.digest, self.step - self.begun.step)
        return replace(self.begun, trained={}, optimizer={}, average={}, powers={}, step=self.step, position=position)

    def as_lora(self, shadow: Shadow) -> dict[str, Tensor]:
        """An average as a LORA_MODEL on the CPU."""
        shadow.finish()
        return install.as_lora(shadow.tensors, self.begun.start.adapter, self.base)

    def state(self, own: bool = False) -> TrainState:
        """The workspace as an immutable state: everything is copied to the CPU. Where ranks hold it together, all of
        them do this, unless it is for what this rank has of the tensors, its `own`.
        """
        begun, history, whole = self.begun, self.begun.history, dict if own else self.placement.gather
        done = self.step - begun.step
        self.finish()
        if self.shadow is None:
            average = {}
        else:
            average = {name: t.detach().to("cpu", copy=True) for name, t in self.shadow.tensors.items()}
        powers = {
            f"{number}/{name}": t.detach().to("cpu", copy=True)
            for number, (_, shadow) in enumerate(self.powers)
            for name, t in shadow.tensors.items()
        }
        return replace(
            begun,
            trained=whole(self.stepper.sampled()),
            optimizer={**whole(self.stepper.state()), **({} if self.scale is None else self.scale.state())},
            average=whole(average),
            powers=powers,
            step=self.step,
            position=advance_position(begun.position, begun.settings.digest, done),
            cost=RunCost(begun.cost.seconds + self.seconds, max(begun.cost.memory, used(self.denoiser.device))),
            history=History(
                history.loss + tuple(m.loss for m in self.measured),
                history.rate + tuple(m.rate for m in self.measured),
                history.norm + tuple(m.norm for m in self.measured),
                history.validation + tuple(self.validation),
                history.outdated,
            ),
        )


def _batch_losses(work: Workspace, batch: Batch, draws: torch.Generator, options: dict[str, Any]) -> Tensor:
    """Losses (B,) of one group of pictures, with the graph that leads to the trained tensors."""
    denoiser, objective = work.denoiser, work.begun.settings.objective
    clean = denoiser.process_in(to_device(batch.latents, denoiser.device, torch.float32))
    sigma = denoiser.sigma(draw_timesteps(objective, clean.shape[0], draws).to(denoiser.device))
    noise = noise_like(clean, objective.offset_noise, objective.pyramid_noise, draws)
    target = clean
    if objective.ip_noise:
        extra = objective.ip_noise * torch.randn(clean.shape, generator=draws).to(clean.device)
        target = clean + perturbation(denoiser.prediction, sigma).view(-1, *[1] * (clean.ndim - 1)) * extra
        noise = noise + extra
    x = denoiser.noisy(clean, noise, sigma)
    if objective.prior == "output-preservation" and batch.is_regularisation.any():
        target = _preserving(work, batch, x, sigma, target, options)
    with autocast(work.begun.settings.optimizer, work.denoiser.device):
        denoised = denoiser.denoise(x, sigma, work.encoded(batch.captions, batch.conditionings), options)
    if batch.mask is None:
        mask = None
    else:
        mask = batch.mask.to(denoiser.device)
    return losses(objective, denoiser.prediction, denoised, target, sigma, mask)


def _preserving(
    work: Workspace, batch: Batch, x: Tensor, sigma: Tensor, target: Tensor, options: dict[str, Any]
) -> Tensor:
    """`target` where regularisation pictures have what the model says without the trained tensors (differential output
    preservation).
    """
    which = batch.is_regularisation.nonzero().flatten()
    conditionings = [batch.conditionings[i] for i in which.tolist()]
    which = which.to(x.device)
    with work.plain(), autocast(work.begun.settings.optimizer, work.denoiser.device):
        own = work.denoiser.denoise(x[which], sigma[which], conditionings, options)
    return target.index_copy(0, which, own.to(target))


def backward_(work: Workspace) -> float:
    """Gradients of the next step into `.grad` of the trained tensors; the loss. Every micro-batch weighs the same, and
    in it every picture: those of one that a round's end has cut short weigh more.

    Of several ranks each computes one part at a time, and all have the gradients of all parts in the end.
    """
    parts, total, ranks = work.begun.settings.optimizer.accumulation, 0.0, work.gradients.size
    work.gradients.begin_step(work.step, parts)
    for first in range(0, parts, ranks):
        mine, count = first + work.gradients.rank, min(ranks, parts - first)
        if mine < parts:
            loss = _part(work, mine)
        else:
            loss = 0.0
        for one in work.gradients.finish_round(count, loss):
            total += one
            if not math.isfinite(total):
                return total
    work.purpose = ""
    return total


def _part(work: Workspace, part: int) -> float:
    """The loss of one micro-batch of the next step, with its gradients on their way to `work.gradients`."""
    start, settings = work.begun.start, work.begun.settings
    options = {"graft_training": {"step": work.step, "total_steps": settings.optimizer.total_steps}}
    work.purpose = f"part {part}"
    groups = work.loader.take(work.step, part)
    count = sum(len(batch.conditionings) for batch in groups)
    draws, total = generator(start.seed, work.step, f"noise {work.purpose}"), 0.0
    for batch in groups:
        each = _batch_losses(work, batch, draws, options)
        if batch.weights is not None:
            each = each * batch.weights.to(each.device)
        if settings.objective.prior != "none":
            each = torch.where(batch.is_regularisation.to(each.device), each * settings.objective.prior_weight, each)
        loss = each.sum() / (count * settings.optimizer.accumulation)
        total += float(loss.detach())
        if not _finite(work, total):
            return total if not math.isfinite(total) else math.nan  # before fused_backward moves anything
        last = batch is groups[-1]
        early: AbstractContextManager[None] = nullcontext()
        if last and part == settings.optimizer.accumulation - 1:
            early = work.stepper.last_backward()
        with early, work.gradients.backward(batch is groups[0], last):
            if not _left_out(work, loss):
                (loss if work.scale is None else work.scale.scaled(loss)).backward()
    return total


def _left_out(work: Workspace, loss: Tensor) -> bool:
    """Whether module_dropout has left out every module, so that there are no gradients; ranks that divide a model go
    backward together.
    """
    return not loss.requires_grad and work.begun.start.adapter.module_dropout > 0 and not work.group.shard


def _finite(work: Workspace, loss: float) -> bool:
    """Whether the backward pass may run; ranks that hold a model together run it together or not at all."""
    if not isinstance(work.group, process_group.ProcessGroup) or not work.group.shard:
        return math.isfinite(loss)
    if math.isfinite(loss):
        doing = "backward"
    else:
        doing = fsdp.NOT_FINITE
    return fsdp.NOT_FINITE not in fsdp.check_same_pass(work.group, doing)


def advance_(work: Workspace) -> StepResult:
    """Make one step inside `installed()`.

    Raises Diverged when the loss or a gradient is not finite; the tensors are as they were, unless `whole` says
    otherwise.
    """
    rate = rate_at(work.begun.settings.optimizer, work.step)
    work.stepper.prepare(rate, work.step)
    if work.stepper.early:
        _begin_moving_(work)
    loss, norm = _gradients(work)
    if not (math.isfinite(loss) and math.isfinite(norm)):
        work.stepper.drop_gradients()
        work.whole = work.whole or not math.isfinite(loss)  # a loss that is not finite is seen before anything moves
        raise Diverged(f"Step {work.step + 1} has loss {loss} and gradient norm {norm}: training has diverged.")
    if not work.stepper.early:
        _begin_moving_(work)
    work.stepper.step_()
    install.limit_norms_(work.trained, work.begun.start.adapter)
    work.step += 1
    _average_(work)
    moved = StepResult(loss, rate, norm)
    work.measured.append(moved)
    work.whole = True
    return moved


def _begin_moving_(work: Workspace) -> None:
    work.whole = False
    for shadow in work.shadows:
        shadow.protect()


def _gradients(work: Workspace) -> tuple[float, float]:
    """Loss and norm of the next step's gradients, clipped. In fp16 a step that overflows is computed again with half
    the loss scale.
    """
    loss = backward_(work)
    while work.scale is not None and math.isfinite(loss) and not work.scale.unscale_(work.trained):
        work.stepper.drop_gradients()
        if work.scale.scale < LEAST_SCALE:
            raise Diverged(f"Step {work.step + 1} overflows in fp16 however the loss is scaled: use bf16 or float32.")
        loss = backward_(work)
    return loss, work.stepper.norm()


def _average_(work: Workspace) -> None:
    """The averages take in the weights of the step that was just made; now and then the weights are set
    to the average.
    """
    ema, total = work.begun.start.ema, work.begun.settings.optimizer.total_steps
    if ema is None:
        return
    if work.shadow is not None:
        work.shadow.update_(work.trained, ema, work.step, total)
    for own, shadow in work.powers:
        shadow.update_(work.trained, own, work.step, total)
    if ema.switch_every and work.step % ema.switch_every == 0:
        for _, shadow in work.powers:
            shadow.protect()
        if work.shadow is not None:
            work.shadow.switch_(work.trained)
        work.group.broadcast_(work.trained)


@torch.no_grad()
def validate(work: Workspace) -> float | None:
    """Mean loss of the held-out pictures at noise and timesteps that never change (plain weights, no dropout); None
    without any.
    """
    pictures = work.dataset.held_out[:VALIDATION_PICTURES]
    if not pictures:
        return None
    denoiser, objective = work.denoiser, work.begun.settings.objective
    found = []
    for number, picture in enumerate(pictures):
        draws = generator(work.begun.start.seed, number, "validation")
        latents = picture.latent[None].expand(VALIDATION_DRAWS, *picture.latent.shape)
        clean = denoiser.process_in(latents.to(denoiser.device, torch.float32))
        sigma = denoiser.sigma(
            ((torch.arange(VALIDATION_DRAWS) + torch.rand((), generator=draws)) / VALIDATION_DRAWS).to(denoiser.device)
        )
        noise = torch.randn(clean.shape, generator=draws).to(denoiser.device)
        with work.stepper.evaluated(), autocast(work.begun.settings.optimizer, work.denoiser.device):
            (conditioning,) = work.encoded(
                [picture.caption],
                [with_size_conditioning(work.dataset.conditionings[picture.caption], picture.framing)],
            )
            conditionings = (conditioning,) * VALIDATION_DRAWS
            denoised = denoiser.denoise(
                denoiser.noisy(clean, noise, sigma), sigma, conditionings, {"graft_evaluating": True}
            )
        if picture.mask is None:
            mask = None
        else:
            mask = picture.mask[None].to(denoiser.device)
        found.append(losses(objective, denoiser.prediction, denoised, clean, sigma, mask).mean())
    return float(torch.stack(found).mean())
