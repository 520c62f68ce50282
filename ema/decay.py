"""The decay of a weight average, average <- decay * average + (1 - decay) * weights, by step t = 1, 2 …:

    constant    decay
    ramp        min(decay, t / (9 + t)), 0 at the first step, at least min_decay from the second on
    warmup      min(decay, 1 - (1 + (t - 1) / inv_gamma)^-power), as ramp at the first step and from the second on
    power       (1 - 1 / t)^(gamma + 1): the weights of step s count as s^gamma
    target      target^(1 / total steps): the share of the starting weights that is left at the end

constant, ramp and warmup count t from `begin_after`, and are 0 up to it. ramp and warmup are diffusers' (EMAModel
without and with use_ema_warmup), power is Karras 2024 (arXiv 2312.02696, section 3.1), and target is EveryDream2's.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from ..settings.declaration import check_values, setting

SCHEDULES = ("constant", "ramp", "warmup", "power", "target")
DEVICES = ("same", "host")
_MOST_LEFT, _USUAL_LEFT = 0.5, 0.1  # of the starting weights in an average at the end of a run


def parse_widths(text: str) -> tuple[float, ...]:
    """Relative widths from text such as "0.05 0.10" (spaces or commas); ValueError names what is not a number."""
    widths = []
    for word in text.replace(",", " ").split():
        try:
            widths.append(float(word))
        except ValueError:
            raise ValueError(f"{word!r} is not a number, expected numbers such as '0.05 0.10'") from None
    return tuple(widths)


@dataclass(frozen=True)
class EMASettings:
    """The settings of a weight average (EMA); plain values, checked on creation.

    - `decay` caps constant, ramp and warmup; `inv_gamma` and `power` shape warmup. `min_decay` is the least that ramp
      and warmup come to after their first step.
    - Up to step `begin_after` the average of constant, ramp and warmup is the weights.
    - `target`: the fraction of the first weights that remains after the whole run.
    - `widths`: relative widths (sigma_rel); the first one sets the power schedule. `interval` is in steps.
    - Every `snapshots` steps (0: never) a power-function average of each width is saved.
    - Every `switch_every` steps (0: never) the trained weights are set to the average.
    """

    schedule: str = setting(
        "decay schedule",
        "constant",
        "How the decay changes over the run. constant: the decay below. ramp: min(decay, (1+n)/(10+n)), good for"
        " short runs. warmup: 1-(1+n/g)^-p, where g is the warmup inverse gamma and p the warmup power. power: Karras"
        " 2024, with the first width. target: chosen so that after the run's total steps, the start share below is"
        " left.",
        choices=SCHEDULES,
        onetrainer=("EMA", "`ramp`, which is OneTrainer's"),
        diffusers=(
            "use_ema_warmup",
            "`warmup` with it, `ramp` without",
        ),
    )
    decay: float = setting(
        "decay",
        0.999,
        "How much of the average is kept at each step. 0.999 averages about 1000 steps; lower it to 0.99 for short"
        " runs. If the average lags behind the weights, lower it; if it is almost the same, raise it.",
        low=0.0,
        high=0.999999,
        step=0.0001,
        ai_toolkit="train.ema_config.ema_decay",
        onetrainer=(
            "EMA Decay",
            "OneTrainer's is per update, Graft's per step: for an interval of 5 take the fifth root, 0.9998 for 0.999",
        ),
        everydream2=(
            "--ema_decay_rate",
            "with decay schedule `constant`. EveryDream2's is per update, Graft's per step: for 0.99 every 50 steps"
            " set 0.9998",
        ),
        diffusers=("decay", "0.9999 in diffusers, 0.999 here"),
    )
    inv_gamma: float = setting(
        "warmup inverse gamma",
        1.0,
        "For decay schedule warmup. Raise it to let the decay grow more slowly.",
        low=0.001,
        high=10000.0,
        step=0.1,
        advanced=True,
        diffusers="inv_gamma",
    )
    power: float = setting(
        "warmup power",
        2 / 3,
        "For decay schedule warmup. Raise it to let the decay grow faster.",
        low=0.001,
        high=10.0,
        step=0.0001,
        finer=True,
        advanced=True,
        diffusers="power",
    )
    target: float = setting(
        "start share at the end",
        0.1,
        "For decay schedule target: the fraction of the starting weights that is left in the average at the end of"
        " the run.",
        low=0.0001,
        high=0.9999,
        step=0.01,
        advanced=True,
        everydream2=("--ema_strength_target", "with decay schedule `target`"),
    )
    interval: int = setting(
        "update every N steps",
        1,
        "Updates the average every N steps. Raise it to save time. Decay is still the decay per step: with 50, decay"
        " 0.99 per step becomes 0.605 per update (0.99^50). EveryDream2's decay is per update: for its 0.99 every 50"
        " steps, set decay to 0.9998. An update is one pass over all tensors, as with diffusers' foreach.",
        low=1,
        high=100000,
        advanced=True,
        onetrainer="EMA Update Step Interval",
        everydream2=(
            "--ema_update_interval",
            "with gradient accumulation EveryDream2 multiplies it, Graft does not",
        ),
        diffusers=("foreach", "no switch: an update is always one pass over all tensors"),
    )
    device: str = setting(
        "store average on",
        "same",
        "Where the average is kept. same: on the device of the weights. host: in CPU memory, to save GPU memory.",
        choices=DEVICES,
        advanced=True,
        everydream2=("--ema_device", "`cpu` is `host`, `cuda` is `same`"),
        diffusers=(
            "device",
            "`cpu` is `host`. Copies go through pinned memory automatically, without pin_memory and non_blocking",
        ),
    )
    snapshots: int = setting(
        "snapshot every N steps",
        0,
        "Saves an average of each width to disk every N steps. EMA Merge makes an average of any width from them. 0"
        " is never.",
        low=0,
        high=1000000,
        advanced=True,
    )
    widths: tuple[float, ...] = setting(
        "snapshot widths",
        "0.05 0.10",
        "The widths of the averages in the snapshots: how far back each reaches, as fractions of the run. Decay"
        " schedule power uses the first. Keep the default unless you know better.",
        read=parse_widths,
        advanced=True,
    )
    switch_every: int = setting(
        "reset to average every N steps",
        0,
        "Replaces the weights with their average every N steps and continues training from there. 0 is never.",
        low=0,
        high=1000000,
        advanced=True,
    )
    begin_after: int = setting(
        "start after N steps",
        0,
        "For decay schedule constant, ramp and warmup: until step N the average is the weights themselves, and the"
        " schedule starts there. Raise it to keep the first, rough steps out of the average.",
        low=0,
        high=1000000,
        advanced=True,
        diffusers="update_after_step",
    )
    min_decay: float = setting(
        "minimum decay",
        0.0,
        "For decay schedule ramp and warmup: the decay is never below this after the first step. Raise it to average"
        " more from the start.",
        low=0.0,
        high=0.999999,
        step=0.0001,
        advanced=True,
        diffusers="min_decay",
    )

    def __post_init__(self) -> None:
        check_values(self, "EMA Settings", _exclusions)


def _exclusions(settings: EMASettings) -> list[str]:
    problems = []
    if not settings.widths or not all(0.0 < width < 0.28 for width in settings.widths):
        problems.append(f"snapshot widths are {settings.widths}, expected one or more above 0 and below 0.28")
    different = {f"{width:g}" for width in settings.widths}  # as snapshots' files are named
    if settings.snapshots and (len(different) < 2 or len(different) < len(settings.widths)):
        problems.append(f"snapshots need two or more different snapshot widths (to six digits), got {settings.widths}")
    if settings.min_decay > settings.decay:
        problems.append(f"minimum decay is {settings.min_decay:g}, expected at most decay, which is {settings.decay:g}")
    if settings.interval > 1 and (settings.snapshots % settings.interval or settings.switch_every % settings.interval):
        problems.append(
            "snapshot every N steps and reset to average every N steps must be multiples of update every N steps,"
            f" which is {settings.interval}: the average has no new value in between"
        )
    return problems


def check_horizon(settings: EMASettings, total_steps: int) -> None:
    """Raise ValueError if the run ends before the average's first update, snapshot or switch."""
    steps_of = {
        "update every N steps": settings.interval,
        "snapshot every N steps": settings.snapshots,
        "reset to average every N steps": settings.switch_every,
        "start after N steps": settings.begin_after,
    }
    too_late = [f"{label} is {steps}" for label, steps in steps_of.items() if steps > total_steps]
    if too_late:
        raise ValueError(
            f"EMA Settings: {' and '.join(too_late)}, longer than the run (total steps in Optimizer Settings is"
            f" {total_steps})."
        )


