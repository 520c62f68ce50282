"""int8 weight-only: no number of a weight is off by more than half a step of its row."""

import torch
from graft_nodes.tests.training.memory.quantized_base.making_layers import CPU, layer
from graft_nodes.training.memory.quantized_base.format import QuantizedWeight
from graft_nodes.training.memory.quantized_base.int8_weights import Int8Weights, round_rows


def test_numbers_are_the_nearest_of_the_127_steps_of_a_row():
    weight = layer().weight
    numbers, scales = Int8Weights(CPU).quantize(weight)
    assert numbers.dtype == torch.int8 and scales.dtype == torch.float32 and scales.shape == (48, 1)
    step = weight.abs().amax(1, keepdim=True).double() / 127
    assert (numbers.int().abs().amax(1) == 127).all()
    assert ((numbers * step - weight).abs() <= step * 0.5000001).all()
    values = Int8Weights(CPU).values(QuantizedWeight(numbers, scales))
    assert values.dtype == torch.float32
    torch.testing.assert_close(values.double(), numbers * step, rtol=1e-6, atol=0)


def test_rows_of_zeros_stay_zero():
    numbers, scales = round_rows(torch.zeros(2, 8))
    assert not numbers.any() and scales.isfinite().all()
