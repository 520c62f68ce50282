"""Layers in comfy-kitchen's 4-bit layouts: the output is their own, and the gradient that of the unpacked weight."""

import pytest
import torch
from graft_nodes.host.four_bit_layers import LAYOUTS, FourBitLayers, allow_gradients
from torch import nn
from torch.nn.functional import linear

tensors = pytest.importorskip("comfy_kitchen.tensor")


def layer(layout, dtype=torch.float32):
    made = nn.Linear(64, 128, dtype=dtype).requires_grad_(False)
    draws = torch.Generator().manual_seed(1)
    values = torch.randn(128, 64, generator=draws).to(dtype)
    quantized = tensors.QuantizedTensor.from_float(values, layout, convrot_groupsize=16)
    made.weight = nn.Parameter(quantized, requires_grad=False)
    return made


def seen(dtype=torch.float32):
    return torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()


@pytest.fixture(params=LAYOUTS)
def layout(request):
    if not hasattr(tensors, request.param):
        pytest.skip(f"this comfy-kitchen has no {request.param}")
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_output_is_the_layers_own_and_the_gradient_the_unpacked_weights(layout, dtype):
    line, x = layer(layout, dtype), seen(dtype)
    with torch.no_grad():
        own = line(x)
    pull = torch.randn(own.shape, generator=torch.Generator().manual_seed(3)).to(own.dtype)
    with FourBitLayers():
        y = line(x)
        (gradient,) = torch.autograd.grad(y, [x], pull)
        without_bias = linear(x, line.weight)
    assert torch.equal(y, own) and without_bias.requires_grad
    torch.testing.assert_close(gradient, pull @ line.weight.dequantize().to(dtype))


def test_comfy_kitchen_alone_has_no_gradient_for_them(layout):
    with pytest.raises(RuntimeError, match=r"expects RHS W\.T"):
        layer(layout)(seen()).sum().backward()


def test_other_layers_are_left(layout):
    plain, x = nn.Linear(64, 8), seen()
    with FourBitLayers():
        plain(x).sum().backward()
    assert plain.weight.grad is not None and x.grad is not None
    assert isinstance(allow_gradients(nn.Sequential(plain, layer(layout))), FourBitLayers)
    assert not isinstance(allow_gradients(plain), FourBitLayers)
