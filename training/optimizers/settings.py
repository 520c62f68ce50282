"""Optimizer settings and their validation: errors name every wrong setting before the first step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...storage.digest import hashed_settings
from . import options
from .block_rates import parse_block_rates
from .record import DEFAULT_WEIGHT_DECAY
from .registry import OPTIMIZERS

SCHEDULES = ("constant", "linear", "cosine", "cosine-restarts", "polynomial")
PRECISIONS = ("auto", "float32", "bf16", "fp16", "full-bf16")
OFFLOADS = ("none", "activations", "optimizer", "layers")
COMPILED = ("off", "blocks")

# Settings for speed and memory that do not change the result: a run stays the same run when they change.
SPEED_ONLY = frozenset({"checkpointing", "offload", "fused_backward"})

_LATER = frozenset({"compile"})  # no part of a run's identity at their defaults, which are what runs of before had


@dataclass(frozen=True)
class OptimizerSettings:
    """The settings of GraftOptimizer; plain values, checked on creation (`checks.check_run` checks them against a run).

    - `total_steps`: the length of the learning rate schedule (0: up to the last step that is asked for, see
      `state.with_planned_steps`); `warmup`: its first steps; `floor`: the fraction of the learning rate at its end.
    - `text_encoder_rate`: the text encoder's learning rate (0: the same).
    - `block_rates`: multiplies the rate where a pattern matches (block_rates.py); `lora_plus`: that of up matrices
      (LoRA+, 2402.12354); `scale_lr`: all rates by (batch * accumulation)^0.55.
    - `options`: options of the optimizer's library (options.py).
    - `compile`: whether the model's blocks run under torch.compile, which rounds otherwise.
    """

    optimizer: str = "adamw"
    learning_rate: float = 1e-4
    text_encoder_rate: float = 0.0
    schedule: str = "constant"
    warmup: int = 0
    total_steps: int = 1000
    floor: float = 0.0
    batch_size: int = 1
    accumulation: int = 1
    clip_norm: float = 1.0
    weight_decay: float = DEFAULT_WEIGHT_DECAY
    lora_plus: float = 1.0
    precision: str = "auto"
    checkpointing: bool = False
    offload: str = "none"
    scale_lr: bool = False
    block_rates: str = ""
    fused_backward: bool = False
    options: str = ""
    compile: str = "off"

    def __post_init__(self) -> None:
        errors = [*_unknown_choices(self), *_wrong_numbers(self), *_unreadable(self), *_exclusions(self)]
        if errors:
            raise ValueError("Optimizer Settings: " + "; ".join(errors) + ".")

    def identity(self) -> dict[str, Any]:
        """The settings that change the result, as plain values."""
        return hashed_settings(self, _LATER, SPEED_ONLY)

    @property
    def parsed_options(self) -> Mapping[str, Any]:
        """`options` by name, as values. Raises ValueError where they cannot be read."""
        return options.parse(self.optimizer, self.options)


def of_ranks(settings: OptimizerSettings, ranks: int) -> OptimizerSettings:
    """The settings of a step on several ranks: the accumulation is multiplied by the number of ranks."""
    if ranks > 1 and settings.fused_backward:
        raise ValueError(
            f"Optimizer Settings: fused backward pass moves a weight before {ranks} ranks could add up their gradients:"
            " switch it off."
        )
    return replace(settings, accumulation=settings.accumulation * ranks)


def same_state(left: OptimizerSettings, right: OptimizerSettings) -> bool:
    """Whether one can resume from the other's optimizer state: the same optimizer with the same layout of its state."""
    return left.optimizer == right.optimizer and _state_layout(left) == _state_layout(right)


def _state_layout(settings: OptimizerSettings) -> object:
    record = OPTIMIZERS.get(settings.optimizer)
    return record.state_layout(settings.parsed_options)


