"""The decay of a weight average: diffusers' schedules, Karras 2024 (arXiv 2312.02696), EveryDream2's target."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

SCHEDULES = ("constant", "ramp", "warmup", "power", "target")


@dataclass(frozen=True)
class EMASettings:
    """The settings of a weight average (EMA); plain values, checked on creation.

    - `decay` caps constant, ramp and warmup; `inv_gamma` and `power` shape warmup.
    - `target`: the fraction of the first weights that remains after the whole run.
    - `widths`: relative widths (sigma_rel); the first one sets the power schedule. `interval` is in steps.
    - Every `snapshots` steps (0: never) a power-function average of each width is saved.
    - Every `switch_every` steps (0: never) the trained weights are set to the average.
    """

    schedule: str = "constant"
    decay: float = 0.999
    inv_gamma: float = 1.0
    power: float = 2 / 3
    target: float = 0.1
    interval: int = 1
    device: str = "same"
    widths: tuple[float, ...] = (0.05, 0.10)
    snapshots: int = 0
    switch_every: int = 0

    def __post_init__(self) -> None:
        problems = []
        if self.schedule not in SCHEDULES:
            problems.append(f"decay schedule is {self.schedule!r}, expected one of {', '.join(SCHEDULES)}")
        if not 0.0 <= self.decay < 1.0:
            problems.append(f"decay is {self.decay}, expected at least 0 and below 1")
        if not (self.inv_gamma > 0 and self.power > 0):
            problems.append(
                f"warmup inverse gamma and warmup power are {self.inv_gamma} and {self.power}, expected above 0"
            )
        if not 0.0 < self.target < 1.0:
            problems.append(f"start share at the end is {self.target}, expected above 0 and below 1")
        if self.interval < 1:
            problems.append(f"update every N steps is {self.interval}, expected 1 or more")
        if self.snapshots < 0 or self.switch_every < 0:
            problems.append(
                "snapshot every N steps and reset to average every N steps are"
                f" {self.snapshots} and {self.switch_every}, expected 0 (never) or more"
            )
        different = {f"{width:g}" for width in self.widths}  # as snapshots' files are named
        if self.snapshots and (len(different) < 2 or len(different) < len(self.widths)):
            problems.append(f"snapshots need two or more different snapshot widths (to six digits), got {self.widths}")
        if self.interval > 1 and (self.snapshots % self.interval or self.switch_every % self.interval):
            problems.append(
                "snapshot every N steps and reset to average every N steps must be multiples of update every N steps,"
                f" which is {self.interval}: the average has no new value in between"
            )
        if self.device not in ("same", "host"):
            problems.append(f"store average on is {self.device!r}, expected same or host")
        if not self.widths or not all(0.0 < width < 0.28 for width in self.widths):
            problems.append(f"snapshot widths are {self.widths}, expected one or more above 0 and below 0.28")
        if problems:
            raise ValueError("EMA Settings: " + "; ".join(problems) + ".")


def check_horizon(settings: EMASettings, total_steps: int) -> None:
    """Raise ValueError if the run ends before the average's first update, snapshot or switch."""
    steps_of = {
        "update every N steps": settings.interval,
        "snapshot every N steps": settings.snapshots,
        "reset to average every N steps": settings.switch_every,
    }
    too_late = [f"{label} is {steps}" for label, steps in steps_of.items() if steps > total_steps]
    if too_late:
        raise ValueError(
            f"EMA Settings: {' and '.join(too_late)}, longer than the run (total steps in Optimizer Settings is"
            f" {total_steps})."
        )


def parse_widths(text: str) -> tuple[float, ...]:
    """Relative widths from text such as "0.05 0.10" (spaces or commas); raises ValueError naming what is no number."""
    widths = []
    for word in text.replace(",", " ").split():
        try:
            widths.append(float(word))
        except ValueError:
            raise ValueError(
                f"EMA Settings: snapshot widths has {word!r}, expected numbers such as '0.05 0.10'."
            ) from None
    return tuple(widths)


@functools.lru_cache(maxsize=4096)
def gamma_of_width(width: float) -> float:
    """Exponent gamma of the power-function average whose relative width (sigma_rel) is `width` (Karras 2024, algorithm
    2).
    """
    if not 0.0 < width < 12**-0.5:
        raise ValueError(
            f"A power-function average has a relative width above 0 and below {12**-0.5:.4f}; got {width}."
        )
    # sigma_rel^2 = (gamma + 1) / ((gamma + 2)^2 (gamma + 3)): falls with gamma, so bisection finds the only root.
    low, high = 0.0, 1.0
    while (high + 1) / ((high + 2) ** 2 * (high + 3)) > width**2:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if (middle + 1) / ((middle + 2) ** 2 * (middle + 3)) > width**2:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def decay_at(settings: EMASettings, step: int, total_steps: int) -> float:
    """The decay of one step; `step` 1 is the first. `total_steps` is the run's length, for the target schedule.

    ramp and warmup follow diffusers: s = step - 1, decay 0 at s = 0, then (1 + s)/(10 + s) or 1 - (1 +
    s/inv_gamma)^-power, up to `decay`.
    """
    if step < 1:
        raise ValueError(f"A decay belongs to a step; the first step is 1, got {step}.")
    s = step - 1
    if settings.schedule == "constant":
        return settings.decay
    if settings.schedule == "ramp":
        if s == 0:
            return 0.0
        return min(settings.decay, (1 + s) / (10 + s))
    if settings.schedule == "warmup":
        if s == 0:
            return 0.0
        return min(settings.decay, 1 - (1 + s / settings.inv_gamma) ** -settings.power)
    if settings.schedule == "power":
        return (1 - 1 / step) ** (gamma_of_width(settings.widths[0]) + 1)
    return settings.target ** (1 / max(1, total_steps))


def decay_over(settings: EMASettings, step: int, total_steps: int) -> float:
    """The decay of an update over the last `interval` steps: the product of their decays (decay^N if constant)."""
    first = max(1, step - settings.interval + 1)
    return math.prod(decay_at(settings, past_step, total_steps) for past_step in range(first, step + 1))
