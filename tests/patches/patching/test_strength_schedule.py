"""Multipliers over sampling: between points by hand, steps, ends, and what is refused."""

import gc

import pytest
import torch
from graft_nodes.patches.adapters.rank_mask import RankMask
from graft_nodes.patches.patching.strength_schedule import Clock, MaskedRanks, Schedule


@pytest.mark.parametrize(
    ("percent", "expected"),
    [(0.0, 0.0), (0.1, 0.0), (0.2, 0.0), (0.35, 0.5), (0.5, 1.0), (0.7, 1.0), (0.8, 0.25), (1.0, 0.25)],
)
def test_points(percent, expected):
    schedule = Schedule(((0.2, 0.0), (0.5, 1.0), (0.8, 1.0), (0.8, 0.25)))
    assert schedule.at(percent) == pytest.approx(expected)


@pytest.mark.parametrize(("start", "end"), [(0.0, 1.0), (0.25, 0.5), (0.0, 0.5), (0.25, 1.0), (0.5, 0.5)])
def test_between(start, end):
    schedule = Schedule.from_range(start, end)
    for percent in (0.0, 0.1, 0.25, 0.3, 0.5, 0.51, 0.9, 1.0):
        assert schedule.at(percent) == float(start <= percent <= end), percent


@pytest.mark.parametrize(
    "points", [(), ((0.5, 1.0), (0.2, 1.0)), ((-0.1, 1.0),), ((0.0, 1.0), (1.1, 1.0)), ((0.0, float("nan")),)]
)
def test_refused(points):
    with pytest.raises(ValueError, match="a schedule needs points"):
        Schedule(points)


def test_a_clock_keeps_its_memory():
    clock, rising = Clock(), Schedule(((0.0, 0.0), (1.0, 2.0)))
    memory = clock.values.data_ptr()
    assert (
        clock.index_of(None) == 0 and clock.index_of(rising) == clock.index_of(Schedule(((0.0, 0.0), (1.0, 2.0)))) == 1
    )
    with torch.inference_mode():
        clock.tick(0.25)
    assert clock.values[:2].tolist() == [1.0, 0.5] and clock.values.data_ptr() == memory


def test_a_clock_gives_the_places_of_adapters_that_are_gone_to_others():
    clock = Clock()

    class Adapter:
        def __init__(self, *levels):
            self.schedules = {Schedule(((0.0, level),)) for level in levels}
            clock.users.add(self)
            self.places = {clock.index_of(schedule): schedule.at(0.0) for schedule in self.schedules}

    kept = Adapter(0.25, 0.75)
    for number in range(200):
        Adapter(float(number), 0.75)
    last = Adapter(300.0)
    clock.tick(0.5)
    assert all(float(clock.values[place]) == level for of in (kept, last) for place, level in of.places.items())
    assert not kept.places.keys() & last.places.keys() and float(clock.values[0]) == 1.0
    with pytest.raises(ValueError, match="at most 63 different schedules"):
        Adapter(*map(float, range(400, 463)))


class User:
    """What reads multipliers, as long as it lives."""

    def __init__(self, *schedules):
        self.schedules = schedules


def test_masked_ranks_lie_in_a_row_behind_schedules_where_others_are_gone():
    clock = Clock(places=8)
    four, six, three, five = (MaskedRanks(RankMask(rank, 1)) for rank in (4, 6, 3, 5))
    first, second = User(four), User(six)
    clock.users.update((first, second))
    assert (clock.index_of(four), clock.index_of(six), clock.index_of(four), len(clock.values)) == (8, 12, 8, 18)
    del first
    gc.collect()
    others = User(three, five)
    clock.users.add(others)
    assert (clock.index_of(three), clock.index_of(five), len(clock.values)) == (8, 18, 23), "three fit where four were"
    for ranks, place in ((three, 8), (six, 12), (five, 18)):
        alone = [1.0] + [0.0] * (ranks.mask.rank - 1)  # on noise alone one rank works
        assert clock.values[place : place + ranks.mask.rank].tolist() == alone
