"""Formats that unpack: product and gradient are those of the unpacked weight."""

import pytest
import torch
from graft_nodes.tests.training.memory.quantized_base.making_layers import CPU, layer, seen
from graft_nodes.training.memory.quantized_base.base import quantize_base
from graft_nodes.training.memory.quantized_base.int8_weights import Int8Weights
from graft_nodes.training.memory.quantized_base.nf4 import NF4
from torch.nn.functional import linear

UNPACKED = [Int8Weights, NF4]


@pytest.mark.parametrize("weight_format", UNPACKED)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_and_gradient_are_those_of_the_unpacked_weight(weight_format, bias, dtype):
    line, x = layer(bias=bias, dtype=dtype), seen(2, 5, 32, dtype=dtype)
    values = weight_format(CPU).values(weight_format(CPU).quantize(line.weight))
    expected = linear(x, values.to(dtype), line.bias)
    pull = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    (wanted,) = torch.autograd.grad(expected, [x], pull)
    with quantize_base(line, weight_format, CPU):
        y = line(x)
        (gradient,) = torch.autograd.grad(y, [x], pull)
    assert torch.equal(y, expected)
    torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("weight_format", UNPACKED)
def test_the_gradient_is_the_finite_difference(weight_format):
    """The product is linear in x, so a difference is exact but for rounding."""
    line = layer(dtype=torch.float64)
    x = torch.randn(3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(4)).requires_grad_()
    with quantize_base(line, weight_format, CPU):
        assert torch.autograd.gradcheck(line, [x])
