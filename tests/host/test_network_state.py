"""What training switches off and freezes around a network is as before afterwards."""

import pytest
import torch
from graft_nodes.host.network_state import freeze_beside, keep_attributes, record_running_modules, switch_to_eval
from torch import nn


@pytest.fixture
def model():
    """A network with an embedder beside it, loaded as ComfyUI loads models: in inference mode."""
    with torch.inference_mode():
        made = nn.ModuleDict({"network": nn.Linear(2, 2), "embedder": nn.Linear(2, 2), "empty": nn.Identity()})
    return made


def test_parts_beside_the_network_are_frozen_and_count_as_constants_for_autograd(model):
    x = torch.ones(1, 2, requires_grad=True)
    weight = model["embedder"].weight
    expected = weight.sum(0).clone()
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        model["embedder"](x).sum().backward()
    with torch.inference_mode(), freeze_beside(model, model["network"]), torch.inference_mode(False):
        model["embedder"](x).sum().backward()
        assert not model["embedder"].weight.requires_grad
        assert model["network"].weight.is_inference()
    assert torch.equal(x.grad[0], expected)
    assert model["embedder"].weight is weight and weight.is_inference() and weight.requires_grad


def test_only_what_trains_is_put_in_training_mode_again():
    network = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5)))
    network[0].eval()
    with switch_to_eval(network):
        assert not any(part.training for part in network.modules())
    assert [part.training for part in network.modules()] == [True, False, True, True]


def test_what_a_forward_leaves_on_the_network_goes():
    network = nn.Linear(2, 2)
    network.kept = "before"
    with keep_attributes(network):
        network.kept, network.left = "changed", torch.ones(2)
    assert network.kept == "before" and not hasattr(network, "left")


def test_modules_of_the_network_that_run_are_noted_in_turn():
    network, other = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Identity()
    with record_running_modules(network) as ran:
        other(network(torch.ones(1, 2)))
    assert ran == [network, network[0], network[1]]
    network(torch.ones(1, 2))
    assert len(ran) == 3
