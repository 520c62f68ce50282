"""Settings of how the trained tensors move, and what is wrong with them: said before the first step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from . import options
from .block_rates import is_text_encoder, is_up, parse_block_rates, unmatched

OPTIMIZERS = ("adamw", "adamw8bit", "adafactor", "lion", "prodigy", "schedulefree", "muon", "adacoor", "sgd")
SCHEDULES = ("constant", "linear", "cosine", "cosine-restarts", "polynomial")
PRECISIONS = ("auto", "float32", "bf16", "fp16", "full-bf16")
OFFLOADS = ("none", "activations", "optimizer", "layers")

# What changes speed and memory and not what is computed: a run goes on under the same identity when these change.
SPEED_ONLY = frozenset({"checkpointing", "offload", "fused_backward"})

ADACOOR_STEP = 1e-8  # EveryDream2's eps, the only number of AdaCoor

# From about here on a step moves every weight further than a weight is large.
_EXPLODING = {
    "adamw": 0.1,
    "adamw8bit": 0.1,
    "schedulefree": 0.1,
    "lion": 0.02,
    "muon": 0.5,
    "adafactor": 3.0,
    "prodigy": 10.0,
}


@dataclass(frozen=True)
class OptimizerSettings:
    """Settings of the optimiser; plain values, checked on creation (`check_run` checks them against a run).

    `total_steps` is the horizon of the schedule, `warmup` its first steps, `floor` the share of the learning rate that
    is left at the end. `text_encoder_rate` is the text encoder's learning rate (0: the same). `block_rates` multiplies
    the rate where a pattern matches (`training.optimizers.block_rates`), `lora_plus` that of up weights (LoRA+,
    2402.12354), `scale_lr` all by (batch * accumulation)^0.55. `options` are those of the optimiser's library
    (`training.optimizers.options`).
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
    weight_decay: float = 0.01
    lora_plus: float = 1.0
    precision: str = "auto"
    checkpointing: bool = False
    offload: str = "none"
    scale_lr: bool = False
    block_rates: str = ""
    fused_backward: bool = False
    options: str = ""

    def __post_init__(self) -> None:
        wrong = [*_wrong_values(self), *_excluding(self)]
        if wrong:
            raise ValueError("GraftOptimizer: " + "; ".join(wrong) + ".")


def of_ranks(settings: OptimizerSettings, ranks: int) -> OptimizerSettings:
    """The settings of steps that so many ranks make, each of them with the accumulation that `settings` say."""
    if ranks > 1 and settings.fused_backward:
        raise ValueError(
            f"GraftOptimizer: fused_backward moves a weight before {ranks} ranks could add up their gradients: set it"
            " to off."
        )
    return replace(settings, accumulation=settings.accumulation * ranks)


def same_state(left: OptimizerSettings, right: OptimizerSettings) -> bool:
    """Whether one goes on with the other's tensors: it is the same optimiser, and prodigy has a mean of gradients
    (beta1) as before.
    """
    return left.optimizer == right.optimizer and _has_mean(left) == _has_mean(right)


def _has_mean(settings: OptimizerSettings) -> bool:
    betas = options.parse(settings.optimizer, settings.options).get("betas")
    return settings.optimizer != "prodigy" or betas is None or betas[0] > 0  # others keep it with beta1 0, too


def _wrong_values(settings: OptimizerSettings) -> list[str]:
    wrong = []
    for name, known in (
        ("optimizer", OPTIMIZERS),
        ("schedule", SCHEDULES),
        ("precision", PRECISIONS),
        ("offload", OFFLOADS),
    ):
        if getattr(settings, name) not in known:
            wrong.append(f"{name} is {getattr(settings, name)!r}, expected one of {', '.join(known)}")
    if not (math.isfinite(settings.learning_rate) and settings.learning_rate > 0):
        wrong.append(f"learning_rate is {settings.learning_rate}, expected a finite number above 0")
    for name in ("total_steps", "batch_size", "accumulation"):
        if getattr(settings, name) < 1:
            wrong.append(f"{name} is {getattr(settings, name)}, expected 1 or more")
    for name in ("warmup", "clip_norm", "weight_decay", "text_encoder_rate"):
        if not (math.isfinite(getattr(settings, name)) and getattr(settings, name) >= 0):
            wrong.append(f"{name} is {getattr(settings, name)}, expected a finite number, 0 or more")
    if settings.warmup > settings.total_steps:
        wrong.append(f"warmup is {settings.warmup} steps and total_steps only {settings.total_steps}")
    if not 0.0 <= settings.floor <= 1.0:
        wrong.append(f"floor is {settings.floor}, expected a share from 0 to 1 of the learning rate")
    if not (math.isfinite(settings.lora_plus) and settings.lora_plus > 0):
        wrong.append(f"lora_plus is {settings.lora_plus}, expected a finite number above 0 (1 is off)")
    try:
        parse_block_rates(settings.block_rates)
    except ValueError as error:
        wrong.append(str(error))
    if settings.optimizer in options.KNOWN:
        try:
            options.parse(settings.optimizer, settings.options)
        except ValueError as error:
            wrong.append(str(error))
    return wrong


