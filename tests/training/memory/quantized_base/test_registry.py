"""What every format has: types, autocast, what is kept for the backward pass, the same bytes twice, and a plan's memory
without numbers.
"""

import pytest
import torch
from graft_nodes.tests.training.memory.quantized_base.making_layers import CPU, layer, seen
from graft_nodes.training.memory.allocations import META, AutocastOnMeta
from graft_nodes.training.memory.quantized_base.base import quantize_base, quantized_values
from graft_nodes.training.memory.quantized_base.registry import FORMATS, find_format, names
from graft_nodes.training.trainable.settings import BASE_WEIGHTS

WIDEST = {"int8": 1 / 127, "int8 weight-only": 1 / 127, "nf4": 0.3039}  # step, of the largest number with its scale


@pytest.fixture(params=FORMATS, ids=names())
def weight_format(request):
    return request.param


def test_settings_choose_them_by_name():
    assert ("as loaded", *names()) == BASE_WEIGHTS and names() == tuple(WIDEST)
    assert [find_format(name) for name in names()] == list(FORMATS)


def test_values_are_near_to_the_weight_and_what_the_layer_computes_with(weight_format):
    line = layer()
    assert quantized_values(line) is None
    with quantize_base(line, weight_format, CPU):
        values = quantized_values(line)
        columns = line(torch.eye(32)) - line.bias
    assert values.dtype == torch.float32 and not torch.equal(values, line.weight)
    half = line.weight.abs().amax() * WIDEST[weight_format.name] / 2
    assert (values - line.weight).abs().amax() <= half * 1.0001
    torch.testing.assert_close(columns.T, values, rtol=1e-5, atol=1e-6)
    assert quantized_values(line) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_types_are_those_of_the_layer(weight_format, dtype):
    line, x = layer(dtype=dtype), seen(2, 30, 32).detach().clamp(-2, 2).to(dtype).requires_grad_()
    expected = line(x)
    with quantize_base(line, weight_format, CPU):
        y = line(x)
        y.sum().backward()
    assert y.dtype == dtype and x.grad.dtype == dtype
    assert torch.cosine_similarity(y.float().flatten(), expected.float().flatten(), dim=0) > 0.99


def test_under_autocast_it_gives_what_a_layer_gives(weight_format):
    line, x = layer(), seen(2, 30, 32)
    with torch.autocast("cpu", torch.bfloat16), quantize_base(line, weight_format, CPU):
        y = line(x)
        assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16, enabled=False), quantize_base(line, weight_format, CPU):
        assert line(x).dtype == torch.float32
    line.to(META)
    with AutocastOnMeta(torch.bfloat16), quantize_base(line, weight_format, META):
        assert line(x.detach().to(META)).dtype == torch.bfloat16
    with quantize_base(line, weight_format, META):
        assert line(x.detach().to(META)).dtype == torch.float32


def test_rows_of_zeros_and_numbers_that_are_not_finite(weight_format):
    line = layer()
    x = seen(1, 30, 32).detach()
    x[0, 0], x[0, 1, 3], x[0, 2, 4] = 0, float("nan"), float("inf")
    with quantize_base(line, weight_format, CPU):
        y = line(x)[0]
    assert torch.equal(y[0], line.bias)
    assert not y[1].isfinite().any() and not y[2].isfinite().any() and y[3:].isfinite().all()


def test_of_a_product_the_quantized_weight_is_kept_alone(weight_format):
    line, x = layer(), seen(2, 30, 32)
    kept = []
    with quantize_base(line, weight_format, CPU):
        places = {buffer.data_ptr() for buffer in line.buffers()}
        with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda _: None):
            line(x)
    assert {tensor.data_ptr() for tensor in kept} == places and len(kept) == len(places)


def test_the_same_bytes_twice(weight_format):
    found = []
    for _ in range(2):
        line, x = layer(), seen(2, 30, 32)
        with quantize_base(line, weight_format, CPU):
            y = line(x)
            y.square().sum().backward()
        found.append((y, x.grad))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
