"""The state of a training run as a value: its start, its steps so far, its tensors and its history."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..ema.decay import EMASettings, check_horizon
from ..settings.declaration import settings_of
from ..storage.digest import sha256_of_json
from .expert_lora import mark_expert
from .objective.loss_kinds import LOSSES
from .objective.settings import ObjectiveSettings
from .optimizers.checks import check_run
from .optimizers.record import RunFacts
from .optimizers.settings import OptimizerSettings, same_state
from .trainable.install import init_trainable, make_lora
from .trainable.settings import TEXT_ENCODER, AdapterSettings
from .trainable.words import WordSettings, drop_words

DENOISING = "denoising"  # the usual kind of training
_COMPANIONS = "companions/"  # what the names of companions' tensors begin with, beside the optimizer's


@dataclass(frozen=True)
class Settings:
    """What may change while a run goes on: optimizer and objective, the CLIP skip of captions (None: the dataset's),
    and whether each epoch begins with what a file says (`run.epoch_settings`).
    """

    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    clip_skip: int | None = None
    from_file: bool = False

    @property
    def digest(self) -> str:
        """Hash of all settings that change the result. It stands for the settings in a run's position."""
        plain: dict[str, Any] = {"optimizer": self.optimizer.identity(), "objective": self.objective.identity()}
        if self.clip_skip is not None:
            plain["clip_skip"] = self.clip_skip
        if self.from_file:
            plain["from_file"] = True
        return sha256_of_json(plain)

    def with_values(self, values: Mapping[str, Any]) -> Settings:
        """The settings with other values of some fields, of whichever part has them; others are left alone. Raises
        ValueError for values that they cannot have.
        """
        parts = {}
        for name in ("optimizer", "objective"):
            part = getattr(self, name)
            parts[name] = replace(part, **{key: values[key] for key in values.keys() & settings_of(part).keys()})
        return replace(self, clip_skip=values.get("clip_skip", self.clip_skip), **parts)


@dataclass(frozen=True)
class Start:
    """What a run starts from. Its digest is the run's identity. `model`, `dataset` and `training_only` (the LoRA that
    is on while the loss is computed; "" without one) are fingerprints. `words` are trained too, or alone. `task` is the
    kind of training by name (`tasks.registry`), and `task_settings` are its own settings, a dataclass, if it has any.
    """

    model: str
    dataset: str
    adapter: AdapterSettings = field(default_factory=AdapterSettings)
    ema: EMASettings | None = None
    seed: int = 0
    training_only: str = ""
    words: WordSettings | None = None
    task: str = DENOISING
    task_settings: Any = None

    @property
    def encodes_captions(self) -> bool:
        """Whether what is trained changes the conditionings of captions, so that each step encodes them."""
        return self.adapter.text_encoder or self.words is not None

    @property
    def digest(self) -> str:
        """Identity of the run: the same start gives the same digest in every process."""
        return sha256_of_json(self.identity())

    def identity(self) -> dict[str, Any]:
        """What the run is known by, as plain values."""
        ema = None if self.ema is None else asdict(self.ema)
        identity: dict[str, Any] = {"model": self.model, "dataset": self.dataset, "adapter": self.adapter.identity()}
        identity["ema"] = ema
        identity["seed"] = self.seed
        if self.training_only:
            identity["training_only"] = self.training_only
        if self.words is not None:
            identity["words"] = asdict(self.words)
        if self.task != DENOISING:
            identity["task"] = self.task
        if self.task_settings is not None:
            identity["task_settings"] = asdict(self.task_settings)
        return identity


@dataclass(frozen=True)
class History:
    """The loss, learning rate and gradient norm of every step, and (step, loss) of every validation: of the trained
    weights, and of their running average if the run has one.

    The first `outdated` validations used an earlier objective: their losses cannot be compared. `accuracy` is (step,
    implicit accuracy) of every validation of preference pairs.
    """

    loss: tuple[float, ...] = ()
    rate: tuple[float, ...] = ()
    norm: tuple[float, ...] = ()
    validation: tuple[tuple[int, float], ...] = ()
    outdated: int = 0
    average_validation: tuple[tuple[int, float], ...] = ()
    accuracy: tuple[tuple[int, float], ...] = ()

    @property
    def comparable(self) -> tuple[tuple[int, float], ...]:
        """The validations with the current objective."""
        return self.validation[self.outdated :]

    @property
    def comparable_average(self) -> tuple[tuple[int, float], ...]:
        """The validations of the running average with the current objective; states of older versions have none."""
        steps = {step for step, _ in self.comparable}
        return tuple(row for row in self.average_validation if row[0] in steps)

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and loss of the best comparable validation: of the running average where it was measured, else of the
        weights. Losses that are not finite do not count.
        """
        rows = self.comparable_average or self.comparable
        finite = (row for row in rows if math.isfinite(row[1]))
        return min(finite, key=lambda row: (row[1], row[0]), default=None)


@dataclass(frozen=True)
class RunCost:
    """What a run has cost so far: seconds in steps, and the most memory in bytes. Not part of the run's identity."""

    seconds: float = 0.0
    memory: int = 0


@dataclass(frozen=True, eq=False)
class TrainState:
    """A run at one step. Tensors are on the CPU and never changed; `base` gives the model's own weights for kind full.

    `trained` (the weights to sample with) and `average` (the EMA, empty when there is none) go by name and are float32,
    `optimizer` goes by `<slot>/<name>` and has its library's types (`training.optimizers.stepper`), and it also has the
    tensors of what is trained beside the model (`companion_tensors`), `powers` (the power-function averages that
    snapshots are taken of) by `<number of the width>/<name>`. `open_schedule` is whether the settings left the
    schedule's length to the steps asked for (`with_planned_steps`). `taken` is (step, values by field) of every time
    that the run took settings from a file after a step, in order (`run.epoch_settings`). `subject` is the host's:
    models and dataset that the nodes carry along; the core does not look into it. None of these is part of the state's
    identity.
    """

    start: Start
    settings: Settings
    trained: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor] = field(default_factory=dict)
    average: Mapping[str, Tensor] = field(default_factory=dict)
    powers: Mapping[str, Tensor] = field(default_factory=dict)
    step: int = 0
    position: tuple[tuple[str, int], ...] = ()
    history: History = field(default_factory=History)
    cost: RunCost = field(default_factory=RunCost)
    run: str = "run"
    notes: Mapping[str, str] = field(default_factory=dict)
    open_schedule: bool = False
    taken: tuple[tuple[int, Mapping[str, Any]], ...] = ()
    base: Callable[[], Mapping[str, Tensor]] | None = field(default=None, repr=False)
    subject: Any = field(default=None, repr=False)

    @property
    def task(self) -> str:
        """The name of its kind of training: that of the run, or of a run that denoises that of its loss function, which
        may change between steps.
        """
        if self.start.task != DENOISING:
            return self.start.task
        return LOSSES.get(self.settings.objective.loss).task or DENOISING

    @property
    def key(self) -> str:
        """Identity of this state: the run's beginning and the settings and steps since."""
        return state_key(self.start.digest, self.position)

    def with_optimizer(self, **changes: Any) -> TrainState:
        """The state with some other values of its optimizer settings. Raises ValueError for values that do not fit."""
        optimizer = replace(self.settings.optimizer, **changes)
        return replace(self, settings=replace(self.settings, optimizer=optimizer))

    def weights(self, ema: bool = False) -> dict[str, Tensor]:
        """Copies of the trained tensors by name (kind full: whole weights by parameter name), or of their average."""
        if ema and not self.average:
            raise ValueError("This run keeps no weight average: connect EMA Settings to Start Training.")
        return {name: tensor.clone() for name, tensor in (self.average if ema else self.trained).items()}

    def lora_model(self, ema: bool = False) -> dict[str, Tensor]:
        """The trained change under ComfyUI's generic names (LORA_MODEL): pairs, or differences for kind full."""
        lora = make_lora(self.weights(ema), self.start.adapter, self.base_of_differences())
        return mark_expert(lora, self.settings.objective)

    def base_of_differences(self) -> Mapping[str, Tensor] | None:
        """The model's own weights by name, where kind full is saved as differences from them; None for adapters."""
        if self.base is None or not self.start.adapter.full_weights:
            return None
        return self.base()


