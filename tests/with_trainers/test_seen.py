"""Unit inputs show the weight and bias that a layer computes with, whatever sits around it."""

import pytest
import torch
from graft_nodes.tests.with_trainers import seen
from torch import nn

LAYERS = {
    "linear": nn.Linear(6, 5),
    "without a bias": nn.Linear(4, 7, bias=False),
    "kernel": nn.Conv2d(4, 6, 3, padding=1),
    "stride": nn.Conv2d(4, 6, 3, stride=2, padding=1),
    "point": nn.Conv2d(4, 6, 1),
    "patches": nn.Conv2d(4, 6, 2, stride=2),
    "video patches": nn.Conv3d(3, 5, (1, 2, 2), stride=(1, 2, 2)),
    "long": nn.Conv1d(3, 4, 5, padding=2),
    "uneven": nn.Conv2d(3, 4, (3, 1), stride=(2, 1), padding=(1, 0)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_weight_and_the_bias_are_found(name):
    model = nn.ModuleDict({"a": LAYERS[name]}).double()
    found = seen.seen(model, seen.layers(model))
    expected = {f"a.{key}": tensor for key, tensor in LAYERS[name].named_parameters()}
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[key], tensor, rtol=0, atol=1e-12) for key, tensor in expected.items())


@pytest.mark.parametrize("name", ["linear", "stride"])
def test_what_replaces_the_forward_is_seen(name):
    model = nn.ModuleDict({"a": LAYERS[name]}).double()
    plain, forward = seen.layers(model), LAYERS[name].forward
    LAYERS[name].forward = lambda x: 3 * forward(x) + 1
    try:
        found = seen.seen(model, plain)
    finally:
        del LAYERS[name].forward
    assert torch.allclose(found["a.weight"], 3 * LAYERS[name].weight, rtol=0, atol=1e-12)
    assert torch.allclose(found["a.bias"], 3 * LAYERS[name].bias + 1, rtol=0, atol=1e-12)
