"""Decays against the formulas of diffusers and of Karras 2024 written out; settings that cannot be are all named."""

import math

import pytest
import torch
from graft_nodes.ema.decay import (
    EMASettings,
    check_horizon,
    decay_at,
    decay_over,
    gamma_of_width,
    parse_widths,
    remarks,
)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"schedule": "linear"}, "schedule is 'linear', expected one of constant, ramp, warmup, power"),
        ({"decay": 1.0}, "decay is 1.0"),
        ({"decay": -0.1}, "decay is -0.1"),
        ({"inv_gamma": 0.0}, "warmup inverse gamma is 0.0"),
        ({"power": 0.0}, "warmup power is 0.0"),
        ({"inv_gamma": math.nan}, "warmup inverse gamma is nan"),
        ({"power": math.nan}, "warmup power is nan"),
        ({"target": 0.0}, "start share at the end is 0.0"),
        ({"target": 1.0}, "start share at the end is 1.0"),
        ({"interval": 0}, "update every N steps is 0, expected from 1"),
        ({"snapshots": -1}, "snapshot every N steps is -1"),
        ({"switch_every": -1}, "reset to average every N steps is -1"),
        ({"snapshots": 1, "widths": (0.1,)}, "two or more different snapshot widths"),
        ({"snapshots": 1, "widths": (0.1, 0.2, 0.1)}, "two or more different snapshot widths"),
        ({"snapshots": 1, "widths": (0.1, 0.1000001)}, "two or more different snapshot widths (to six digits)"),
        ({"interval": 2, "snapshots": 3}, "must be multiples of update every N steps, which is 2"),
        ({"interval": 2, "switch_every": 3}, "must be multiples of update every N steps, which is 2"),
        ({"device": "cuda"}, "store average on is 'cuda', expected one of same, host"),
        ({"widths": ()}, "expected one or more above 0 and below 0.28"),
        ({"widths": (0.28,)}, "expected one or more above 0 and below 0.28"),
        ({"widths": (0.1, 0.0)}, "expected one or more above 0 and below 0.28"),
        ({"begin_after": -1}, "start after N steps is -1"),
        ({"min_decay": 1.0}, "minimum decay is 1.0"),
        ({"decay": 0.5, "min_decay": 0.6}, "minimum decay is 0.6, expected at most decay, which is 0.5"),
    ],
)
def test_settings_that_cannot_be(wrong, said):
    with pytest.raises(ValueError) as raised:
        EMASettings(**wrong)
    assert str(raised.value).startswith("EMA Settings: ") and said in str(raised.value)


def test_everything_wrong_is_named_at_once():
    with pytest.raises(ValueError, match=r"schedule is .*decay is .*update every N steps is"):
        EMASettings("linear", decay=2.0, interval=0)


@pytest.mark.parametrize(
    "settings",
    [
        {"decay": 0.0},
        {"interval": 1, "snapshots": 3, "switch_every": 5},
        {"interval": 2, "snapshots": 4, "switch_every": 6},
        {"widths": (0.279,)},
        {"device": "host"},
        {"decay": 0.5, "min_decay": 0.5, "begin_after": 1},
    ],
)
def test_settings_at_their_bounds(settings):
    EMASettings(**settings)


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("interval", "update every N steps"),
        ("snapshots", "snapshot every N steps"),
        ("switch_every", "reset to average every N steps"),
        ("begin_after", "start after N steps"),
    ],
)
def test_an_average_that_would_never_begin_is_refused(name, label):
    check_horizon(EMASettings(**{name: 5}), 5)
    with pytest.raises(ValueError, match=f"{label} is 6, longer than the run"):
        check_horizon(EMASettings(**{name: 6}), 5)


def test_widths_are_read_with_spaces_and_commas():
    assert parse_widths(" 0.05, 0.1 .2") == (0.05, 0.1, 0.2) and parse_widths("") == ()
    with pytest.raises(ValueError, match="'1x' is not a number"):
        parse_widths("0,1x")


@pytest.mark.parametrize("width", [0.01, 0.05, 0.1, 0.25])
def test_gamma_has_the_width_of_its_density(width):
    """The standard deviation of a density in proportion to t**gamma on 0..1, summed up in float64."""
    t = torch.linspace(0, 1, 2_000_001, dtype=torch.float64)
    weights = t ** gamma_of_width(width)
    weights /= weights.sum()
    mean = (weights * t).sum()
    assert float(((t - mean) ** 2 * weights).sum().sqrt()) == pytest.approx(width, rel=1e-4)


