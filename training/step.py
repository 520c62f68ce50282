"""One training step: pictures, noise and timesteps are drawn from (seed, step), and the tensors of a workspace move."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..ema.schedule import EMASettings
from ..ema.shadow import Shadow
from . import adapters, optimizer
from .checkpointing import checkpointed
from .dataset import Batch, Dataset, batches
from .draws import generator
from .noise import LAST_SIGNAL, noise_like, perturbation
from .objective import Denoiser, check_for, losses, shares
from .state import History, TrainState, advanced

VALIDATION_DRAWS = 4  # noise levels a held-out picture
VALIDATION_PICTURES = 64


class Diverged(ArithmeticError):
    """The loss or the gradient is not finite; the tensors are those after the last good step."""


@dataclass(frozen=True)
class Moved:
    """What one step measured."""

    loss: float
    rate: float
    norm: float


def check(state: TrainState, denoiser: Denoiser, dataset: Dataset) -> None:
    """Raise ValueError when the state's objective does not fit the model or the pictures."""
    objective = state.settings.objective
    check_for(objective, denoiser.prediction)
    if objective.prior != "none" and dataset.regularisation is None:
        raise ValueError(f"GraftObjective: prior {objective.prior} needs a regularisation dataset on GraftDataset.")
    if objective.zero_terminal_snr and float(denoiser.sigma(torch.tensor([1 - 2**-24], device=denoiser.device))) ** -2 > 2 * LAST_SIGNAL:
        raise ValueError("GraftObjective: zero_terminal_snr, and the model's noise levels end with signal: rescale them (zero_terminal).")


class Workspace:
    """Live copies of a state's tensors on the model's device, which steps move in place; `state()` freezes them again."""

    def __init__(self, state: TrainState, denoiser: Denoiser, dataset: Dataset) -> None:
        check(state, denoiser, dataset)
        self.begun, self.denoiser, self.dataset = state, denoiser, dataset
        device = denoiser.device
        self.trained = {name: t.to(device, torch.float32, copy=True).requires_grad_() for name, t in state.trained.items()}
        self.optimizer = optimizer.build(state.settings.optimizer, self.trained, state.optimizer)
        self.shadow: Shadow | None = None
        self.powers: list[tuple[EMASettings, Shadow]] = []  # power-function averages that snapshots are taken of
        ema = state.start.ema
        if ema is not None:
            self.shadow = Shadow.beside(state.average, state.step, self.trained, device, ema.device)
            for number, width in enumerate(ema.widths if ema.snapshots else ()):
                average = {name: state.powers[f"{number}/{name}"] for name in state.trained}
                own = replace(ema, schedule="power", widths=(width,), snapshots=0)
                self.powers.append((own, Shadow.beside(average, state.step, self.trained, device, ema.device)))
        self.step = state.step
        self.whole = True  # False while a step is moving the tensors: an interruption there leaves nothing worth keeping
        self.kept = state.step
        self.measured: list[Moved] = []
        self.validation: list[tuple[int, float]] = []
        # Before the trained tensors are installed: differences of whole weights are taken from the model's own.
        self.base = state.base() if self.powers and state.base is not None and state.start.adapter.kind == "full" else None
        self.attached = ExitStack()  # holds the trained tensors on the model
        self.purpose = ""  # what runs now: a micro-batch of the step, or "" outside training

    def moment(self) -> tuple[int, int, str]:
        """(seed, step, purpose) of the forward that runs now."""
        return self.begun.start.seed, self.step, self.purpose

    @contextmanager
    def installed(self) -> Iterator[None]:
        """For the block the model computes with the trained tensors; it is as before afterwards, whatever happens."""
        settings, module = self.begun.settings.optimizer, self.denoiser.module
        forgetful = checkpointed(module) if settings.checkpointing else nullcontext()
        with forgetful, torch.enable_grad(), self.attached:
            self._attach()
            yield

    def _attach(self) -> None:
        self.attached.enter_context(adapters.attached(self.denoiser.module, self.begun.start.adapter, self.trained, self.moment))

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
    def shadows(self) -> list[Shadow]:
        """Every average that runs along."""
        return [*([] if self.shadow is None else [self.shadow]), *(shadow for _, shadow in self.powers)]

    def finish(self) -> None:
        """Wait for averages that move in host memory."""
        for shadow in self.shadows:
            shadow.finish()

    def close(self) -> None:
        """End what runs beside the steps."""
        for shadow in self.shadows:
            shadow.close()

    def place(self) -> TrainState:
        """Where the workspace stands, as a state without tensors."""
        position = advanced(self.begun.position, self.begun.settings.digest, self.step - self.begun.step)
        return replace(self.begun, trained={}, optimizer={}, average={}, powers={}, step=self.step, position=position)

    def as_lora(self, shadow: Shadow) -> dict[str, Tensor]:
        """An average as a LORA_MODEL on the CPU."""
        shadow.finish()
        return adapters.as_lora(shadow.tensors, self.begun.start.adapter, self.base)

    def state(self) -> TrainState:
        """The workspace as an immutable state: everything is copied to the CPU."""
        begun, history = self.begun, self.begun.history
        done = self.step - begun.step
        self.finish()
        average = {} if self.shadow is None else {name: t.detach().to("cpu", copy=True) for name, t in self.shadow.tensors.items()}
        powers = {f"{number}/{name}": t.detach().to("cpu", copy=True)
                  for number, (_, shadow) in enumerate(self.powers) for name, t in shadow.tensors.items()}  # fmt: skip
        return replace(
            begun,
            trained={name: t.detach().to("cpu", copy=True) for name, t in self.trained.items()},
            optimizer=optimizer.moments(self.optimizer, self.trained),
            average=average,
            powers=powers,
            step=self.step,
            position=advanced(begun.position, begun.settings.digest, done),
            history=History(
                history.loss + tuple(m.loss for m in self.measured),
                history.rate + tuple(m.rate for m in self.measured),
                history.norm + tuple(m.norm for m in self.measured),
                history.validation + tuple(self.validation),
            ),
        )


