"""What the layers of all kinds share: their tensors, and the scale of their factors."""

import pytest
import torch
from graft_nodes.patches.adapters.dora import DoRA
from graft_nodes.patches.adapters.loha import LoHa
from graft_nodes.patches.adapters.lora import LoRA


def test_tensors_are_the_fields_in_order_without_those_that_are_not_there():
    up, down, core = torch.ones(4, 2), torch.ones(2, 3), torch.ones(2, 2, 1, 1)
    assert [id(tensor) for tensor in LoRA(up, down, 1.0).tensors()] == [id(up), id(down)]
    assert [id(tensor) for tensor in LoRA(up, down, 1.0, core).tensors()] == [id(up), id(down), id(core)]


def test_tensors_of_an_inner_layer_are_in_its_place():
    up, down, magnitude = torch.ones(4, 2), torch.ones(2, 3), torch.ones(4, 1)
    found = DoRA(LoRA(up, down), magnitude).tensors()
    assert [id(tensor) for tensor in found] == [id(up), id(down), id(magnitude)]


@pytest.mark.parametrize(
    ("layer", "rank"),
    [
        (LoRA(torch.ones(4, 2), torch.ones(2, 3), 3.0), 2),
        (LoHa(torch.ones(4, 5), torch.ones(5, 3), torch.ones(4, 2), torch.ones(2, 3), 3.0), 5),
    ],
    ids=["LoRA", "LoHa"],
)
def test_the_scale_is_alpha_over_the_rank_and_can_be_replaced(layer, rank):
    assert (layer.rank, layer.scale) == (rank, 3.0 / rank)
    assert layer.with_scale(None) is layer
    assert layer.with_scale(0.25).scale == 0.25
    torch.testing.assert_close(layer.with_scale(0.25).delta((4, 3)), layer.delta((4, 3)) * 0.25 * rank / 3.0)
