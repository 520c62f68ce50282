"""Checks optimizer settings against a run before its first step, and remarks on unusual settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ...patches.adapters.registry import trainable_kind
from ...settings.declaration import raise_errors
from .block_rates import is_text_encoder, is_up, parse_block_rates, unmatched_patterns
from .build import missing_for
from .learning_rate_schedule import peak_rate, rate_at
from .record import RunFacts
from .settings import OptimizerSettings
from .trial import find_faults


def check_run(settings: OptimizerSettings, run: RunFacts) -> None:
    """Check settings against what a run trains.

    Args:
        settings: the optimizer settings.
        run: what is trained.

    Raises:
        ValueError: listing every setting that does not fit.
    """
    errors = missing_for(settings.record)
    if settings.optimizer_class and not errors:
        errors += find_faults(settings)
    if settings.lora_plus != 1 and not any(map(is_up, run.trained)):
        errors.append(
            f"LoRA+ ratio {settings.lora_plus:g} sets the learning rate of LoRA up weights, and adapter type {run.kind}"
            " trains none: set it to 1"
        )
    if settings.text_encoder_rate and not any(map(is_text_encoder, run.trained)):
        errors.append(
            f"text encoder learning rate is {settings.text_encoder_rate:g}, and the text encoder is not trained: set it"
            " to 0, or switch train text encoder on in Adapter Settings"
        )
    if run.words_rate and not _takes_other_rates(settings):
        errors.append(
            f"{settings.record.name} has one learning rate for all that is trained, and Train Words has learning rate"
            f" {run.words_rate:g}: set that to 0"
        )
    for pattern in unmatched_patterns(settings.block_rates, run.trained):
        errors.append(f"block learning rates: {pattern!r} matches no trained tensor")
    record = settings.record
    errors += record.check_run(run)
    if run.trained:
        errors += record.cannot_learn(settings, _highest_rate(settings), run)
    if settings.offload == "layers" and trainable_kind(run.kind).full_weights and not settings.fused_backward:
        errors.append(
            "offload to CPU memory is layers, and adapter type full trains the weights that wait there, one after the"
            " other in the backward pass: switch fused backward pass on, or set offload to CPU memory to optimizer or"
            " activations"
        )
    if settings.compile != "off" and run.dropout:
        errors.append(
            "compile is blocks, and a dropout of Adapter Settings draws anew in every layer, which cannot be compiled:"
            " set compile to off, or the dropouts to 0"
        )
    raise_errors("Optimizer Settings", errors)


def check_rate(settings: OptimizerSettings) -> None:
    """Raise ValueError for a learning rate at which no run learns anything."""
    errors = settings.record.cannot_learn(settings, _highest_rate(settings), None)
    raise_errors("Optimizer Settings", errors)


def _highest_rate(settings: OptimizerSettings) -> float:
    """The highest learning rate that a tensor may get."""
    factors = [factor for _, factor in parse_block_rates(settings.block_rates)]
    rate = peak_rate(settings) * max([1.0, *factors]) * max(1.0, settings.lora_plus)
    return max(rate, settings.text_encoder_rate)


def _takes_other_rates(settings: OptimizerSettings) -> bool:
    """Whether the optimizer can train some of its tensors at another learning rate."""
    try:
        replace(settings, text_encoder_rate=settings.learning_rate / 2)
    except ValueError:
        return False
    return True


def remarks(settings: OptimizerSettings) -> list[str]:
    """Warnings for the report: settings that work but are probably not meant, and settings that are ignored."""
    record = settings.record
    sentences = list(record.remarks(settings))
    if settings.learning_rate >= record.diverges_from:
        sentences.append(
            f"learning rate {settings.learning_rate:g} is so large for {record.name} that training will probably"
            " diverge in the first steps"
        )
    elif record.usual_rates is not None:
        sentences += _unusual_rate(settings, *record.usual_rates)
    if 0 < settings.total_steps <= 2 * settings.warmup_steps:
        sentences.append(
            f"warmup steps is {settings.warmup_steps} of {settings.total_steps} steps, so the learning rate is at its"
            " peak for half of the run or less"
        )
    return sentences


def _unusual_rate(settings: OptimizerSettings, least: float, most: float) -> list[str]:
    rate = settings.learning_rate
    usual = f"what is usual for {settings.record.name} ({least:g} to {most:g})"
    if rate < least:
        return [f"learning rate {rate:g} is below {usual}: weights will hardly move"]
    if rate > most:
        return [f"learning rate {rate:g} is above {usual}: lower it if the loss jumps"]
    return []


def schedule_remarks(
    settings: OptimizerSettings, first: int, until: int, is_open: bool = False, rates: Sequence[float] = ()
) -> list[str]:
    """Sentences about some steps of a run, where their learning rates may not be those that were meant.

    Args:
        settings: the schedule.
        first: the step that the run is at.
        until: the step that it goes to.
        is_open: whether the schedule was left to the steps asked for, and so ends with these.
        rates: the learning rates of the steps before.
    """
    if first == until:
        return []
    sentences = _remark_missed_warmup(settings, first, rates)
    if settings.schedule == "constant":
        return sentences
    if is_open:
        return [*sentences, *_remark_new_plan(settings, first, until, rates)]
    return [*sentences, *_remark_other_end(settings, first, until)]


def _remark_missed_warmup(settings: OptimizerSettings, first: int, rates: Sequence[float]) -> list[str]:
    """Where these settings came after the first step: what of their warmup is over."""
    warmup = settings.warmup_steps
    missed = min(warmup, first, len(rates))
    if all(math.isclose(rates[step], rate_at(settings, step)) for step in range(missed)):
        return []
    rest = "so it is over"
    if first < warmup:
        rest = f"so only {warmup - first} of them are left"
    return [
        f"warmup steps is {warmup} and counts from the run's first step, and these settings begin at step"
        f" {first + 1}, {rest}: step {first + 1} has learning rate {rate_at(settings, first):g}. For a slow start put a"
        " Train Step of a few steps with a lower learning rate before this one"
    ]


def _remark_new_plan(settings: OptimizerSettings, first: int, until: int, rates: Sequence[float]) -> list[str]:
    """Where an open schedule begins in the middle of a run: the steps before had an end of their own."""
    if not first or not rates:
        return []
    return [
        f"total steps (schedule) is 0, so the schedule ({settings.schedule}) is planned anew and ends at step {until}:"
        f" step {first} had learning rate {rates[-1]:g}, and step {first + 1} has {rate_at(settings, first):g}. For one"
        f" schedule over the whole chain, set total steps (schedule) to {until} and train it from Start Training"
    ]


def _remark_other_end(settings: OptimizerSettings, first: int, until: int) -> list[str]:
    total, schedule = settings.total_steps, settings.schedule
    if until == total:
        return []
    if until > total:
        after = until - max(first, total)
        return [
            f"{after} of these {until - first} steps come after the {total} of the schedule ({schedule}), at learning"
            f" rate {rate_at(settings, until - 1):g}: set total steps (schedule) to {until}, or to 0 for the steps"
            " asked for"
        ]
    return [
        f"the schedule ({schedule}) is planned for {total} steps and these end at step {until}, at learning rate"
        f" {rate_at(settings, until - 1):g}: unless more steps follow, set total steps (schedule) to {until}, or to 0"
        " for the steps asked for"
    ]