def _precision(work: Workspace) -> AbstractContextManager[Any]:
    """Autocast to bf16 where it is asked for; auto asks for it on a CUDA device that has it."""
    precision, device = work.begun.settings.optimizer.precision, work.denoiser.device.type
    if precision == "bf16" or (precision == "auto" and device == "cuda" and torch.cuda.is_bf16_supported()):
        return torch.autocast(device, torch.bfloat16)
    return nullcontext()


def _batch_losses(work: Workspace, batch: Batch, draws: torch.Generator, options: dict[str, Any]) -> Tensor:
    """Losses (B,) of one group of pictures, with the graph that leads to the trained tensors."""
    denoiser, objective = work.denoiser, work.begun.settings.objective
    clean = denoiser.process_in(batch.latents.to(denoiser.device, torch.float32))
    sigma = denoiser.sigma(shares(objective, clean.shape[0], draws).to(denoiser.device))
    noise = noise_like(clean, objective.offset_noise, objective.pyramid_noise, draws)
    target = clean
    if objective.ip_noise:
        extra = objective.ip_noise * torch.randn(clean.shape, generator=draws).to(clean.device)
        target = clean + perturbation(denoiser.prediction, sigma).view(-1, *[1] * (clean.ndim - 1)) * extra
        noise = noise + extra
    x = denoiser.noisy(clean, noise, sigma)
    if objective.prior == "output-preservation" and batch.regular.any():
        target = _preserving(work, batch, x, sigma, target, options)
    with _precision(work):
        denoised = denoiser.denoise(x, sigma, batch.conditionings, options)
    mask = None if batch.mask is None else batch.mask.to(denoiser.device)
    return losses(objective, denoiser.prediction, denoised, target, sigma, mask)


def _preserving(work: Workspace, batch: Batch, x: Tensor, sigma: Tensor, target: Tensor, options: dict[str, Any]) -> Tensor:
    """`target` where regularisation pictures have what the model says without the trained tensors (differential output preservation)."""
    which = batch.regular.nonzero().flatten()
    conditionings = [batch.conditionings[i] for i in which.tolist()]
    which = which.to(x.device)
    with work.plain(), _precision(work):
        own = work.denoiser.denoise(x[which], sigma[which], conditionings, options)
    return target.index_copy(0, which, own.to(target))


