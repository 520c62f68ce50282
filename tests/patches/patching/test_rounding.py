"""Stochastic rounding against the neighbours that the type itself has."""

import math

import pytest
import torch
from graft_nodes.patches.adapters.lora import LoRA
from graft_nodes.patches.patching.fuse import Patch, patched
from graft_nodes.patches.patching.rounding import stochastic

TYPES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("dtype", TYPES)
def test_what_the_type_has_stays(dtype):
    bits = (
        torch.arange(256, dtype=torch.uint8).view(dtype)
        if dtype.itemsize == 1
        else torch.randn(999, generator=generator()).to(dtype)
    )
    values = bits.float()[bits.float().isfinite()]
    assert torch.equal(stochastic(values, dtype, generator()).float(), values)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("scale", [1.0, 1e-3, 100.0])
def test_a_neighbour_and_the_mean(dtype, scale):
    values = torch.randn(200, generator=generator()) * scale
    values = values[values.abs() < torch.finfo(dtype).max]
    rounded = torch.stack([stochastic(values, dtype, generator(seed)).float() for seed in range(400)])
    nearest = values.to(dtype).float()
    low, high = rounded.amin(0), rounded.amax(0)
    assert ((low == nearest) | (high == nearest)).all()
    assert all(len(column.unique()) <= 2 for column in rounded.T)
    two = low < high  # elsewhere the value is so near a neighbour that 400 draws all go there
    assert (low <= values)[two].all() and (high >= values)[two].all() and two.float().mean() > 0.9
    assert ((rounded.mean(0) - values).abs() <= 0.13 * (high - low))[
        two
    ].all()  # five standard errors of a coin thrown 400 times


@pytest.mark.parametrize("dtype", TYPES)
def test_beyond_the_range(dtype):
    most = torch.finfo(dtype).max
    assert stochastic(torch.tensor([most, -most, math.inf, -math.inf]), dtype, generator()).float().tolist() == [
        most,
        -most,
        most,
        -most,
    ]


def test_a_small_change_of_an_fp8_weight_is_not_lost():
    base = torch.randn(64, 64, generator=generator()).to(torch.float8_e4m3fn)
    layer = LoRA(torch.full((64, 1), 1.0), torch.full((1, 64), 0.004))
    nearest = patched(base, [Patch(layer, 1.0)]).float() - base.float()
    results = [patched(base, [Patch(layer, 1.0)], seed=seed).float() - base.float() for seed in range(50)]
    assert torch.equal(patched(base, [Patch(layer, 1.0)], seed=3).float() - base.float(), results[3])
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
        found = patched(base, [patch], seed=seed).double()
        kept = float(((found - base.double()) * wanted).sum() / (patch.strength * wanted.double().square().sum()))
        assert least < kept < most
        errors.append(float((found - exact).abs().mean()))
    assert 1.3 < errors[1] / errors[0] < 1.6
