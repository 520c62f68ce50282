"""Some rows of a layer do to the rows of a weight what the whole layer does to them."""

import pytest
import torch
from graft_nodes.patches.adapters.diff import Diff, Set
from graft_nodes.patches.adapters.dora import DoRA
from graft_nodes.patches.adapters.loha import LoHa
from graft_nodes.patches.adapters.lora import LoRA
from graft_nodes.patches.adapters.row_parts import slice_rows

draws = torch.Generator().manual_seed(0)


def random(*shape):
    return torch.randn(*shape, generator=draws)


LAYERS = {
    "LoRA": LoRA(random(6, 2), random(2, 4), alpha=3.0),
    "LoCon": LoRA(random(6, 2, 1, 1), random(2, 4, 3, 3), alpha=3.0),
    "Tucker": LoRA(random(6, 2, 1, 1), random(3, 4, 1, 1), alpha=3.0, mid=random(2, 3, 3, 3)),
    "LoHa": LoHa(random(6, 2), random(2, 4), random(6, 2), random(2, 4)),
    "diff": Diff(random(6, 4), 0.5),
    "DoRA": DoRA(LoRA(random(6, 2), random(2, 4)), random(6, 1).abs()),
}


@pytest.mark.parametrize("name", LAYERS)
def test_rows_of_a_layer(name):
    layer = LAYERS[name]
    weight = random(6, 4, 3, 3) if name in ("LoCon", "Tucker") else random(6, 4)
    rows = slice_rows(layer, 2, 3, weight.shape)
    assert rows.mismatch(weight[2:5].shape) is None
    if layer.is_additive:
        expected, found = layer.delta(weight.shape)[2:5], rows.delta(weight[2:5].shape)
    else:
        expected, found = layer.apply(weight)[2:5], rows.apply(weight[2:5])
    assert torch.allclose(found, expected, atol=1e-5)


def test_what_needs_the_other_rows_has_none():
    assert slice_rows(Set(random(6, 4)), 0, 2, (6, 4)) is None
    assert slice_rows(DoRA(LoRA(random(6, 2), random(2, 4)), random(1, 4).abs()), 0, 2, (6, 4)) is None