def backward_(work: Workspace) -> float:
    """Gradients of the next step into `.grad` of the trained tensors; the loss. Every picture of the step weighs the same."""
    start, settings = work.begun.start, work.begun.settings
    options = {"graft_training": {"step": work.step, "total_steps": settings.optimizer.total_steps}}
    total = 0.0
    for part in range(settings.optimizer.accumulation):
        work.purpose = f"part {part}"
        number = work.step * settings.optimizer.accumulation + part
        dropout, size = settings.objective.conditioning_dropout, settings.optimizer.batch_size
        groups = batches(work.dataset, size, dropout, start.seed, work.step, number, work.purpose)
        count = sum(len(batch.conditionings) for batch in groups)
        draws = generator(start.seed, work.step, f"noise {work.purpose}")
        for batch in groups:
            each = _batch_losses(work, batch, draws, options)
            if batch.weights is not None:
                each = each * batch.weights.to(each.device)
            if settings.objective.prior != "none":
                each = torch.where(batch.regular.to(each.device), each * settings.objective.prior_weight, each)
            loss = each.sum() / (count * settings.optimizer.accumulation)
            loss.backward()
            total += float(loss.detach())
    work.purpose = ""
    return total


def advance_(work: Workspace) -> Moved:
    """Make one step inside `installed()`. Raises Diverged, with the tensors as they were, when the loss or a gradient is not finite."""
    state, settings = work.begun, work.begun.settings.optimizer
    work.optimizer.zero_grad(set_to_none=True)
    loss = backward_(work)
    held = [t for t in work.trained.values() if t.grad is not None]
    norm = float(torch.nn.utils.clip_grad_norm_(held, settings.clip_norm or float("inf")))
    if not (torch.isfinite(torch.tensor([loss, norm])).all()):
        work.optimizer.zero_grad(set_to_none=True)
        raise Diverged(f"Step {work.step + 1} has loss {loss} and gradient norm {norm}: training has diverged.")
    rate = optimizer.rate_at(settings, work.step)
    optimizer.set_rate_(work.optimizer, rate)
    work.whole = False
    for shadow in work.shadows:
        shadow.protect()
    work.optimizer.step()
    work.optimizer.zero_grad(set_to_none=True)
    adapters.limit_norms_(work.trained, state.start.adapter)
    work.step += 1
    _average_(work)
    moved = Moved(loss, rate, norm)
    work.measured.append(moved)
    work.whole = True
    return moved


def _average_(work: Workspace) -> None:
    """The averages take in the weights of the step that was just made; now and then the weights are set to the average."""
    ema, total = work.begun.start.ema, work.begun.settings.optimizer.total_steps
    if work.shadow is None or ema is None:
        return
    work.shadow.update_(work.trained, ema, work.step, total)
    for own, shadow in work.powers:
        shadow.update_(work.trained, own, work.step, total)
    if ema.switch_every and work.step % ema.switch_every == 0:
        for _, shadow in work.powers:
            shadow.protect()
        work.shadow.switch_(work.trained)


@torch.no_grad()
def validate(work: Workspace) -> float | None:
    """Mean loss of the held-out pictures at noise and timesteps that never change (plain weights, no dropout); None without any."""
    pictures = work.dataset.held_out[:VALIDATION_PICTURES]
    if not pictures:
        return None
    denoiser, objective = work.denoiser, work.begun.settings.objective
    found = []
    for number, picture in enumerate(pictures):
        draws = generator(work.begun.start.seed, number, "validation")
        latents = picture.latent[None].expand(VALIDATION_DRAWS, *picture.latent.shape)
        clean = denoiser.process_in(latents.to(denoiser.device, torch.float32))
        sigma = denoiser.sigma(((torch.arange(VALIDATION_DRAWS) + torch.rand((), generator=draws)) / VALIDATION_DRAWS).to(denoiser.device))
        noise = torch.randn(clean.shape, generator=draws).to(denoiser.device)
        with _precision(work):
            conditionings = (work.dataset.conditionings[picture.caption],) * VALIDATION_DRAWS
            denoised = denoiser.denoise(denoiser.noisy(clean, noise, sigma), sigma, conditionings, {})
        found.append(losses(objective, denoiser.prediction, denoised, clean, sigma).mean())
    return float(torch.stack(found).mean())
