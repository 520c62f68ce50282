"""Schedules against formulas written out by hand and against diffusers' own."""

import math

import pytest
import torch
from diffusers.optimization import get_scheduler
from graft_nodes.training.optimizers.learning_rate_schedule import rate_at
from graft_nodes.training.optimizers.settings import OptimizerSettings


def _rates(schedule, **settings):
    held = OptimizerSettings(learning_rate=2.0, schedule=schedule, total_steps=100, **settings)
    return [rate_at(held, step) for step in range(130)]


FALLING = ("linear", "cosine", "cosine-restarts", "polynomial")


def test_schedules_are_at_their_floor_after_the_last_step():
    for schedule in FALLING:
        rates = _rates(schedule, floor=0.1)
        assert rates[0] == 2.0 and rates[99] > rates[100] == pytest.approx(0.2) and rates[129] == rates[100], schedule
    assert set(_rates("constant")) == {2.0}


@pytest.mark.parametrize("schedule", FALLING)
@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (2, 0), (2, 1), (3, 3), (100, 0), (100, 99), (100, 10)])
def test_every_step_of_a_schedule_moves_the_weights(schedule, total, warmup):
    settings = OptimizerSettings(learning_rate=2.0, schedule=schedule, total_steps=total, warmup=warmup)
    rates = [rate_at(settings, step) for step in range(total)]
    assert min(rates) > 1e-6 and max(rates) == 2.0 and rate_at(settings, total) == 0.0


def test_schedules_are_their_formulas():
    for k in (0, 13, 50, 99, 100):  # 100 is the first step after the schedule
        x = k / 100
        assert _rates("linear")[k] == pytest.approx(2 * (1 - x))
        assert _rates("cosine", floor=0.02)[k] == pytest.approx(2 * (0.02 + 0.98 * (1 + math.cos(math.pi * x)) / 2))
        assert _rates("polynomial")[k] == pytest.approx(2 * (1 - x) ** 2)
    restarts = _rates("cosine-restarts")
    assert [k for k in range(1, 100) if restarts[k] > restarts[k - 1]] == [25, 50, 75]


def test_warmup_rises_linearly_and_counts_in_the_horizon():
    rates = _rates("cosine", warmup=10)
    assert rates[:10] == pytest.approx([2 * (k + 1) / 10 for k in range(10)])
    assert rates[10] == 2.0 and rates[100] == pytest.approx(0.0)


def test_a_warmup_below_1_is_a_share_of_the_schedule():
    """EveryDream2's 2% of the decay steps, and a share as kohya and OneTrainer take it."""
    for share, steps in ((0.02, 2), (0.29, 29), (0.5, 50)):
        assert _rates("cosine", warmup=share) == _rates("cosine", warmup=steps)
    assert _rates("cosine", warmup=1) == _rates("cosine", warmup=1.0) and _rates("constant", warmup=0.3)[28] < 2.0
    with pytest.raises(ValueError, match=r"warmup steps is 2.5, expected a whole number, or a share below 1"):
        OptimizerSettings(warmup=2.5)


def test_scale_lr_is_the_documented_power():
    held = OptimizerSettings(learning_rate=1.0, batch_size=4, accumulation=3, scale_lr=True)
    assert rate_at(held, 5) == pytest.approx(12**0.55)


@pytest.mark.parametrize(
    ("schedule", "theirs", "more"),
    [
        ("constant", "constant", {}),
        ("linear", "linear", {}),
        ("cosine", "cosine", {}),
        ("cosine-restarts", "cosine_with_restarts", {"num_cycles": 4}),
        ("polynomial", "polynomial", {"power": 2.0}),
    ],
)
@pytest.mark.parametrize("warmup", [0, 10])
def test_schedules_are_those_of_diffusers(schedule, theirs, more, warmup):
    """But for the warmup: theirs begins with a step of rate 0, which moves nothing, and is one step later."""
    settings = OptimizerSettings(learning_rate=1.0, schedule=schedule, total_steps=40, warmup=warmup)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    if theirs != "constant":
        more = {**more, "num_warmup_steps": warmup, "num_training_steps": 40}
    scheduler = get_scheduler(theirs, optimizer, **more)
    for step in range(40):
        if step < warmup:
            assert rate_at(settings, step) == pytest.approx((step + 1) / warmup)
        else:
            assert rate_at(settings, step) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-6), step
        optimizer.step()
        scheduler.step()
