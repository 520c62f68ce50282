"""What a network keeps from the weights of before is gone whenever they, or what is beside them, change."""

import pytest
import torch
from graft_nodes.patches.adapters.lora import LoRA
from graft_nodes.patches.models.weight_caches import clear_weight_caches
from graft_nodes.patches.patching import stack_ledger
from graft_nodes.patches.patching.fuse import Patch, Stack
from graft_nodes.patches.patching.strength_schedule import Schedule
from torch import nn


class Keeping(nn.Module):
    """A network that keeps what it made of an input, by the input alone, as HiDream-O1 does with prompts."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.kept = {}

    def clear_kv_cache(self):
        self.kept = {}

    def forward(self, x):
        key = tuple(x.flatten().tolist())
        if key not in self.kept:
            self.kept[key] = self.layer(x)
        return self.kept[key]


X = torch.tensor([[1.0, -2.0, 0.5]])


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.ModuleDict({"network": Keeping().requires_grad_(False)})


def stack(strength, bypass=False, schedule=None):
    factors = torch.randn(4, 2, generator=torch.Generator().manual_seed(1)), torch.ones(2, 3)
    weight = "network.layer.weight"
    return Stack({weight: [Patch(LoRA(*factors), strength, schedule=schedule)]}, [weight] if bypass else ())


def alike(model, strength):
    """What the network gives is what its layer gives with a stack at this strength, computed by hand."""
    (patch,) = stack(1.0).patches["network.layer.weight"]
    network = model["network"]
    bare = (
        network.layer.weight
        if not stack_ledger.base_weights(model)
        else stack_ledger.base_weights(model)["network.layer.weight"]
    )
    expected = nn.functional.linear(X, bare + strength * patch.layer.delta((4, 3)), network.layer.bias)
    return torch.allclose(network(X), expected, atol=1e-5)


@pytest.mark.parametrize("bypass", [False, True])
def test_a_stack_that_comes_changes_or_goes(model, bypass):
    assert alike(model, 0.0)
    stack_ledger.attach(model, "a", [stack(0.5, bypass)])
    assert alike(model, 0.5)
    stack_ledger.attach(model, "a", [stack(-2.0, bypass)])
    assert alike(model, -2.0)
    stack_ledger.attach(model, "b", [stack(1.0, bypass)])
    assert alike(model, -1.0)
    stack_ledger.detach(model, "a")
    assert alike(model, 1.0)
    stack_ledger.detach(model, "b")
    assert alike(model, 0.0)


def test_a_strength_that_follows_a_schedule(model):
    stack_ledger.attach(model, "a", [stack(2.0, True, Schedule(((0.0, 1.0), (1.0, 0.0))))])
    network = model["network"]
    for percent in (0.0, 0.5, 1.0):
        assert stack_ledger.tick(model, percent) is (percent > 0)
        assert alike(model, 2.0 * (1.0 - percent))
        kept = network.kept
        assert not stack_ledger.tick(model, percent) and network.kept is kept, "nothing has changed"


def test_a_stack_that_fails_leaves_nothing_either(model):
    model["network"](X)
    weight = "network.layer.weight"
    with pytest.raises(RuntimeError):
        stack_ledger.attach(model, "a", [Stack({weight: [Patch(LoRA(torch.ones(4, 2), torch.ones(2, 5)), 1.0)]})])
    assert model["network"].kept == {} and alike(model, 0.0)


def test_networks_without_such_a_thing_are_left_alone():
    clear_weight_caches(nn.Sequential(nn.Linear(2, 2)))
