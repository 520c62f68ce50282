"""Optimizer settings and their validation: errors name every wrong setting before the first step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...settings.declaration import check_values, setting
from ...storage.digest import settings_to_hash
from . import from_package, options
from .block_rates import parse_block_rates
from .record import OptimizerRecord
from .registry import OPTIMIZERS

SCHEDULES = ("constant", "linear", "cosine", "cosine-restarts", "polynomial")
PRECISIONS = ("auto", "float32", "bf16", "fp16", "full-bf16")
OFFLOADS = ("none", "activations", "optimizer", "layers")
COMPILED = ("off", "blocks")

# Settings for speed and memory that do not change the result: a run stays the same run when they change.
SPEED_ONLY = frozenset({"checkpointing", "offload", "fused_backward", "swapped_blocks"})


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
    - `optimizer_class`: the class of a package, in place of `optimizer` (from_package.py).
    - `swapped_blocks`: with offload layers, how many blocks wait in host memory (0: as few as the plan allows).
    """

    optimizer: str = setting(
        "optimizer",
        "adamw",
        lambda: " ".join(record.tooltip for record in OPTIMIZERS) + " Start with adamw.",
        choices=OPTIMIZERS.names,
        kohya=("--optimizer_type", "`AdamW8bit` is `adamw8bit`"),
        ai_toolkit="train.optimizer",
        onetrainer="Optimizer",
        everydream2=("optimizer", "AdaCoor is `adacoor`"),
    )
    learning_rate: float = setting(
        "learning rate",
        0.0001,
        "How large each step is. Start at 1e-4 for a LoRA, 1 with prodigy and prodigyplus, 1e-5 with lion, 0.01 with"
        " adafactor, 1e-6 with automagic, 0.1 with sgd. Lower it if the loss jumps or the LoRA overfits. adacoor"
        " ignores it.",
        low=0.0,
        high=10.0,
        step=1e-06,
        kohya="--learning_rate, --unet_lr",
        ai_toolkit="train.lr, train.unet_lr",
        onetrainer="Learning Rate",
        everydream2="--lr",
        diffusers="--learning_rate",
    )
    text_encoder_rate: float = setting(
        "text encoder learning rate",
        0.0,
        "Learning rate of the text encoder, if you train it. Often half of the main one; 0 uses the same.",
        low=0.0,
        high=10.0,
        step=1e-06,
        advanced=True,
        kohya=("--text_encoder_lr", "one for all text encoders; 0 is the same as learning rate"),
        ai_toolkit="train.text_encoder_lr",
        onetrainer="Text Encoder Learning Rate",
    )
    schedule: str = setting(
        "learning rate schedule",
        "constant",
        "How the learning rate changes after the warmup. constant keeps it; cosine and linear let it fall toward the"
        " end, which often gives cleaner results.",
        choices=SCHEDULES,
        kohya=(
            "--lr_scheduler",
            "`constant_with_warmup` is `constant` with warmup steps; `cosine_with_restarts` falls four times;"
            " `polynomial` has power 2",
        ),
        ai_toolkit="train.lr_scheduler",
        onetrainer=("Learning Rate Scheduler", "there are no cycles to set: `cosine-restarts` falls four times"),
        everydream2=("--lr_scheduler", "`constant` or `cosine`"),
    )
    warmup: float = setting(
        "warmup steps",
        0.0,
        "Raises the learning rate from 0 over this many steps, or below 1 over this share of total steps: 0.02 is 2%."
        " Try 100 if the loss jumps at the start.",
        low=0.0,
        high=1000000.0,
        step=1.0,
        finer=True,
        advanced=True,
        kohya=("--lr_warmup_steps", "a share below 1, too"),
        onetrainer=("Learning Rate Warmup Steps", "a share below 1, too; OneTrainer's 1 is all steps, here one step"),
        everydream2=("--lr_warmup_steps", "0 by default; for EveryDream2's 2% with `cosine` set 0.02"),
    )
    total_steps: int = setting(
        "total steps (schedule)",
        1000,
        "The length of the learning rate schedule: the steps of the whole run, even if you split it over several"
        " Train Steps. 0: up to the last step of each Train Step; if you then ask for more steps, training starts"
        " over.",
        low=0,
        high=10000000,
        everydream2=("--lr_decay_steps", "EveryDream2 sets it a little above the steps of the run"),
    )
    floor: float = setting(
        "minimum learning rate ratio",
        0.0,
        "The learning rate at the end of a falling schedule, as a fraction of the learning rate. 0 falls to nothing;"
        " try 0.1 to keep learning until the end.",
        low=0.0,
        high=1.0,
        step=0.01,
        advanced=True,
        kohya="--lr_scheduler_min_lr_ratio",
        onetrainer="Learning Rate Min Factor",
    )
    batch_size: int = setting(
        "batch size",
        1,
        "Images per batch. Raise it for a steadier loss if the memory allows.",
        low=1,
        high=4096,
        kohya="--train_batch_size",
        ai_toolkit="train.batch_size",
        onetrainer="Local Batch Size",
        everydream2="--batch_size",
        diffusers=("--train_batch_size", "a pair is one"),
    )
    accumulation: int = setting(
        "gradient accumulation",
        1,
        "Batches per step. Raise it to act like a larger batch size without more memory.",
        low=1,
        high=4096,
        advanced=True,
        kohya="--gradient_accumulation_steps",
        ai_toolkit="train.gradient_accumulation",
        onetrainer="Accumulation Steps",
        everydream2="--grad_accum",
        lunnova="accumulate_grad_batches",
    )
    clip_norm: float = setting(
        "maximum gradient norm",
        1.0,
        "Clips the gradient to this norm (kohya's max_grad_norm). Lower it if the loss spikes; 0 is off.",
        low=0.0,
        high=1000.0,
        step=0.1,
        advanced=True,
        kohya="--max_grad_norm",
        onetrainer="Clip Grad Norm",
        everydream2=("--clip_grad_norm", "EveryDream2 does not clip unless you ask for it; that is 0 here"),
    )
    weight_decay: float = setting(
        "weight decay",
        0.01,
        "Pulls the weights toward 0 at each step. Raise it from 0.01 to 0.1 if the LoRA overfits. adacoor ignores it.",
        low=0.0,
        high=10.0,
        step=0.0001,
        advanced=True,
        ai_toolkit=("train.optimizer_params", "its `weight_decay`; the others are optimizer options"),
    )
    lora_plus: float = setting(
        "LoRA+ ratio",
        1.0,
        "Multiplies the learning rate of the up matrices (LoRA+). Try 4 to 16 to learn faster; 1 is off.",
        low=0.01,
        high=1000.0,
        step=0.1,
        advanced=True,
        kohya="loraplus_lr_ratio",
    )
    precision: str = setting(
        "training precision",
        "auto",
        "auto: bf16 on an NVIDIA or AMD card that supports it, fp16 on an older card, and otherwise the model's own"
        " type. bf16, fp16: compute in this type and keep the trained weights in float32. full-bf16: trained weights"
        " and gradients are bf16 too, rounded stochastically, to save memory.",
        choices=PRECISIONS,
        advanced=True,
        kohya=("--mixed_precision, --full_bf16", "`bf16`, `full-bf16`"),
        ai_toolkit="train.dtype",
        lunnova=("precision: 16", "`fp16`"),
        onetrainer=("Train Data Type, LoRA Weight Data Type", "one for both, and data type of Save LoRA for the file"),
    )
    checkpointing: bool = setting(
        "gradient checkpointing",
        False,
        "Recomputes activations in the backward pass. Switch it on if memory runs out: slower, same result.",
        kohya="--gradient_checkpointing",
        ai_toolkit=("train.gradient_checkpointing", "on in AI-Toolkit, off here"),
        onetrainer="Gradient Checkpointing",
        everydream2="--gradient_checkpointing",
    )
    offload: str = setting(
        "offload to CPU memory",
        "none",
        "What to keep in CPU memory when you train on a GPU. activations: what the backward pass needs. optimizer:"
        " the optimizer state. layers: as many blocks of the model as do not fit (use it with gradient checkpointing;"
        " for full weights you need fused backward pass too). Saves GPU memory; slower, same result.",
        choices=OFFLOADS,
        advanced=True,
        kohya=(
            "--cpu_offload_checkpointing",
            "`activations`, with gradient checkpointing",
        ),
        ai_toolkit=("model.layer_offloading", "`layers`"),
        onetrainer=("Offload Activations", "`activations`"),
        lunnova=("offload_optimizer", "`optimizer`: deepspeed's ZeRO-Offload"),
    )
    scale_lr: bool = setting(
        "scale rate with batch size",
        False,
        "Multiplies the learning rate by (batch size x accumulation)^0.55. Switch it on to keep one learning rate"
        " for all batch sizes.",
        advanced=True,
        onetrainer=("Learning Rate Scaler", "with the power 0.55, where OneTrainer takes the root"),
        everydream2=("--scale_lr", "with the same power, 0.55"),
    )
    block_rates: str = setting(
        "block learning rates",
        "",
        "Multiplies the learning rate of some blocks: pattern = number, separated by commas, as in input_blocks.* ="
        " 0.5. Patterns work as in Adapter Settings. Empty uses one rate.",
        advanced=True,
        kohya=("down_lr_weight, mid_lr_weight, up_lr_weight", "`input_blocks.*=0.5`"),
    )
    fused_backward: bool = setting(
        "fused backward pass",
        False,
        "Updates each weight as soon as its gradient is computed, and frees the gradient. Saves memory with full"
        " weights; same result. Needs maximum gradient norm 0 and no gradient accumulation.",
        advanced=True,
        kohya=("--fused_backward_pass", "for full weights"),
    )
    options: str = setting(
        "optimizer options",
        "",
        "Extra options of the optimizer (kohya's optimizer_args): name = value, separated by commas, as in betas ="
        " 0.9 0.99, eps = 1e-8. The help page lists them.",
        advanced=True,
        kohya="--optimizer_args",
    )
    compile: str = setting(
        "compile",
        "off",
        "blocks: torch.compile compiles each kind of block of the model before the first step. That can take a few"
        " minutes; steps are then somewhat faster. Try it for long runs. Needs Triton on a GPU, a C++ compiler on the"
        " CPU.",
        choices=COMPILED,
        advanced=True,
        kohya=("--torch_compile", "`blocks`, as musubi-tuner's `--compile`"),
    )
    swapped_blocks: int = setting(
        "blocks in CPU memory",
        0,
        "With offload layers: how many blocks of the model stay in CPU memory. 0 is auto: as few as the plan of the"
        " step and the free memory allow. Set a number if memory runs out or is left over. Same result.",
        low=0,
        high=1000,
        advanced=True,
        kohya=("--blocks_to_swap", "with offload to CPU memory `layers`; 0 is auto. musubi-tuner's has the same name"),
        ai_toolkit=("model.layer_offloading_transformer_percent", "a number of blocks, not a share"),
        onetrainer=("Layer Offload Fraction", "a number of blocks, not a share; 0 is auto"),
    )
    optimizer_class: str = setting(
        "optimizer class",
        "",
        "Any optimizer of an installed package by its import path, in place of optimizer:"
        " pytorch_optimizer.AdEMAMix, torch.optim.NAdam. The help page lists the packages that are allowed. It is"
        " tried on small tensors first. Empty uses optimizer.",
        advanced=True,
        kohya=("--optimizer_type", "an import path, `torch.optim.NAdam`"),
    )

    def __post_init__(self) -> None:
        check_values(self, "Optimizer Settings", _not_allowed)
        check_values(self, "Optimizer Settings", _exclusions, _unreadable)

    def identity(self) -> dict[str, Any]:
        """The settings that change the result, as plain values."""
        return settings_to_hash(self, SPEED_ONLY)

    @property
    def warmup_steps(self) -> int:
        """The steps of the warmup, also where it is a share of total steps."""
        return round(self.warmup if self.warmup >= 1 else self.warmup * self.total_steps)

    @property
    def parsed_options(self) -> Mapping[str, Any]:
        """`options` by name, as values. Raises ValueError where they cannot be read."""
        return options.parse_for(self.record, self.options)

    @property
    def record(self) -> OptimizerRecord:
        """The record of its optimizer, or of the class of a package. Raises ValueError where that is not allowed."""
        if self.optimizer_class:
            return from_package.find_record(self.optimizer_class)
        return OPTIMIZERS.get(self.optimizer)


