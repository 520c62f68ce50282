"""Post-hoc reconstruction against ema-pytorch, numerical integration and averages that ran along in float64."""

import pytest
import torch
from graft_nodes.ema.decay import EMASettings, decay_at, gamma_of_width
from graft_nodes.ema.post_hoc import (
    ROUNDING,
    Profile,
    TooFewSnapshots,
    fit,
    inner_products,
    possible_widths,
    reconstruct,
    spread_evenly,
    step_density,
    width_of_gamma,
)
from graft_nodes.ema.weighted_sum import mix
from graft_nodes.storage.float16 import from_float16, to_float16
from torch import nn


def every(step, until, widths=(0.05, 0.10)):
    return [Profile(at, width) for at in range(step, until + 1, step) for width in widths]


def trajectory(steps, seed=0):
    """A float64 run of 40 weights that drifts and jitters."""
    draw = torch.Generator().manual_seed(seed)
    rates = torch.linspace(1, 30, 40, dtype=torch.float64)
    return [
        (1 - torch.exp(-rates * t / steps)) + 0.1 * torch.randn(40, generator=draw, dtype=torch.float64)
        for t in range(1, steps + 1)
    ]


def ran_along(path, width, until):
    """The power-function average as a float64 recursion, written out: beta_t = (1 - 1/t)^(gamma + 1)."""
    exponent, average = gamma_of_width(width) + 1, torch.zeros_like(path[0])
    for t, weights in enumerate(path[:until], 1):
        beta = (1 - 1 / t) ** exponent
        average = beta * average + (1 - beta) * weights
    return average


@pytest.mark.parametrize("width", [0.005, 0.05, 0.1, 0.25])
def test_width_is_the_standard_deviation_of_the_profile(width):
    gamma = gamma_of_width(width)
    assert width_of_gamma(gamma) == pytest.approx(width, rel=1e-9)
    t = (torch.arange(2_000_000, dtype=torch.float64) + 0.5) / 2_000_000
    density = (gamma + 1) * t**gamma / 2_000_000
    mean = float((density * t).sum())
    assert float((density * (t - mean) ** 2).sum()) ** 0.5 == pytest.approx(width, rel=1e-5)


def test_inner_products_are_integrals():
    left, right = [Profile(100, 0.05), Profile(250, 0.1)], [Profile(170, 0.2), Profile(250, 0.07)]
    t = (torch.arange(1_000_000, dtype=torch.float64) + 0.5) * 250 / 1_000_000
    for a in range(2):
        for b in range(2):
            integral = (step_density([left[a]], [1.0], t) * step_density([right[b]], [1.0], t)).mean() * 250
            assert float(inner_products(left, right)[a, b]) == pytest.approx(float(integral), rel=1e-4)


def test_the_power_schedule_is_the_profile():
    settings = EMASettings(schedule="power", widths=(0.08,))
    share, gamma = torch.zeros(50, dtype=torch.float64), gamma_of_width(0.08)
    for step in range(1, 51):
        beta = decay_at(settings, step, 50)
        share *= beta
        share[step - 1] += 1 - beta
    t = torch.arange(51, dtype=torch.float64) / 50
    torch.testing.assert_close(share, (t ** (gamma + 1)).diff(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("width", [0.03, 0.07, 0.15, 0.2])
def test_a_reconstruction_is_the_average_that_ran_along(width):
    path = trajectory(1000)
    snapshots = every(20, 1000)
    found = reconstruct(snapshots, width)
    taken = [{"w": ran_along(path, s.width, s.step)} for s in snapshots]
    exact = sum(weight * one["w"] for weight, one in zip(found.weights, taken, strict=True))
    torch.testing.assert_close(mix(taken, found.weights)["w"].double(), exact, rtol=0, atol=1e-6)
    torch.testing.assert_close(exact, ran_along(path, width, 1000), rtol=0, atol=4 * found.miss * 0.1 + 1e-6)


def test_a_snapshot_of_the_width_is_taken_as_it_is():
    found = reconstruct(every(50, 250), 0.10)
    assert found.miss == 0 and sum(found.weights) == 1 and found.weights[-1] == 1.0
    for step in (100, 230):
        assert reconstruct(every(10, 250), 0.08, step).miss < 0.05


@pytest.mark.parametrize("width", [0.04, 0.07, 0.12, 0.18])
def test_equal_to_ema_pytorch(tmp_path, width):
    ema_pytorch = pytest.importorskip("ema_pytorch")
    draw = torch.Generator().manual_seed(3)
    model = nn.Linear(6, 5)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=draw))
    kept = {"checkpoint_every_num_steps": 20, "checkpoint_folder": str(tmp_path), "checkpoint_dtype": torch.float32}
    theirs = ema_pytorch.PostHocEMA(model, sigma_rels=(0.05, 0.10), update_every=1, **kept)
    for _ in range(200):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.99).add_(0.03 * torch.randn(p.shape, generator=draw))
        theirs.update()
    expected = dict(theirs.synthesize_ema_model(sigma_rel=width).ema_model.named_parameters())
    snapshots, taken = [], []
    for file in tmp_path.glob("*.pt"):
        which, step = map(int, file.stem.split("."))
        stored = torch.load(file, weights_only=True)
        snapshots.append(Profile(step, (0.05, 0.10)[which]))
        taken.append({name: stored[f"ema_model.{name}"] for name in expected})
    ours = mix(taken, reconstruct(snapshots, width).weights)
    assert ours.keys() == expected.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], expected[name].detach(), rtol=0, atol=1e-4)
    assert (
        max(float((ours[n] - model.get_parameter(n).detach()).abs().max()) for n in ours) > 0.01
    )  # and it is not just the last weights


