"""A quantized base on a device: its own weights wait in host memory, and everything else comes over for the block."""

import copy

import pytest
import torch
from graft_nodes.tests.second_device.device import DEVICE
from graft_nodes.training.memory.quantized_base.base import quantize_base
from graft_nodes.training.memory.quantized_base.int8 import Int8
from graft_nodes.training.memory.quantized_base.registry import FORMATS, names
from torch import nn

CPU = torch.device("cpu")
ROWS = 40


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(32, 48), nn.Linear(48, 12)
        self.norm = nn.LayerNorm(12)
        self.register_buffer("shift", torch.ones(12))

    def forward(self, x):
        return self.norm(self.narrow(torch.tanh(self.wide(x)))) + self.shift


def _with_gradient(part, x):
    x = x.clone().requires_grad_()
    y = part(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), [x])
    return y.detach().cpu(), gradient.cpu()


@pytest.mark.parametrize("weight_format", FORMATS, ids=names())
def test_weights_wait_on_the_host_and_the_rest_comes_over(weight_format):
    part, x = Part().requires_grad_(False), torch.randn(ROWS, 32, generator=torch.Generator().manual_seed(0))
    here = copy.deepcopy(part)
    weight, bias = part.wide.weight, part.wide.bias
    with quantize_base(here, weight_format, CPU):
        expected = _with_gradient(here, x)
    with quantize_base(part, weight_format, DEVICE) as base:
        assert part.wide.weight is weight and weight.device == CPU
        others = [
            part.wide.quantized_numbers,
            part.wide.quantized_scales,
            part.wide.bias,
            part.narrow.weight,
            part.norm.weight,
            part.shift,
        ]
        assert {tensor.device for tensor in others} == {DEVICE}
        found = _with_gradient(part, x.to(DEVICE))
        with torch.no_grad(), base.switch_off():
            own = part(x.to(DEVICE)).cpu()
        assert part.wide.weight is weight
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own, part(x), rtol=1e-5, atol=1e-5)
    assert part.wide.weight is weight and part.wide.bias is bias and part.shift.device == CPU


def test_columns_lie_together_in_every_int8_product(monkeypatch):
    """CUDA's product is slow with a matrix on the right whose rows do, as a weight's in the backward pass."""
    own, laid_out = torch._int_mm, []

    def product(left, right):
        laid_out.append(right.stride(0) == 1)
        return own(left, right)

    monkeypatch.setattr(torch, "_int_mm", product)
    weight = torch.randn(48, 32, generator=torch.Generator().manual_seed(1))
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(2))
    gradients = []
    for device in (torch.device("cpu"), DEVICE):
        quantized = Int8(device)
        given = x.clone().to(device).requires_grad_()
        quantized.product(given, quantized.quantize(weight.to(device)), None, torch.float32).square().sum().backward()
        gradients.append(given.grad.cpu())
    assert laid_out[2:] == [True, True]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-6, atol=1e-6)
