"""Half precision for keeping: what float16 can hold comes back, with a scale where its range is too small."""

import math

import pytest
import torch
from graft_nodes.storage.float16 import SCALE_PREFIX, from_float16, to_float16


@pytest.mark.parametrize("largest", [1e-30, 1e-4, 2.0**-7, 1.0, 32768.0, 1e5, 1e30])
def test_values_of_any_size_come_back_as_exactly_as_float16_can(largest):
    whole = torch.linspace(-1, 1, 101) * largest
    kept = to_float16({"x": whole})
    assert kept["x"].dtype == torch.float16 and torch.isfinite(kept["x"]).all()
    assert (SCALE_PREFIX + "x" in kept) == (largest < 2.0**-7 or largest > 32768.0)
    back = from_float16(kept)
    assert back.keys() == {"x"} and back["x"].dtype == torch.float32
    assert float((back["x"] - whole).abs().max()) <= largest * 2.0**-11


@pytest.mark.parametrize("largest", [1e-45, 1e-42, 1e-38])
def test_values_near_the_least_of_float32_come_back_as_numbers(largest):
    whole = torch.tensor([largest, -largest, 0.0])
    back = from_float16(to_float16({"x": whole}))["x"]
    assert float((back - whole).abs().max()) <= max(2.0**-149, largest * 2.0**-11)


def test_single_numbers_and_counts_are_kept_as_they_are():
    tensors = {"alpha": torch.tensor(1 / 3), "count": torch.tensor([1, 1 << 40]), "zero": torch.zeros(3)}
    kept = to_float16(tensors)
    assert kept["alpha"].dtype == torch.float32 and kept["count"].dtype == torch.int64
    back = from_float16(kept)
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
    assert kept["alpha"].data_ptr() != tensors["alpha"].data_ptr()


def test_values_that_are_not_finite_stay_so():
    kept = to_float16({"x": torch.tensor([1e30, float("inf"), float("nan")])})
    assert kept.keys() == {"x"} and kept["x"].isinf()[1] and kept["x"].isnan()[2]


@pytest.mark.parametrize(
    ("tensor", "packed"),
    [
        (torch.tensor(0.5), False),
        (torch.tensor([0.5]), False),
        (torch.tensor([0.5, 0.25]), True),
        (torch.ones(3, 3, dtype=torch.bfloat16), True),
        (torch.ones(3, dtype=torch.float64), True),
        (torch.ones(3, dtype=torch.int32), False),
        (torch.ones(3, dtype=torch.bool), False),
    ],
)
def test_floating_tensors_of_two_or_more_numbers_are_packed(tensor, packed):
    kept = to_float16({"x": tensor})["x"]
    assert kept.dtype == (torch.float16 if packed else tensor.dtype)
    assert torch.equal(kept.double(), tensor.double())


@pytest.mark.parametrize("largest", [1e-20, 3e-5, 65536.0, 1e20])
def test_the_scale_is_a_power_of_two_and_leaves_room_on_both_sides(largest):
    kept = to_float16({"x": torch.tensor([largest, largest / 1000])})
    assert 1024 <= float(kept["x"].abs().max()) <= 2048
    assert math.frexp(float(kept[SCALE_PREFIX + "x"]))[0] == 0.5