def test_weights_are_the_least_squares_solution():
    snapshots, target = every(50, 250), Profile(250, 0.07)
    t = (torch.arange(200_000, dtype=torch.float64) + 0.5) * 250 / 200_000
    columns = torch.stack([step_density([s], [1.0], t) for s in snapshots], 1)
    direct = torch.linalg.lstsq(columns, step_density([target], [1.0], t)[:, None]).solution[:, 0]
    found = fit(snapshots, target)
    torch.testing.assert_close(torch.tensor(found.weights), direct.float(), rtol=1e-3, atol=1e-4)
    missed = step_density(snapshots, found.weights, t) - step_density([target], [1.0], t)
    assert found.miss == pytest.approx(float(missed.norm() / step_density([target], [1.0], t).norm()), rel=1e-2)


def test_the_possible_range_is_said_and_true():
    snapshots = every(25, 250)
    ((narrow, wide),) = possible_widths(snapshots, 250)
    assert narrow < 0.05 and wide > 0.10
    for width in (narrow * 1.001, 0.07, wide * 0.999):
        assert reconstruct(snapshots, width).miss <= 0.0501
    for width in (narrow * 0.99, wide * 1.01, 0.0, -1.0, 0.3):
        with pytest.raises(ValueError, match=rf"widths {narrow:.4f} to {wide:.4f}"):
            reconstruct(snapshots, width)
    (denser,) = possible_widths(every(5, 250), 250)
    assert denser[0] < narrow and denser[1] > wide


def kept_along(path, snapshots):
    """Every snapshot's average, float64, from one walk along the run for each width."""
    kept = {}
    for width in {snapshot.width for snapshot in snapshots}:
        exponent, average = gamma_of_width(width) + 1, torch.zeros_like(path[0])
        steps = {snapshot.step for snapshot in snapshots if snapshot.width == width}
        for t, weights in enumerate(path, 1):
            average = average + (1 - (1 - 1 / t) ** exponent) * (weights - average)
            if t in steps:
                kept[Profile(t, width)] = average
    return [kept[snapshot] for snapshot in snapshots]


@pytest.mark.parametrize("apart", [2, 40])
@pytest.mark.parametrize("widths", [(0.05, 0.08), (0.03, 0.1, 0.2)])
def test_from_float16_snapshots_an_accepted_width_is_as_exact_as_it_says(apart, widths):
    path, snapshots = trajectory(400), every(apart, 400, widths)
    exact = torch.stack(kept_along(path, snapshots))
    accepted = []
    for width in (0.005, 0.01, 0.02, 0.04, 0.065, 0.12, 0.19):
        try:
            found = reconstruct(snapshots, width)
        except ValueError as error:
            assert "they express widths" in str(error)
            continue
        accepted.append(width)
        weights, expected = torch.tensor(found.weights, dtype=torch.float64), ran_along(path, width, 400)
        stored = weights @ exact.half().double()
        rounding = float((stored - weights @ exact).norm() / expected.norm())
        assert rounding <= 1.3 * found.noise and found.noise <= found.miss <= 0.05
        assert float((stored - expected).norm() / expected.norm()) <= found.miss
    assert 0.065 in accepted and (0.01 in accepted) == (apart == 2)