def remarks(settings: EMASettings, steps: int) -> list[str]:
    """What to say of a run of so many steps, where the average cannot move far in them. ramp and warmup forget the
    starting weights at the first update, as constant does that starts later, and target is made for the length.
    """
    if settings.schedule != "constant" or steps < settings.interval or settings.begin_after:
        return []
    left = settings.decay ** (steps - steps % settings.interval)
    if left <= _MOST_LEFT:
        return []
    return [
        f"after {steps} steps the average still has {left:.0%} of the starting weights: lower decay to"
        f" {_USUAL_LEFT ** (1 / steps):.4g} for {_USUAL_LEFT:.0%}, or choose decay schedule ramp in EMA Settings"
    ]


@functools.lru_cache(maxsize=4096)
def gamma_of_width(width: float) -> float:
    """Exponent gamma of the power-function average whose relative width (sigma_rel) is `width`.

    The width is the standard deviation of the profile t^gamma on 0..1: sigma_rel^2 = (gamma + 1) / ((gamma + 2)^2
    (gamma + 3)) (Karras 2024, algorithm 2). Raises ValueError unless `width` is above 0 and below 12^-0.5, that of a
    plain mean.
    """
    if not 0.0 < width < 12**-0.5:
        raise ValueError(
            f"A power-function average has a relative width above 0 and below {12**-0.5:.4f}; got {width}."
        )
    # The width falls with gamma, so bisection finds the only root.
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
    """The decay of one step, from 0 (the average becomes the weights) to below 1 (it hardly moves).

    Args:
        settings: the schedule; the module's head has its formulas.
        step: 1 is the first.
        total_steps: the run's length, for the target schedule.

    Raises:
        ValueError: for a step before the first.
    """
    if step < 1:
        raise ValueError(f"A decay belongs to a step; the first step is 1, got {step}.")
    s = step - 1 - settings.begin_after
    if settings.schedule == "constant":
        return settings.decay if s >= 0 else 0.0
    if settings.schedule in ("ramp", "warmup"):
        if s <= 0:
            return 0.0
        rising = (1 + s) / (10 + s)
        if settings.schedule == "warmup":
            rising = 1 - (1 + s / settings.inv_gamma) ** -settings.power
        return max(settings.min_decay, min(settings.decay, rising))
    if settings.schedule == "power":
        return (1 - 1 / step) ** (gamma_of_width(settings.widths[0]) + 1)
    return settings.target ** (1 / max(1, total_steps))


def decay_over(settings: EMASettings, step: int, total_steps: int) -> float:
    """The decay of an update that stands for the last `interval` steps: the product of their decays, decay^N if it is
    constant. What the average has of the starting weights then does not depend on the interval.

    Args:
        settings: the schedule and the interval.
        step: the step after which the average is updated; 1 is the first.
        total_steps: the run's length, for the target schedule.
    """
    first = max(1, step - settings.interval + 1)
    return math.prod(decay_at(settings, past_step, total_steps) for past_step in range(first, step + 1))