def state_key(start: str, position: tuple[tuple[str, int], ...]) -> str:
    """Identity of a state from its run's identity and its position."""
    return sha256_of_json([start, [list(part) for part in position]])


def advance_position(position: tuple[tuple[str, int], ...], settings: str, steps: int) -> tuple[tuple[str, int], ...]:
    """The position after more steps. Neighbors with equal settings are joined, so 100 + 150 is 250.

    Args:
        position: (digest of the settings, steps) of each piece so far.
        settings: the digest of those of the new steps.
        steps: how many.
    """
    if steps == 0:
        return position
    if position and position[-1][0] == settings:
        return (*position[:-1], (settings, position[-1][1] + steps))
    return (*position, (settings, steps))


def begin(
    module: nn.Module,
    start: Start,
    settings: Settings | None = None,
    run: str = "run",
    base: Callable[[], Mapping[str, Tensor]] | None = None,
    text_encoder: nn.Module | None = None,
    read: Collection[str] | None = None,
    words: Mapping[str, Tensor] | None = None,
) -> TrainState:
    """The state before the first step.

    Args:
        module: the model.
        start: what the run begins from.
        settings: those of its first steps.
        run: its name.
        base: gives the module's own weights by parameter name, where what is in the module now may be patched.
        text_encoder: the text encoder, if it is trained too; its names begin with `text_encoders.`, in `base` as well.
        read: the paths of its parts that the model sees something of, when that is known; others are not trained.
        words: the first vectors of `start.words`, by trained name.

    Raises:
        ValueError: where the settings do not fit the model or each other.
    """

    def own() -> Mapping[str, Tensor]:
        if text_encoder is None:
            parts = [("", module)]
        else:
            parts = [("", module), (TEXT_ENCODER, text_encoder)]
        return {prefix + name: p.detach() for prefix, part in parts for name, p in part.named_parameters()}

    settings, ema = settings or Settings(), start.ema
    if ema is not None and settings.optimizer.total_steps:
        check_horizon(ema, settings.optimizer.total_steps)
    trained = dict(words or {})
    if start.words is None or not start.words.alone:
        trained = {**init_trainable(module, start.adapter, start.seed, (base or own)(), text_encoder, read), **trained}
    _check_run(settings, start, trained)
    average: dict[str, Tensor] = {}
    widths: tuple[float, ...] = ()
    if ema is not None:
        average = {name: tensor.clone() for name, tensor in trained.items()}
        widths = ema.widths if ema.snapshots else ()
    powers = {f"{number}/{name}": tensor.clone() for number in range(len(widths)) for name, tensor in trained.items()}
    return TrainState(start, settings, trained, average=average, powers=powers, run=run, base=base or own)


