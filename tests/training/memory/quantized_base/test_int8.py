"""int8 (W8A8): products and gradients by the formula in float64, near to those of the weights as loaded."""

import pytest
import torch
from graft_nodes.tests.training.memory.quantized_base.making_layers import CPU, layer, seen
from graft_nodes.training.memory.quantized_base.base import quantize_base
from graft_nodes.training.memory.quantized_base.int8 import Int8


def rounded(rows):
    """(integers, scales) of rows in float64; scales and quotients are float32's, as they are rounded so."""
    scales = (rows.abs().amax(1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return torch.round(rows / scales).double(), scales.double()


@pytest.mark.parametrize("tokens", [1, 23, 24, 40])
@pytest.mark.parametrize("bias", [True, False])
def test_product_and_gradient_are_the_formula(tokens, bias):
    line, x = layer(bias=bias), seen(2, tokens, 32)
    with quantize_base(line, Int8, CPU):
        y = line(x)
        pull = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
        y.backward(pull)
    weight, weight_scales = rounded(line.weight)
    inputs, scales = rounded(x.detach().flatten(0, 1))
    expected = (inputs @ weight.T) * scales * weight_scales.T
    if bias:
        expected += line.bias.double()
    torch.testing.assert_close(y.flatten(0, 1).double(), expected, rtol=1e-6, atol=1e-6)
    pulls, scales = rounded(pull.flatten(0, 1) * weight_scales.T.float())
    torch.testing.assert_close(x.grad.flatten(0, 1).double(), (pulls @ weight) * scales, rtol=1e-6, atol=1e-9)


def test_it_is_near_to_the_weights_as_loaded():
    """No number is off by more than what rounding both factors by half a step can make."""
    line, x = layer(), seen(1, 40, 32)
    plain = line(x)
    with quantize_base(line, Int8, CPU):
        found = line(x)
    assert not torch.equal(found, plain)
    half_x = x.abs().amax(-1, keepdim=True) / 254
    half_w = line.weight.abs().amax(1, keepdim=True) / 254
    bound = half_x * line.weight.abs().sum(1) + x.abs().sum(-1, keepdim=True) * half_w.T + 32 * half_x * half_w.T
    assert ((found - plain).abs() <= bound * 1.0001).all()