@pytest.mark.parametrize(("every_steps", "width"), [(50, 0.2), (100, 0.2), (200, 0.2), (20, 0.03), (100, 0.065)])
@pytest.mark.parametrize("constant", [0.0, 0.05, 1.0])
def test_early_snapshots_of_noise_are_larger_and_rounded_more_and_so_is_what_is_said(every_steps, width, constant):
    """Weights that are noise around a constant: what is said is at least what float64 measures, and little more."""
    steps = 1000
    draws = torch.Generator().manual_seed(3)
    path = constant + torch.randn(steps, 400, generator=draws, dtype=torch.float64)
    snapshots = every(every_steps, steps, (0.05, 0.06, 0.07, 0.08))
    found = reconstruct(snapshots, width)
    weights = torch.tensor(found.weights, dtype=torch.float64)
    exact, expected = torch.stack(kept_along(path, snapshots)), ran_along(path, width, steps)
    stored = torch.stack([from_float16(to_float16({"a": one.float()}))["a"].double() for one in exact])
    rounding = float((weights @ (stored - exact)).norm() / expected.norm())
    missed = float((weights @ stored - expected).norm() / expected.norm())
    assert rounding <= 1.1 * found.noise and missed <= 1.1 * found.miss
    if constant in (0.0, 1.0) and found.noise > 10 * found.profile_miss:
        assert found.miss <= 3 * missed


def test_rounding_counts_in_the_miss_and_the_least_of_both_is_taken():
    snapshots, target = every(10, 500, (0.05, 0.08)), Profile(500, 0.02)
    plain, regular = fit(snapshots, target), fit(snapshots, target, ROUNDING)
    weights = torch.tensor(plain.weights, dtype=torch.float64)
    assert plain.noise == 0 and plain.miss == plain.profile_miss < regular.profile_miss < regular.miss
    assert regular.noise == pytest.approx(ROUNDING * float(torch.tensor(regular.weights).norm()), rel=1e-4)
    assert regular.miss < (plain.miss**2 + (ROUNDING * float(weights.norm())) ** 2) ** 0.5
    for stronger in (0.5 * ROUNDING, 2 * ROUNDING):
        other = fit(snapshots, target, stronger)
        noise = ROUNDING * float(torch.tensor(other.weights, dtype=torch.float64).norm())
        assert regular.miss < (other.profile_miss**2 + noise**2) ** 0.5


def test_gaps_between_the_possible_widths_are_named_and_left_out():
    snapshots = every(250, 250, (0.01, 0.1))
    ranges = possible_widths(snapshots, 250)
    (first, second) = ranges
    assert first[0] <= 0.01 <= first[1] < second[0] <= 0.1 <= second[1]
    middle = (first[1] * second[0]) ** 0.5
    said = f"widths {first[0]:.4f} to {first[1]:.4f} and {second[0]:.4f} to {second[1]:.4f}, none between"
    with pytest.raises(ValueError, match=f"{said} {first[1]:.4f} and {second[0]:.4f}"):
        reconstruct(snapshots, middle)
    spread = spread_evenly(ranges, 10)
    assert 9 <= len(spread) <= 11 and spread == sorted(spread)
    for width in spread:
        assert reconstruct(snapshots, width).miss <= 0.05
    assert spread_evenly([(0.1, 0.1)], 10) == pytest.approx([0.1])
    spread = spread_evenly([(0.01, 0.04)], 3)
    assert spread == pytest.approx([0.01 * 4**0.001, 0.02, 0.04 / 4**0.001], rel=1e-9), "a thousandth inside both ends"


def test_the_widths_of_the_snapshots_themselves_are_possible_however_small_the_tolerance():
    widths = (0.0123, 0.0987)
    ranges = possible_widths(every(250, 250, widths), 250, tolerance=1e-3)
    assert len(ranges) == 2
    for width, (narrowest, widest) in zip(widths, ranges, strict=True):
        assert narrowest <= width <= widest < 1.01 * narrowest


def test_too_few_and_wrong_snapshots():
    with pytest.raises(TooFewSnapshots, match="no snapshot"):
        reconstruct([], 0.1)
    with pytest.raises(TooFewSnapshots, match="two or more"):
        reconstruct([Profile(100, 0.05)], 0.1)
    with pytest.raises(ValueError, match="last snapshot is of step 200"):
        reconstruct(every(50, 200), 0.07, 250)
    with pytest.raises(ValueError, match="twice"):
        fit([Profile(100, 0.05), Profile(100, 0.05)], Profile(100, 0.06))
    with pytest.raises(ValueError, match="twice"):
        reconstruct([Profile(100, 0.05), Profile(100, 0.05)], 0.05)
    with pytest.raises(ValueError, match="step 1"):
        fit([Profile(0, 0.05), Profile(100, 0.05)], Profile(100, 0.06))