def _check_run(settings: Settings, start: Start, trained: Mapping[str, Tensor]) -> None:
    words_rate = 0.0
    if start.words is not None:
        words_rate = start.words.learning_rate
    adapter = start.adapter
    is_averaged = start.ema is not None
    facts = RunFacts(drop_words(trained), adapter.kind, adapter.max_norm, is_averaged, words_rate, adapter.any_dropout)
    check_run(settings.optimizer, facts)


def position_at(position: tuple[tuple[str, int], ...], step: int) -> tuple[tuple[str, int], ...]:
    """The beginning of a position, up to `step` steps."""
    result, remaining = [], step
    for settings, steps in position:
        if remaining > 0:
            result.append((settings, min(steps, remaining)))
        remaining -= steps
    if remaining > 0:
        raise ValueError(f"The position ends {remaining} steps before step {step}.")
    return tuple(result)


def change_settings(
    state: TrainState, optimizer: OptimizerSettings | None, objective: ObjectiveSettings | None
) -> TrainState:
    """The state with other settings from here on.

    Another optimizer starts with a fresh state; what is trained beside the model keeps its own. With another
    objective the held-out losses so far are outdated.

    Args:
        state: the run.
        optimizer: None keeps what it has.
        objective: None keeps what it has.

    Raises:
        ValueError: where they do not fit what is trained.
    """
    settings = replace(
        state.settings,
        optimizer=optimizer or state.settings.optimizer,
        objective=objective or state.settings.objective,
    )
    open_schedule = state.open_schedule and optimizer is None
    if settings == state.settings and open_schedule == state.open_schedule:
        return state
    _check_run(settings, state.start, state.trained)
    keeps_state = same_state(settings.optimizer, state.settings.optimizer)
    history = state.history
    if settings.objective != state.settings.objective:
        history = replace(history, outdated=len(history.validation))
    slots = state.optimizer
    if not keeps_state:
        slots = {name: tensor for name, tensor in slots.items() if name.startswith(_COMPANIONS)}
    state = replace(state, settings=settings, optimizer=slots, history=history)
    return replace(state, open_schedule=open_schedule)


