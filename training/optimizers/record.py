"""The record of an optimizer: what settings, checks, training, saved states and LoRA metadata need to know of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from .option_readers import OptionReader

DEFAULT_WEIGHT_DECAY = 0.01


class SettingsView(Protocol):
    """The optimizer settings that a record looks at."""

    @property
    def learning_rate(self) -> float: ...
    @property
    def text_encoder_rate(self) -> float: ...
    @property
    def schedule(self) -> str: ...
    @property
    def warmup(self) -> float: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def accumulation(self) -> int: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def lora_plus(self) -> float: ...
    @property
    def scale_lr(self) -> bool: ...
    @property
    def block_rates(self) -> str: ...
    @property
    def clip_norm(self) -> float: ...
    @property
    def parsed_options(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class RunFacts:
    """What a run trains, to check settings against it.

    That is its tensors (without trained words), the adapter's kind and max_norm, whether the run keeps an average of
    the weights (GraftEMA), the words' own learning rate (0: none), and whether the adapter has a dropout.
    """

    trained: Mapping[str, Tensor]
    kind: str
    max_norm: float = 0.0
    averaged: bool = False
    words_rate: float = 0.0
    dropout: bool = False


@dataclass(frozen=True)
class BuildRequest:
    """What an optimizer is built from: torch parameter groups, learning rates, and its options with the defaults filled
    in.

    `part` is one of the record's `parts`: which optimizer is wanted, if the record is made of several.
    """

    groups: list[dict[str, Any]]
    learning_rate: float
    weight_decay: float
    warmup: int
    options: Mapping[str, Any]
    part: str = ""


@dataclass(frozen=True)
class Package:
    """A library that is not part of torch: the module to import and its name on the package index."""

    module: str
    name: str


@dataclass(frozen=True)
class TorchClass:
    """A class of torch.optim and the first torch version that has it."""

    name: str
    version: str


@dataclass(frozen=True)
class SamplingWeights:
    """For optimizers that train one set of weights and sample with another (schedule-free).

    The weights that gradients are taken at are saved under `live_slot`. `compute(live, state, group)` gets them, the
    tensor's optimizer state and its parameter group, and gives the weights to sample with; None if these are the live
    ones.
    """

    live_slot: str
    compute: Callable[[Tensor, Mapping[str, Any], Mapping[str, Any]], Tensor | None]


def _no_errors(subject: Any) -> list[str]:
    return []


def _learns(settings: SettingsView, rate: float, run: RunFacts | None) -> list[str]:
    return []


def _one_layout(options: Mapping[str, Any]) -> object:
    return None


def _one_part(tensor: Tensor) -> str:
    return ""


@dataclass(frozen=True, kw_only=True)
class OptimizerRecord:
    """Everything that Graft knows of one optimizer. A new optimizer is one such record in the registry."""

    name: str
    """Its name in the settings."""
    help: str
    """A few words for the tooltip: what it is good for, and the learning rate to try."""
    full_name: str
    """Module and class as kohya's scripts write them into LoRA metadata. It is in saved files, so it never changes."""
    build: Callable[[BuildRequest], torch.optim.Optimizer]
    options: Mapping[str, OptionReader]
    """The options that its library takes besides learning rate and weight decay."""
    element_wise: bool
    """Whether each number of a tensor is updated by itself, so that ranks may split the rows of a tensor."""
    option_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of options that the user did not set, if Graft and not the library decides them."""
    package: Package | None = None
    torch_class: TorchClass | None = None

    fixed_rate: float | None = None
    """Its step size, if it has no learning rate."""
    has_weight_decay: bool = True
    joint_step: bool = False
    """Whether its step needs the gradients of all tensors together, so that no tensor can be updated early or alone."""
    usual_rates: tuple[float, float] | None = None
    """The lowest and the highest usual learning rate; the report warns of a rate outside. None if `remarks` does that,
    or if it has no learning rate.
    """
    diverges_from: float = math.inf
    """From about this learning rate on, a step changes every weight by more than the weight's own size."""

    cannot_learn: Callable[[SettingsView, float, RunFacts | None], Sequence[str]] = _learns
    """Errors for a rate (the highest that the settings give to a tensor) at which nothing is learned, whatever the run,
    or in this run; each says which rate is usual.
    """

    check_options: Callable[[Mapping[str, Any]], Sequence[str]] = _no_errors
    """Errors for options that do not go together."""
    check_settings: Callable[[SettingsView], Sequence[str]] = _no_errors
    """Errors for settings that do not work with this optimizer, each with its reason."""
    check_run: Callable[[RunFacts], Sequence[str]] = _no_errors
    """Errors for a run that this optimizer cannot train."""
    remarks: Callable[[SettingsView], Sequence[str]] = _no_errors
    """Warnings for the report about settings that work but are probably not meant, such as an unusual learning rate."""

    group_numbers: Mapping[str, type[int] | type[float]] = field(default_factory=dict)
    """Numbers that it keeps per parameter group instead of per tensor, in the order in which they are saved."""
    finds_group_numbers: bool = False
    """Whether such numbers are found by looking which ones of a group have changed."""
    sampling_weights: SamplingWeights | None = None
    state_layout: Callable[[Mapping[str, Any]], object] = _one_layout
    """What its options say about the layout of its state: a saved state can be resumed only with an equal value."""
    parts: tuple[str, ...] = ("",)
    """The optimizers that it is made of, by name, if several share the work."""
    part_of: Callable[[Tensor], str] = _one_part
    """Which of its parts updates a tensor."""

    @property
    def tooltip(self) -> str:
        """Its sentence in the tooltip of the node: name, `help`, and what has to be installed."""
        if self.package is not None:
            return f"{self.name}: {self.help} (needs the package {self.package.name})."
        if self.torch_class is not None:
            return f"{self.name}: {self.help} (needs torch {self.torch_class.version})."
        return f"{self.name}: {self.help}."

    def __post_init__(self) -> None:
        if not self.name or "." not in self.full_name:
            raise ValueError(f"The optimizer {self.name!r} needs a name and a full name with its module.")
        unknown = ", ".join(sorted(self.option_defaults.keys() - self.options.keys()))
        if unknown:
            raise ValueError(f"The optimizer {self.name} has defaults of options that it does not have: {unknown}.")


def rate_settings(settings: SettingsView) -> list[tuple[str, object, bool]]:
    """For `changed_settings`: everything that sets or changes learning rates, but for the learning rate itself."""
    return [
        ("learning rate schedule", settings.schedule, settings.schedule != "constant"),
        ("warmup steps", settings.warmup, settings.warmup > 0),
        ("text encoder learning rate", settings.text_encoder_rate, settings.text_encoder_rate != 0),
        ("LoRA+ ratio", settings.lora_plus, settings.lora_plus != 1),
        ("block learning rates", settings.block_rates, bool(settings.block_rates.strip())),
        ("scale rate with batch size", settings.scale_lr, settings.scale_lr),
    ]


def changed_settings(why: str, settings: Sequence[tuple[str, object, bool]]) -> list[str]:
    """An error for each of `settings`, (the node's label, value, whether it is changed), that is changed.

    `why` says why the optimizer does not allow it.
    """
    errors = []
    for label, value, is_changed in settings:
        if is_changed:
            errors.append(f"{why}, so {label} {value!r} cannot be used: leave it at its default")
    return errors