def _excluding(settings: OptimizerSettings) -> list[str]:
    """Settings that exclude each other: a setting is used, refused here, or declared to be ignored in its help."""
    wrong = []
    if settings.floor and settings.schedule == "constant":
        wrong.append(
            f"floor is {settings.floor} and schedule constant never falls: set floor to 0 or choose another schedule"
        )
    if settings.optimizer == "schedulefree" and settings.schedule != "constant":
        wrong.append(
            f"optimizer schedulefree takes the place of schedule {settings.schedule}: use constant (warmup works)"
        )
    if settings.optimizer in ("adacoor", "prodigy"):
        wrong += _without_rates(settings)
    if settings.fused_backward:
        for reason in _unfusable(settings):
            wrong.append(f"fused_backward moves a weight as soon as its gradient is there, and {reason}")
    return wrong


def _without_rates(settings: OptimizerSettings) -> list[str]:
    """What the optimisers that find their own step size cannot do with rates."""
    several = {"text_encoder_rate": settings.text_encoder_rate != 0, "lora_plus": settings.lora_plus != 1}
    if settings.optimizer == "prodigy":
        factors = {factor for _, factor in _rates_or_none(settings)}
        several["block_rates"] = bool(factors - {0.0, 1.0})  # its library takes one rate, or none, for every tensor
        why, then = "prodigy estimates one step size for all tensors", "leave it at its default"
    else:
        several.update(
            {
                "block_rates": bool(settings.block_rates.strip()),
                "scale_lr": settings.scale_lr,
                "warmup": settings.warmup > 0,
                "schedule": settings.schedule != "constant",
                "weight_decay": settings.weight_decay not in (0.0, OptimizerSettings.weight_decay),
            }
        )
        why, then = "adacoor has no learning rate and no weight decay", "leave it at its default"
    return [
        f"{why}, so {name} {getattr(settings, name)!r} cannot be used: {then}" for name, used in several.items() if used
    ]


def _rates_or_none(settings: OptimizerSettings) -> list[tuple[str, float]]:
    try:
        return parse_block_rates(settings.block_rates)
    except ValueError:
        return []  # it is said with the wrong values


def _unfusable(settings: OptimizerSettings) -> list[str]:
    reasons = []
    if settings.clip_norm:
        reasons.append(f"clip_norm {settings.clip_norm:g} needs the norm of all gradients first: set it to 0 (off)")
    if settings.accumulation > 1:
        reasons.append(
            f"accumulation {settings.accumulation} sums gradients over batches first: set it to 1 and raise batch_size"
        )
    if settings.precision == "fp16":
        reasons.append(
            "precision fp16 must see every gradient before it can tell whether one overflowed: use bf16 or full-bf16"
        )
    if settings.optimizer == "prodigy":
        reasons.append("prodigy takes its step size from all gradients together: use another optimizer")
    return reasons


def check_run(
    settings: OptimizerSettings, trained: Mapping[str, Tensor], kind: str, max_norm: float, averaged: bool
) -> None:
    """Raise ValueError with everything in which the settings do not fit a run, before its first step.

    `trained` are the tensors that move, `kind` and `max_norm` the adapter's, `averaged` says whether the run keeps an
    average.
    """
    from .build import missing

    wrong = missing(settings.optimizer)
    if settings.lora_plus != 1 and not any(is_up(name) for name in trained):
        wrong.append(
            f"lora_plus {settings.lora_plus:g} is the rate of the up factors and kind {kind} trains none: set it to 1"
        )
    if settings.text_encoder_rate and not any(is_text_encoder(name) for name in trained):
        wrong.append(f"text_encoder_rate {settings.text_encoder_rate:g}: the text encoder is not trained; set it to 0")
    wrong += [
        f"block_rates: {pattern!r} matches no trained tensor" for pattern in unmatched(settings.block_rates, trained)
    ]
    if settings.optimizer == "muon" and not any(tensor.ndim == 2 for tensor in trained.values()):
        wrong.append("muon moves matrices and none of the trained tensors is one: use adamw")
    if settings.optimizer == "schedulefree" and averaged:
        wrong.append("schedulefree is an average of the weights itself: disconnect GraftEMA or use another optimizer")
    if settings.optimizer == "schedulefree" and max_norm:
        wrong.append(
            f"schedulefree keeps two sets of weights and max_norm {max_norm:g} would scale one: set max_norm to 0"
        )
    if settings.offload == "layers" and kind == "full":
        wrong.append(
            "offload layers moves frozen weights and kind full trains them all: use offload optimizer or activations"
        )
    if wrong:
        raise ValueError("GraftOptimizer: " + "; ".join(wrong) + ".")


def remarks(settings: OptimizerSettings) -> list[str]:
    """What works and is probably not meant, and what is ignored, in sentences."""
    said = []
    rate, optimizer = settings.learning_rate, settings.optimizer
    if optimizer == "prodigy" and rate != 1:
        said.append(f"prodigy finds the rate itself and multiplies it by learning_rate, which is {rate:g}: 1 is usual")
    if optimizer == "adacoor":
        said.append(f"adacoor ignores learning_rate ({rate:g}) and weight_decay ({settings.weight_decay:g})")
    if rate >= _EXPLODING.get(optimizer, math.inf):
        said.append(
            f"learning_rate {rate:g} is so large for {optimizer} that training will probably diverge in the first steps"
        )
    if optimizer == "lion" and 1e-4 < rate < _EXPLODING["lion"]:
        said.append(f"lion moves every weight by the whole rate ({rate:g}): a tenth of AdamW's, such as 1e-5, is usual")
    if settings.total_steps <= 2 * settings.warmup and settings.warmup:
        said.append(
            f"warmup is {settings.warmup} of {settings.total_steps} steps: the rate is at its peak for half of the run"
            " or less"
        )
    return said