def take_values(state: TrainState, values: Mapping[str, Any]) -> TrainState:
    """The state with other values of its settings from here on, which it notes as taken. Raises ValueError."""
    wanted = state.settings.with_values(values)
    changed = change_settings(state, wanted.optimizer, wanted.objective)
    taken = (*state.taken, (state.step, dict(values)))
    return replace(changed, settings=wanted, taken=taken, open_schedule=state.open_schedule)


def follow(state: TrainState, taken: Sequence[tuple[int, Mapping[str, Any]]], step: int) -> tuple[str, Settings] | None:
    """Key and settings of the state at a later step, where these values were taken from a file on the way; None where
    this state is not on that way. Raises ValueError for values that settings cannot have.
    """
    own = taken[len(state.taken) :]
    if tuple(taken[: len(state.taken)]) != state.taken or (own and not state.settings.from_file):
        return None
    position, settings, at = state.position, state.settings, state.step
    for taken_at, values in own:
        if not at <= taken_at <= step:
            return None
        position, at = advance_position(position, settings.digest, taken_at - at), taken_at
        settings = settings.with_values(values)
    return state_key(state.start.digest, advance_position(position, settings.digest, step - at)), settings


def companion_tensors(state: TrainState, name: str) -> dict[str, Tensor]:
    """The tensors of a network that is trained beside the model, as `name_companions` named them; empty before the
    first step.
    """
    prefix = f"{_COMPANIONS}{name}/"
    return {key.removeprefix(prefix): tensor for key, tensor in state.optimizer.items() if key.startswith(prefix)}


def name_companions(tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of each network that is trained beside the model, as `TrainState.optimizer` has them."""
    return {f"{_COMPANIONS}{name}/{key}": tensor for name, own in tensors.items() for key, tensor in own.items()}


def plan_schedule(state: TrainState, until: int) -> TrainState:
    """The state with a schedule that ends at a step, where its settings leave the length open (total_steps 0). A later
    call plans anew.

    Args:
        state: the run.
        until: the step.

    Raises:
        ValueError: where that is too early for the average.
    """
    optimizer = state.settings.optimizer
    if optimizer.total_steps and not state.open_schedule:
        return state
    if state.start.ema is not None:
        check_horizon(state.start.ema, until)
    return replace(state.with_optimizer(total_steps=until), open_schedule=True)


def equal(left: TrainState, right: TrainState) -> bool:
    """Whether two states are at the same position with the same bytes."""
    if left.key != right.key or left.step != right.step:
        return False
    groups = ("trained", "optimizer", "average", "powers")
    pairs = [(getattr(left, group), getattr(right, group)) for group in groups]
    return all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs)
