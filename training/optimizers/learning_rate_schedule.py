"""The learning rate at each step: warmup, then constant, linear, cosine (1608.03983), with restarts, or polynomial."""

from __future__ import annotations

import math

from .settings import OptimizerSettings

RESTARTS = 4  # how often cosine-restarts falls


def peak_rate(settings: OptimizerSettings) -> float:
    """The highest learning rate of the schedule. With scale_lr it grows with the pictures of a step to the power of
    0.55.

    Args:
        settings: the learning rate; for an optimizer without one (adacoor) the result is its step size.
    """
    fixed_rate = settings.record.fixed_rate
    if fixed_rate is not None:
        return fixed_rate
    if settings.scale_lr:
        return settings.learning_rate * (settings.batch_size * settings.accumulation) ** 0.55
    return settings.learning_rate


def rate_at(settings: OptimizerSettings, step: int) -> float:
    """The learning rate of an optimizer step.

    It rises linearly during the warmup, and is at the floor after `total_steps`. linear, polynomial (power 2) and
    cosine fall between the two; cosine-restarts falls four times over the same length. As in diffusers (and with it
    sd-scripts and EveryDream2), the last step is just above the floor: with floor 0 it still moves the weights.

    Args:
        settings: the schedule.
        step: the step, 0 is the first.

    Raises:
        ValueError: if the length is open (`total_steps` 0) and the schedule depends on it.
    """
    peak, warmup = peak_rate(settings), settings.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if settings.schedule == "constant":
        return peak
    if not settings.total_steps:
        raise ValueError(
            f"total steps (schedule) is 0, so the length of learning rate schedule {settings.schedule} is open."
        )
    # The first step after the warmup has the peak, and the first one after the schedule (total_steps) the floor.
    progress = 1.0
    if step < settings.total_steps:
        progress = (step - warmup) / (settings.total_steps - warmup)
    if settings.schedule == "cosine-restarts" and progress < 1.0:
        progress = (progress * RESTARTS) % 1.0
    return peak * (settings.floor + (1 - settings.floor) * _left(settings.schedule, progress))


def _left(schedule: str, done: float) -> float:
    """How much is left of what the rate falls by, when a fraction `done` of the schedule is over."""
    if schedule == "linear":
        return 1 - done
    if schedule == "polynomial":
        return (1 - done) ** 2
    return 0.5 * (1 + math.cos(math.pi * done))