@pytest.mark.parametrize("width", [0.0, 12**-0.5, 1.0])
def test_a_width_that_no_power_has_is_refused(width):
    with pytest.raises(ValueError, match=r"relative width above 0 and below 0\.2887"):
        gamma_of_width(width)


def test_each_schedule_is_its_formula():
    plain = {
        "constant": lambda step: 0.9,
        "ramp": lambda step: min(0.9, step / (9 + step)) if step > 1 else 0.0,
        "warmup": lambda step: min(0.9, 1 - (1 + (step - 1) / 2.0) ** -0.75) if step > 1 else 0.0,
        "power": lambda step: (1 - 1 / step) ** (gamma_of_width(0.2) + 1),
        "target": lambda step: 0.3 ** (1 / 50),
    }
    for schedule, formula in plain.items():
        settings = EMASettings(schedule, 0.9, inv_gamma=2.0, power=0.75, target=0.3, widths=(0.2, 0.1))
        for step in (1, 2, 3, 10, 200):
            assert decay_at(settings, step, 50) == pytest.approx(formula(step), abs=1e-12), schedule
    assert decay_at(EMASettings("target", target=0.3), 1, 0) == 0.3
    with pytest.raises(ValueError, match="the first step is 1, got 0"):
        decay_at(EMASettings(), 0, 10)


@pytest.mark.parametrize("schedule", ["constant", "ramp", "warmup", "power", "target"])
def test_an_update_over_several_steps_has_the_product_of_their_decays(schedule):
    settings = EMASettings(schedule, 0.9, interval=3)
    for step in (1, 2, 3, 6, 30):
        steps = [past for past in (step - 2, step - 1, step) if past >= 1]
        expected = math.prod(decay_at(EMASettings(schedule, 0.9), past, 40) for past in steps)
        assert decay_over(settings, step, 40) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("settings", "steps", "said"),
    [
        ({"decay": 0.9999}, 250, "98% of the starting weights: lower decay to 0.9908 for 10%"),
        ({"decay": 0.999}, 100, "90% of the starting weights: lower decay to 0.9772 for 10%"),
        ({"decay": 0.999, "interval": 50}, 149, "90% of the starting weights"),
        ({"decay": 0.999}, 1000, ""),
        ({"decay": 0.9999, "schedule": "ramp"}, 250, ""),
        ({"schedule": "target", "target": 0.9}, 250, ""),
    ],
)
def test_an_average_that_cannot_move_in_so_few_steps_is_said(settings, steps, said):
    """By the share of the starting weights that its own decays leave, step for step."""
    ema = EMASettings(**settings)
    left = math.prod(decay_over(ema, step, steps) for step in range(1, steps + 1) if step % ema.interval == 0)
    found = remarks(ema, steps)
    assert len(found) == bool(said) and said in " ".join(found)
    assert not said or left > 0.5


@pytest.mark.parametrize("schedule", ["constant", "ramp", "warmup"])
def test_a_schedule_that_starts_later_is_the_same_one_moved(schedule):
    plain, later = EMASettings(schedule, 0.9), EMASettings(schedule, 0.9, begin_after=5)
    assert [decay_at(later, step, 30) for step in range(1, 6)] == [0.0] * 5
    assert [decay_at(later, step + 5, 30) for step in range(1, 26)] == [
        decay_at(plain, step, 30) for step in range(1, 26)
    ]


def test_decays_are_those_of_diffusers_one_by_one():
    training_utils = pytest.importorskip("diffusers.training_utils")
    weights = [torch.nn.Parameter(torch.zeros(1))]
    for warmup in (False, True):
        theirs = training_utils.EMAModel(
            weights, decay=0.95, min_decay=0.4, update_after_step=3, use_ema_warmup=warmup, inv_gamma=2.0, power=0.7
        )
        ours = EMASettings("warmup" if warmup else "ramp", 0.95, begin_after=3, min_decay=0.4, inv_gamma=2.0, power=0.7)
        decays = [decay_at(ours, step, 100) for step in range(1, 101)]
        assert decays == [theirs.get_decay(step) for step in range(1, 101)]
        assert decays[:4] == [0.0] * 4 and decays[4] == 0.4 and decays[-1] > 0.9


def test_an_average_that_starts_later_forgets_the_starting_weights():
    assert remarks(EMASettings(decay=0.9999), 250) and not remarks(EMASettings(decay=0.9999, begin_after=10), 250)
