"""Shares of files and weighted sums, against definitions written out."""

import math

import pytest
import torch
from graft_nodes.ema.decay import gamma_of_width
from graft_nodes.ema.weighted_sum import exponential_shares, mix, parse_shares, power_shares, uniform_shares


def test_uniform_and_given():
    assert uniform_shares(4) == (0.25,) * 4
    assert parse_shares("1, 2 5", 3) == (0.125, 0.25, 0.625)
    assert parse_shares("1 -0.5", 2) == (2.0, -1.0)
    for text, count in (("1 2", 3), ("", 1), ("one", 1), ("1 -1", 2), ("nan 1", 2), ("inf 1", 2)):
        with pytest.raises(ValueError, match="weights"):
            parse_shares(text, count)


def test_exponential_has_the_relative_length():
    steps, width = list(range(1, 1001)), 0.05
    shares = exponential_shares(steps, width)
    assert math.fsum(shares) == pytest.approx(1)
    assert shares[899] / shares[999] == pytest.approx(math.exp(-100 / (width * 1000)))
    mean = sum(s * w for s, w in zip(steps, shares, strict=True))
    assert sum(w * (s - mean) ** 2 for s, w in zip(steps, shares, strict=True)) ** 0.5 == pytest.approx(
        width * 1000, rel=0.01
    )


def test_fitted_shares_are_the_average_of_a_run_that_stood_still_between_files():
    steps, width = [100, 150, 400, 500], 0.1
    average, exponent = [0.0] * 4, gamma_of_width(width) + 1
    for step in range(1, 501):  # the float64 recursion over every step; a file's weights held since the file before
        beta = (1 - 1 / step) ** exponent
        average = [beta * a for a in average]
        average[next(k for k, s in enumerate(steps) if step <= s)] += 1 - beta
    assert power_shares(steps, width) == pytest.approx(average, abs=1e-12)
    assert math.fsum(power_shares(steps, width)) == pytest.approx(1)


def test_steps_must_rise():
    for steps in ([], [0, 5], [5, 5], [9, 3]):
        with pytest.raises(ValueError, match=r"rising|no file"):
            power_shares(steps, 0.1)
        with pytest.raises(ValueError, match=r"rising|no file"):
            exponential_shares(steps, 0.1)
    with pytest.raises(ValueError, match="relative width"):
        power_shares([1, 2], 0.4)


def test_a_mixture_adds_up_in_float64_and_leaves_its_sources_alone():
    draw = torch.Generator().manual_seed(1)
    files = [{"a": torch.randn(50, generator=draw).to(torch.bfloat16), "n": torch.tensor(k)} for k in range(3)]
    before = [file["a"].clone() for file in files]
    out = mix(files, (0.2, 0.3, 0.5))
    expected = sum(share * file["a"].double() for share, file in zip((0.2, 0.3, 0.5), files, strict=True))
    assert out["a"].dtype == torch.float32 and int(out["n"]) == 2
    torch.testing.assert_close(out["a"].double(), expected, rtol=0, atol=1e-6)
    assert all(torch.equal(file["a"], held) for file, held in zip(files, before, strict=True))


def test_every_mismatch_is_listed():
    files = [
        {"a": torch.zeros(3), "b": torch.zeros(2), "d": torch.zeros(1)},
        {"a": torch.zeros(4), "c": torch.zeros(2), "d": torch.zeros(1)},
    ]
    with pytest.raises(ValueError) as error:
        mix(files, (0.5, 0.5), ["x", "y"])
    for part in ("(3):", "a: (3,) in x, (4,) in y", "b: in x, missing in y", "c: in y, missing in x"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match="one share a source"):
        mix(files, (1.0,))
    with pytest.raises(ValueError, match="a of y"):
        mix([{"a": torch.zeros(1)}, {"a": torch.tensor([math.nan])}], (0.5, 0.5), ["x", "y"])


def test_one_source_and_the_order_of_the_first():
    first, second = {"b": torch.ones(2), "a": torch.ones(3)}, {"a": torch.zeros(3), "b": torch.zeros(2)}
    assert list(mix([first, second], (0.5, 0.5))) == ["b", "a"]
    (name, tensor), _ = mix([first], (0.25,)).items()
    assert name == "b" and torch.equal(tensor, torch.full((2,), 0.25))
