"""How a LoRA's strength changes during sampling: a multiplier that depends on the share of sampling done."""

from __future__ import annotations

import bisect
import math
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..adapters.rank_mask import TIMESTEPS, RankMask


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
    def from_range(cls, start: float, end: float) -> Schedule:
        """1 from start to end, both included, and 0 outside; both are shares of sampling from 0 to 1."""
        before = ((0.0, 0.0), (start, 0.0)) if start > 0.0 else ()
        after = ((math.nextafter(end, 2.0), 0.0),) if end < 1.0 else ()
        return cls((*before, (start, 1.0), (end, 1.0), *after))

    def at(self, percent: float) -> float:
        """The multiplier at a moment of sampling, on a straight line between its points.

        Args:
            percent: how much of sampling is done, from 0 to 1.
        """
        after = bisect.bisect_right(self.points, percent, key=lambda point: point[0])
        if after == 0:
            return self.points[0][1]
        (left, low), (right, high) = self.points[after - 1], self.points[min(after, len(self.points) - 1)]
        if right <= left:
            return low
        return low + (high - low) * (percent - left) / (right - left)


class MaskedRanks(NamedTuple):
    """Ranks that work by noise level, of layers whose strength may follow a schedule too."""

    mask: RankMask
    schedule: Schedule | None = None

    def at(self, percent: float, timestep: float) -> torch.Tensor:
        """The multiplier of every rank.

        Args:
            percent: how much of sampling is done, from 0 to 1.
            timestep: from 0 (no noise) to 1000.

        Returns:
            (rank,) in float32.
        """
        ranks = self.mask.at(torch.tensor([timestep]))[0].float()
        if self.schedule is None:
            return ranks
        return ranks * self.schedule.at(percent)


class Clock:
    """The current multipliers of all schedules on a model, in one tensor that adapters read.

    Each schedule has an index; index 0 is always 1. `tick` writes to the same memory, so nothing is recomputed or
    recompiled while sampling. A schedule keeps its index while one of `users` (objects with `schedules`) that has it is
    alive; schedules that nobody uses need no index. Masked ranks have an index for each rank, behind the schedules';
    for them the tensor grows.
    """

    def __init__(self, places: int = 64) -> None:
        self._schedules: dict[Schedule, int] = {}
        self._ranks: dict[MaskedRanks, int] = {}
        self._places = places
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        with torch.inference_mode(False):
            self.values = torch.ones(places)

    def index_of(self, schedule: Schedule | MaskedRanks | None) -> int:
        """The index of a schedule's multiplier in `values`, or that of the first of masked ranks. Until the next tick
        the multipliers are those of the start of sampling.
        """
        if schedule is None:
            return 0
        if isinstance(schedule, MaskedRanks):
            return self._index_of_ranks(schedule)
        if schedule not in self._schedules:
            self._schedules[schedule] = self._free_index()
        index = self._schedules[schedule]
        self.values[index] = schedule.at(0.0)
        return index

    def _index_of_ranks(self, ranks: MaskedRanks) -> int:
        count = ranks.mask.rank
        if ranks not in self._ranks:
            used = self._schedules_in_use()
            self._ranks = {other: first for other, first in self._ranks.items() if other in used}
            self._ranks[ranks] = self._find_free(count)
        first = self._ranks[ranks]
        missing = first + count - len(self.values)
        if missing > 0:
            with torch.inference_mode(False):
                self.values = torch.cat((self.values, self.values.new_ones(missing)))
        self.values[first : first + count] = ranks.at(0.0, TIMESTEPS).to(self.values)
        return first

    def _find_free(self, count: int) -> int:
        """The first of `count` indices in a row that no ranks have."""
        first = self._places
        for ranks, start in sorted(self._ranks.items(), key=lambda entry: entry[1]):
            if first + count <= start:
                return first
            first = start + ranks.mask.rank
        return first

    def _schedules_in_use(self) -> set[Schedule | MaskedRanks]:
        return {schedule for user in self.users for schedule in user.schedules}

    def _free_index(self) -> int:
        places = self._places - 1
        if len(self._schedules) == places:
            used = self._schedules_in_use()
            self._schedules = {schedule: index for schedule, index in self._schedules.items() if schedule in used}
        if len(self._schedules) == places:
            raise ValueError(f"at most {places} different schedules work on one model; use fewer")
        return min(set(range(1, places + 1)) - set(self._schedules.values()))

    def to(self, device: torch.device) -> None:
        """Move the multipliers to the device of the activations."""
        self.values = self.values.to(device)

    def tick(self, percent: float, timestep: float | None = None) -> bool:
        """Set every multiplier to its value when `percent` of sampling is done, at a timestep from 0 (no noise) to
        1000; without one, as if the timesteps were those of `percent`. Returns whether any of them has changed.
        """
        if timestep is None:
            timestep = TIMESTEPS * (1.0 - percent)
        before = self.values.clone()
        for schedule, index in self._schedules.items():
            self.values[index] = schedule.at(percent)
        for ranks, first in self._ranks.items():
            self.values[first : first + ranks.mask.rank] = ranks.at(percent, timestep).to(self.values)
        return not torch.equal(before, self.values)