def _unknown_choices(settings: OptimizerSettings) -> list[str]:
    errors = []
    if settings.optimizer not in OPTIMIZERS:
        errors.append(OPTIMIZERS.unknown(settings.optimizer))
    for label, value, choices in (
        ("learning rate schedule", settings.schedule, SCHEDULES),
        ("training precision", settings.precision, PRECISIONS),
        ("offload to CPU memory", settings.offload, OFFLOADS),
        ("compile", settings.compile, COMPILED),
    ):
        if value not in choices:
            errors.append(f"{label} is {value!r}, expected one of {', '.join(choices)}")
    return errors


def _wrong_numbers(settings: OptimizerSettings) -> list[str]:
    errors = []
    if not (math.isfinite(settings.learning_rate) and settings.learning_rate > 0):
        errors.append(f"learning rate is {settings.learning_rate}, expected a finite number above 0")
    for label, count in (("batch size", settings.batch_size), ("gradient accumulation", settings.accumulation)):
        if count < 1:
            errors.append(f"{label} is {count}, expected 1 or more")
    if settings.total_steps < 0:
        errors.append(
            f"total steps (schedule) is {settings.total_steps}, expected 1 or more, or 0 for the steps asked for"
        )
    for label, value in (
        ("warmup steps", settings.warmup),
        ("maximum gradient norm", settings.clip_norm),
        ("weight decay", settings.weight_decay),
        ("text encoder learning rate", settings.text_encoder_rate),
    ):
        if not (math.isfinite(value) and value >= 0):
            errors.append(f"{label} is {value}, expected a finite number, 0 or more")
    if 0 < settings.total_steps < settings.warmup:
        errors.append(f"warmup steps is {settings.warmup} and total steps (schedule) only {settings.total_steps}")
    if not 0.0 <= settings.floor <= 1.0:
        errors.append(
            f"minimum learning rate ratio is {settings.floor}, expected 0 to 1: the fraction of the learning rate that"
            " is left at the end"
        )
    if not (math.isfinite(settings.lora_plus) and settings.lora_plus > 0):
        errors.append(f"LoRA+ ratio is {settings.lora_plus}, expected a finite number above 0 (1 is off)")
    return errors


def _unreadable(settings: OptimizerSettings) -> list[str]:
    """Errors of the settings that are text."""
    errors = []
    try:
        parse_block_rates(settings.block_rates)
    except ValueError as error:
        errors.append(str(error))
    if settings.optimizer in OPTIMIZERS:
        try:
            _ = settings.parsed_options
        except ValueError as error:
            errors.append(str(error))
    return errors


def _exclusions(settings: OptimizerSettings) -> list[str]:
    """Errors for settings that exclude each other.

    Every setting is used, refused here, or said to be ignored in its help.
    """
    errors = []
    if settings.floor and settings.schedule == "constant":
        errors.append(
            f"minimum learning rate ratio is {settings.floor} and learning rate schedule constant never falls: set the"
            " ratio to 0 or choose another schedule"
        )
    if settings.optimizer in OPTIMIZERS:
        errors += OPTIMIZERS.get(settings.optimizer).check_settings(settings)
    if settings.fused_backward:
        for reason in _why_not_fused(settings):
            errors.append(f"fused backward pass moves a weight as soon as its gradient is there, and {reason}")
    return errors


def _why_not_fused(settings: OptimizerSettings) -> list[str]:
    reasons = []
    if settings.clip_norm:
        reasons.append(
            f"maximum gradient norm {settings.clip_norm:g} needs the norm of all gradients first: set it to 0 (off)"
        )
    if settings.accumulation > 1:
        reasons.append(
            f"gradient accumulation {settings.accumulation} sums gradients over batches first: set it to 1 and raise"
            " batch size"
        )
    if settings.precision == "fp16":
        reasons.append(
            "training precision fp16 must see every gradient before it can tell whether one overflowed: use bf16 or"
            " full-bf16"
        )
    if settings.optimizer in OPTIMIZERS and OPTIMIZERS.get(settings.optimizer).joint_step:
        reasons.append(f"{settings.optimizer} takes its step size from all gradients together: use another optimizer")
    return reasons