def spread_over_ranks(settings: OptimizerSettings, ranks: int) -> OptimizerSettings:
    """The settings of a step on several ranks: the accumulation is multiplied by the number of ranks.

    Args:
        settings: those of one rank.
        ranks: how many processes train together.

    Raises:
        ValueError: where ranks could not add up their gradients in time.
    """
    if ranks > 1 and settings.fused_backward:
        raise ValueError(
            f"Optimizer Settings: fused backward pass moves a weight before {ranks} ranks could add up their gradients:"
            " switch it off."
        )
    return replace(settings, accumulation=settings.accumulation * ranks)


def same_state(left: OptimizerSettings, right: OptimizerSettings) -> bool:
    """Whether one can resume from the other's optimizer state: the same optimizer with the same layout of its state.

    Args:
        left: the settings before.
        right: the settings from here on.
    """
    return left.record.name == right.record.name and _state_layout(left) == _state_layout(right)


def _state_layout(settings: OptimizerSettings) -> object:
    return settings.record.state_layout(settings.parsed_options)


def _not_allowed(settings: OptimizerSettings) -> list[str]:
    """Why its optimizer class cannot be one; no other rule can be asked then."""
    try:
        _ = settings.record
    except ValueError as error:
        return [str(error)]
    return []


def _unreadable(settings: OptimizerSettings) -> list[str]:
    """Errors of the settings that are text."""
    errors = []
    try:
        parse_block_rates(settings.block_rates)
    except ValueError as error:
        errors.append(str(error))
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
    if not settings.learning_rate:
        errors.append("learning rate is 0, expected a number above 0")
    if settings.warmup > 1 and not settings.warmup.is_integer():
        errors.append(f"warmup steps is {settings.warmup:g}, expected a whole number, or a share below 1")
    if 0 < settings.total_steps < settings.warmup_steps:
        errors.append(f"warmup steps is {settings.warmup:g} and total steps (schedule) only {settings.total_steps}")
    if settings.floor and settings.schedule == "constant":
        errors.append(
            f"minimum learning rate ratio is {settings.floor} and learning rate schedule constant never falls: set the"
            " ratio to 0 or choose another schedule"
        )
    errors += settings.record.check_settings(settings)
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
    if settings.record.joint_step:
        reasons.append(f"{settings.record.name} takes its step size from all gradients together: use another optimizer")
    return reasons
