"""How a LoRA's strength changes during sampling: a multiplier that depends on the share of sampling done."""

from __future__ import annotations

import bisect
import math
import weakref
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Schedule:
    """A strength schedule: a multiplier given by points (percent, multiplier).

    It is linear between points, and constant before the first and after the last. `percent` is 0 at the start of
    sampling (all noise) and 1 at its end, like ComfyUI's start_percent and end_percent. Two points at the same percent
    make a step: from there on the second counts. Raises ValueError unless there are points, finite and in order from 0
    to 1.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        percents = [percent for percent, _ in self.points]
        finite = all(math.isfinite(number) for point in self.points for number in point)
        if not self.points or not finite or percents != sorted(percents) or percents[0] < 0.0 or percents[-1] > 1.0:
            raise ValueError(
                f"a schedule needs points (percent, multiplier) in order, with percents from 0 to 1; got {self.points}"
            )

    @classmethod
    def between(cls, start: float, end: float) -> Schedule:
        """1 from start to end, both included, and 0 outside."""
        before: tuple[tuple[float, float], ...]
        after: tuple[tuple[float, float], ...]
        if start > 0.0:
            before = ((0.0, 0.0), (start, 0.0))
        else:
            before = ()
        if end < 1.0:
            after = ((math.nextafter(end, 2.0), 0.0),)
        else:
            after = ()
        return cls((*before, (start, 1.0), (end, 1.0), *after))

    def at(self, percent: float) -> float:
        """The multiplier when `percent` of sampling is done."""
        after = bisect.bisect_right(self.points, percent, key=lambda point: point[0])
        if after == 0:
            return self.points[0][1]
        (left, low), (right, high) = self.points[after - 1], self.points[min(after, len(self.points) - 1)]
        if right <= left:
            return low
        return low + (high - low) * (percent - left) / (right - left)


class Clock:
    """The current multipliers of all schedules on a model, in one tensor that adapters read.

    Each schedule has an index; index 0 is always 1. `tick` writes to the same memory, so nothing is recomputed or
    recompiled while sampling. A schedule keeps its index while one of `users` (objects with `schedules`) that has it is
    alive; schedules that nobody uses need no index.
    """

    def __init__(self, places: int = 64) -> None:
        self._schedules: dict[Schedule, int] = {}
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        with torch.inference_mode(False):
            self.values = torch.ones(places)

    def place(self, schedule: Schedule | None) -> int:
        """The index of a schedule's multiplier in `values`. Until the next tick the multiplier is that of the start of
        sampling.
        """
        if schedule is None:
            return 0
        if schedule not in self._schedules:
            self._schedules[schedule] = self._free()
        index = self._schedules[schedule]
        self.values[index] = schedule.at(0.0)
        return index

    def _free(self) -> int:
        places = len(self.values) - 1
        if len(self._schedules) == places:
            used = {schedule for user in self.users for schedule in user.schedules}
            self._schedules = {schedule: index for schedule, index in self._schedules.items() if schedule in used}
        if len(self._schedules) == places:
            raise ValueError(f"at most {places} different schedules work on one model; use fewer")
        return min(set(range(1, places + 1)) - set(self._schedules.values()))

    def to(self, device: torch.device) -> None:
        """Move the multipliers to the device of the activations."""
        self.values = self.values.to(device)

    def tick(self, percent: float) -> None:
        """Set every multiplier to its value when `percent` of sampling is done."""
        for schedule, index in self._schedules.items():
            self.values[index] = schedule.at(percent)
