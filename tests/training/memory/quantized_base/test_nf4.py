"""nf4: the numbers of the paper's formula, and codes, scales and unpacked weights of bitsandbytes, bit for bit."""

from statistics import NormalDist

import pytest
import torch
from graft_nodes.tests.training.memory.quantized_base.making_layers import CPU, layer
from graft_nodes.training.memory.quantized_base.format import QuantizedWeight
from graft_nodes.training.memory.quantized_base.nf4 import CELL, CODE, NF4


def test_the_sixteen_numbers_are_quantiles_of_a_normal_distribution():
    """QLoRA, 3: eight of them positive, seven negative, and zero; the outermost are at the mean of the quantiles 1 -
    1/32 and 1 - 1/30.
    """
    outermost = 1 - (1 / 32 + 1 / 30) / 2
    quantile = NormalDist().inv_cdf
    positive = [quantile(outermost + (0.5 - outermost) * step / 8) for step in range(8)]
    negative = [-quantile(outermost + (0.5 - outermost) * step / 7) for step in range(7)]
    numbers = sorted([*positive, 0.0, *negative])
    assert pytest.approx([number / numbers[-1] for number in numbers], abs=1e-6) == CODE


def test_each_number_becomes_the_nearest():
    weight = layer(rows=40, columns=24).weight
    found = NF4(CPU).values(NF4(CPU).quantize(weight))
    blocks = weight.double().view(-1, 64)
    largest = blocks.abs().amax(1, keepdim=True)
    choices = torch.tensor(CODE, dtype=torch.float64) * largest
    off = (blocks[:, :, None] - choices[:, None, :]).abs().amin(2)
    assert found.shape == weight.shape
    torch.testing.assert_close((found.double().view(-1, 64) - blocks).abs(), off, rtol=1e-5, atol=1e-7)


def test_numbers_beside_the_bounds_and_the_ends_of_cells():
    code = torch.tensor(CODE)
    bounds = (code[1:] + code[:-1]) / 2
    places = torch.cat([bounds, torch.arange(-1, 1 + CELL, CELL)])
    below, above = (torch.nextafter(places, torch.tensor(end)) for end in (-1.0, 1.0))
    numbers = torch.cat([below, places, above, torch.zeros(12)]).view(-1, 63)
    weight = torch.cat([torch.ones(len(numbers), 1), numbers], 1)  # the largest of each block is 1
    packed, _ = NF4(CPU).quantize(weight)
    codes = torch.stack([packed // 16, packed % 16], 2).view(-1, 64)
    assert torch.equal(codes.long(), (weight[:, :, None] > bounds).sum(2))


def test_two_codes_are_in_a_byte_and_64_numbers_have_a_scale():
    codes, scales = NF4(CPU).quantize(layer(rows=48, columns=32).weight)
    assert codes.dtype == torch.uint8 and codes.shape == (48, 16)
    assert scales.dtype == torch.float32 and scales.numel() == 48 * 32 // 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_what_bitsandbytes_gives(dtype):
    functional = pytest.importorskip("bitsandbytes").functional
    weight = layer(rows=120, columns=200, dtype=dtype).weight.detach()
    weight[3] = 0
    codes, scales = NF4(CPU).quantize(weight)
    theirs, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    assert torch.equal(codes.flatten(), theirs.flatten()) and torch.equal(scales.flatten(), state.absmax)
    values = NF4(CPU).values(QuantizedWeight(codes, scales))
    assert torch.equal(values.to(dtype), functional.dequantize_4bit(theirs, state))


def test_blocks_of_zeros_and_numbers_that_are_not_finite():
    weight = torch.ones(3, 64)
    weight[0], weight[1, 5] = 0, float("nan")
    values = NF4(CPU).values(NF4(CPU).quantize(weight))
    assert not values[0].any() and values[1].isnan().all() and torch.equal(values[2], weight[2])
