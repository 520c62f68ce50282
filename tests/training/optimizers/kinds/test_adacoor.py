"""AdaCoor takes its own step size and keeps its sum in bf16."""

import pytest
import torch
from graft_nodes.training.optimizers.kinds.adacoor import AdaCoor


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
