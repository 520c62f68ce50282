"""Stochastic rounding against the neighbors that the type itself has."""

import math

import pytest
import torch
from graft_nodes.patches.adapters.lora import LoRA
from graft_nodes.patches.patching.fuse import Patch, apply_patches
from graft_nodes.patches.patching.rounding import round_stochastically, round_to_bfloat16_

TYPES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("dtype", [*TYPES, torch.float16])
def test_what_the_type_has_stays(dtype):
    """So often that noise that is nearly 1 comes too."""
    if dtype.itemsize == 1:
        values = torch.arange(256, dtype=torch.uint8).view(dtype).float().repeat(4000)
    else:
        values = torch.randn(1 << 21, generator=generator()).to(dtype).float()
    values = values[values.isfinite()]
    assert torch.equal(round_stochastically(values, dtype, generator()).float(), values)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("scale", [1.0, 1e-3, 100.0])
def test_a_neighbor_and_the_mean(dtype, scale):
    values = torch.randn(200, generator=generator()) * scale
    values = values[values.abs() < torch.finfo(dtype).max]
    rounded = torch.stack([round_stochastically(values, dtype, generator(seed)).float() for seed in range(400)])
    nearest = values.to(dtype).float()
    low, high = rounded.amin(0), rounded.amax(0)
    assert ((low == nearest) | (high == nearest)).all()
    assert all(len(column.unique()) <= 2 for column in rounded.T)
    two = low < high  # elsewhere the value is so near a neighbor that 400 draws all go there
    assert (low <= values)[two].all() and (high >= values)[two].all() and two.float().mean() > 0.9
    assert ((rounded.mean(0) - values).abs() <= 0.13 * (high - low))[
        two
    ].all()  # five standard errors of a coin thrown 400 times


@pytest.mark.parametrize("dtype", TYPES)
def test_beyond_the_range(dtype):
    most = torch.finfo(dtype).max
    assert round_stochastically(
        torch.tensor([most, -most, math.inf, -math.inf]), dtype, generator()
    ).float().tolist() == [
        most,
        -most,
        most,
        -most,
    ]


def test_a_small_change_of_an_fp8_weight_is_not_lost():
    base = torch.randn(64, 64, generator=generator()).to(torch.float8_e4m3fn)
    layer = LoRA(torch.full((64, 1), 1.0), torch.full((1, 64), 0.004))
    nearest = apply_patches(base, [Patch(layer, 1.0)]).float() - base.float()
    results = [apply_patches(base, [Patch(layer, 1.0)], seed=seed).float() - base.float() for seed in range(50)]
    assert torch.equal(apply_patches(base, [Patch(layer, 1.0)], seed=3).float() - base.float(), results[3])
    assert abs(float(nearest.mean()) - 0.004) > 0.001
    assert abs(float(torch.stack(results).mean()) - 0.004) < 0.0005


@pytest.mark.parametrize(
    ("change", "nearest", "stochastically"), [(0.001, (0.45, 0.6), (0.99, 1.02)), (0.01, (0.99, 1.01), (0.99, 1.01))]
)
def test_what_bfloat16_keeps_of_a_change(change, nearest, stochastically):
    """The share of a change (its projection) that is left, and the mean error: why nearest is the default, and what the
    other is for.
    """
    draws = generator()
    base = (torch.randn(512, 512, generator=draws) * 0.02).bfloat16()
    layer = LoRA(torch.randn(512, 16, generator=draws), torch.randn(16, 512, generator=draws))
    wanted = layer.delta((512, 512))
    patch = Patch(layer, change * float(base.float().norm() / wanted.norm()))
    exact = base.double() + patch.strength * wanted.double()
    errors = []
    for seed, (least, most) in ((None, nearest), (1, stochastically)):
        found = apply_patches(base, [patch], seed=seed).double()
        kept = float(((found - base.double()) * wanted).sum() / (patch.strength * wanted.double().square().sum()))
        assert least < kept < most
        errors.append(float((found - exact).abs().mean()))
    assert 1.3 < errors[1] / errors[0] < 1.6


def _rounded(value, seed=0):
    out = torch.empty(value.shape, dtype=torch.bfloat16)
    round_to_bfloat16_(out, value, generator(seed))
    return out.float()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("low", [1.0, -1.0, 3e-38, 255.0])
def test_the_mean_is_the_value_and_only_neighbors_come_out(low, share):
    low = torch.tensor(low).bfloat16()
    above = torch.tensor([low.view(torch.int16).item() + 1], dtype=torch.int16).view(torch.bfloat16).float()
    value = low.float() + share * (above - low.float())
    out = _rounded(value.expand(20000).contiguous())
    assert set(out.tolist()) == {low.item(), above.item()}
    assert (out == above).float().mean().item() == pytest.approx(share, abs=0.02)


def test_exact_values_and_those_that_are_not_finite_stay():
    value = torch.tensor([0.0, -0.0, 1.5, -2.0, float("inf"), -float("inf"), float("nan"), 3.3895313892515355e38])
    assert torch.equal(_rounded(value)[:6], value[:6]) and _rounded(value)[6].isnan() and _rounded(value)[7] == value[7]


def test_equal_draws_give_equal_bytes_and_the_global_generator_is_not_used():
    value, before = torch.randn(100, generator=torch.Generator().manual_seed(1)), torch.random.get_rng_state()
    assert torch.equal(_rounded(value), _rounded(value)) and not torch.equal(_rounded(value), _rounded(value, seed=1))
    assert torch.equal(before, torch.random.get_rng_state())


def test_small_steps_add_up():
    # Rounded to nearest, 1 + 1e-4 is 1 for ever: bf16's next number is 1.0078.
    weights = torch.ones(4096, dtype=torch.bfloat16)
    for step in range(100):
        round_to_bfloat16_(weights, weights.float() + 1e-4, generator(step))
    assert weights.float().mean().item() == pytest.approx(1.01, abs=5e-4)


@pytest.mark.parametrize(("target", "value"), [(torch.float16, torch.float32), (torch.bfloat16, torch.float64)])
def test_other_types_are_refused(target, value):
    with pytest.raises(ValueError, match="from float32 to bf16 of one shape"):
        round_to_bfloat16_(torch.zeros(2, dtype=target), torch.zeros(2, dtype=value), torch.Generator())
