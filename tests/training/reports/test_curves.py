"""Pictures of curves: what is drawn, constants and single values, and the averaging profile against
the average itself.
"""

import pytest
import torch
from graft_nodes.ema.decay import EMASettings
from graft_nodes.ema.shadow import Shadow
from graft_nodes.training.reports.curves import STRONG, Curve, averaging_profile, draw, editor_data, smooth, ticks


def _ink(picture):
    return (picture[0] - torch.tensor(STRONG) / 255).abs().sum(-1) < 1e-4


def test_a_rising_curve_rises():
    picture = draw([Curve([0.0, 1.0, 2.0, 3.0])], "title", "step", "loss")
    assert picture.shape == (1, 540, 960, 3) and picture.dtype == torch.float32
    rows, columns = torch.nonzero(_ink(picture), as_tuple=True)
    left, right = rows[columns < 200].float().mean(), rows[columns > 800].float().mean()
    assert left > right + 200


@pytest.mark.parametrize(
    "values", [[0.5] * 9, [0.0] * 3, [1.5], [1e-30, 1e-30], [1.0, float("nan"), 1.0], [1e9, 1e9 + 1]]
)
def test_constant_single_and_broken_curves_are_drawn(values):
    assert _ink(draw([Curve(values)], "", "", "")).any()


def test_nothing_to_draw_is_said():
    with pytest.raises(ValueError, match="no value is finite"):
        draw([Curve([float("nan"), float("inf")])], "", "", "")


def test_smoothing_takes_out_the_starts_bias():
    assert smooth([2.0] * 5, 0.9) == pytest.approx([2.0] * 5)
    assert smooth([1.0, 3.0], 0.5) == pytest.approx([1.0, (0.25 * 1 + 0.5 * 3) / 0.75])
    assert smooth([1.0, 3.0], 0.0) == [1.0, 3.0]
    with pytest.raises(ValueError, match=r"smoothing is 1\.0"):
        smooth([1.0], 1.0)


def test_ticks_are_round_and_inside():
    assert ticks(0.0, 1.0) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(3, 3) == [3]
    assert all(0.013 <= t <= 0.0171 for t in ticks(0.013, 0.0171))


@pytest.mark.parametrize("schedule", ["constant", "ramp", "warmup", "power", "target"])
@pytest.mark.parametrize("interval", [1, 3])
def test_the_profile_is_what_the_average_does(schedule, interval):
    """The average of one-hot weights is the profile itself."""
    settings, steps = EMASettings(schedule, decay=0.9, interval=interval), 10
    shadow = Shadow.from_weights({"w": torch.eye(steps + 1)[0]})
    for step in range(1, steps + 1):
        shadow.update_({"w": torch.eye(steps + 1)[step]}, settings, step, 20)
    profile = averaging_profile(settings, steps, 20)
    assert sum(profile) == pytest.approx(1.0) and torch.allclose(torch.tensor(profile), shadow.tensors["w"], atol=1e-6)


def test_data_for_the_editor_is_thinned_and_keeps_the_ends():
    (data,) = editor_data([Curve([float(i) for i in range(1, 5_001)], name="share")])
    assert data["steps"] == [int(value) for value in data["values"]]
    assert data["steps"][0] == 1 and data["steps"][-1] == 5_000
    assert 300 <= len(data["steps"]) <= 500
    assert editor_data([Curve([])]) == [{"name": "", "steps": [], "values": []}]
