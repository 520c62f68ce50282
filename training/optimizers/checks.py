"""Checks optimizer settings against a run before its first step, and remarks on unusual settings."""

from __future__ import annotations

from ...patches.adapters.registry import trainable_kind
from .block_rates import is_text_encoder, is_up, unmatched
from .build import missing
from .record import RunFacts
from .registry import OPTIMIZERS
from .settings import OptimizerSettings


def check_run(settings: OptimizerSettings, run: RunFacts) -> None:
    """Raise ValueError listing every setting that does not fit the run."""
    errors = missing(settings.optimizer)
    if settings.lora_plus != 1 and not any(map(is_up, run.trained)):
        errors.append(
            f"lora_plus {settings.lora_plus:g} sets the learning rate of LoRA up weights, and kind {run.kind} trains"
            " none: set it to 1"
        )
    if settings.text_encoder_rate and not any(map(is_text_encoder, run.trained)):
        errors.append(
            f"text_encoder_rate {settings.text_encoder_rate:g}: the text encoder is not trained: set it to"
            " 0, or switch text_encoder on in Adapter Settings"
        )
    for pattern in unmatched(settings.block_rates, run.trained):
        errors.append(f"block_rates: {pattern!r} matches no trained tensor")
    errors += OPTIMIZERS.get(settings.optimizer).check_run(run)
    if settings.offload == "layers" and trainable_kind(run.kind).full_weights:
        errors.append(
            "offload layers keeps frozen weights in CPU memory, and kind full freezes none: use offload optimizer or"
            " activations"
        )
    if errors:
        raise ValueError("GraftOptimizer: " + "; ".join(errors) + ".")


def remarks(settings: OptimizerSettings) -> list[str]:
    """Warnings for the report: settings that work but are probably not meant, and settings that are ignored."""
    record = OPTIMIZERS.get(settings.optimizer)
    sentences = list(record.remarks(settings))
    if settings.learning_rate >= record.diverges_from:
        sentences.append(
            f"learning_rate {settings.learning_rate:g} is so large for {record.name} that training will probably"
            " diverge in the first steps"
        )
    if settings.total_steps <= 2 * settings.warmup and settings.warmup:
        sentences.append(
            f"warmup takes {settings.warmup} of {settings.total_steps} steps, so the learning rate is at its peak for"
            " half of the run or less"
        )
    return sentences
