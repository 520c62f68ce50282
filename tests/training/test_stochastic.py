"""Stochastic rounding keeps the expected value, exact values and what is not finite; AdaCoor keeps its sum in bf16."""

import pytest
import torch
from graft_nodes.training.optimizers.kinds.adacoor import AdaCoor
from graft_nodes.training.random_draws import generator
from graft_nodes.training.stochastic import round_into_


def _rounded(value, seed=0):
    out = torch.empty(value.shape, dtype=torch.bfloat16)
    round_into_(out, value, generator(seed, 0, "rounding"))
    return out.float()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("low", [1.0, -1.0, 3e-38, 255.0])
def test_the_mean_is_the_value_and_only_neighbours_come_out(low, share):
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
        round_into_(weights, weights.float() + 1e-4, generator(0, step, "rounding"))
    assert weights.float().mean().item() == pytest.approx(1.01, abs=5e-4)


@pytest.mark.parametrize(("target", "value"), [(torch.float16, torch.float32), (torch.bfloat16, torch.float64)])
def test_other_types_are_refused(target, value):
    with pytest.raises(ValueError, match="from float32 to bf16 of one shape"):
        round_into_(torch.zeros(2, dtype=target), torch.zeros(2, dtype=value), torch.Generator())


def test_adacoor_ignores_the_rate_and_keeps_its_sum_in_bf16():
    p, q = (torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.0])) for _ in range(2))
    one, other = AdaCoor([p]), AdaCoor([q])
    other.param_groups[0]["lr"] = 1e3
    for tensor, optimizer in ((p, one), (q, other)):
        tensor.grad = torch.tensor([1.0, 0.0, -0.01])
        optimizer.step()
    # v = 1e-8 g^2, so that the first step is 1e-4 of the gradient's sign where |g| is far above 1e-4
    assert torch.equal(p, q) and one.state[p]["v"].dtype == torch.bfloat16
    assert (p - torch.tensor([1.0, -2.0, 0.0])).tolist() == pytest.approx([-1e-4, 0.0, 1e-4], rel=3e-2, abs=1e-9)
