"""A stack that is switched off and on, against the same model with its weights changed by hand in float64."""

import copy

import pytest
import torch
from graft_nodes.patches.adapters.diff import Diff
from graft_nodes.patches.adapters.dora import DoRA
from graft_nodes.patches.adapters.lora import LoRA
from graft_nodes.patches.patching import stack_ledger
from graft_nodes.patches.patching.fuse import Patch, Stack
from graft_nodes.patches.patching.switched_stack import SwitchedStack, check_switchable
from torch import nn

COMPUTE = (torch.float32, torch.device("cpu"))


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


class Net(nn.Module):
    """Two linear layers, the second one inside another module, and a norm."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 4)
        self.norm = nn.LayerNorm(4)
        self.inside = nn.Sequential(nn.Linear(4, 3))

    def forward(self, x):
        return self.inside(self.norm(self.first(x)))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().requires_grad_(False)


def lora(rows, columns, rank=2):
    return LoRA(random(rows, rank), random(rank, columns), 3.0)


@pytest.fixture
def patches():
    """Both attributes of the first layer, and two patches on the second."""
    return {
        "first.weight": [Patch(lora(4, 6), 0.5)],
        "first.bias": [Patch(Diff(random(4)), 2.0)],
        "inside.0.weight": [Patch(lora(3, 4), -1.0), Patch(Diff(random(3, 4)), 0.25)],
    }


def by_hand(net, patches):
    """The output of the net in float64 with the patches added to its weights."""
    changed = copy.deepcopy(net).double()
    weights = dict(changed.named_parameters())
    for name, on_weight in patches.items():
        for patch in on_weight:
            layer = patch.layer
            if isinstance(layer, Diff):
                change = layer.diff.double()
            else:
                change = layer.up.double() @ layer.down.double() * (3.0 / layer.rank)
            weights[name] += patch.strength * change
    return lambda x: changed(x.double()).float()


def test_it_is_on_except_inside_off_and_until_it_is_removed(net, patches):
    x = random(5, 6)
    plain, expected = net(x), by_hand(net, patches)(x)
    assert not torch.allclose(plain, expected, atol=0.1)
    stack = SwitchedStack(net, patches, COMPUTE)
    assert torch.allclose(net(x), expected, atol=1e-5)
    for _ in range(2):
        with stack.switch_off():
            assert torch.equal(net(x), plain)
        assert torch.allclose(net(x), expected, atol=1e-5)
    with pytest.raises(KeyboardInterrupt), stack.switch_off():
        raise KeyboardInterrupt
    assert torch.allclose(net(x), expected, atol=1e-5)
    stack.remove()
    assert torch.equal(net(x), plain)


def test_it_follows_weights_that_move(net, patches):
    x = random(5, 6)
    SwitchedStack(net, patches, COMPUTE)
    for parameter in net.parameters():
        parameter += random(*parameter.shape, seed=9)
    bare = Net()
    bare.load_state_dict(net.state_dict())
    assert torch.allclose(net(x), by_hand(bare.requires_grad_(False), patches)(x), atol=1e-5)


def test_two_on_one_model_go_in_any_order(net, patches):
    x = random(5, 6)
    plain, one = net(x), by_hand(net, patches)(x)
    first, second = SwitchedStack(net, patches, COMPUTE), SwitchedStack(net, patches, COMPUTE)
    both = net(x)
    first.remove()
    assert torch.allclose(net(x), one, atol=1e-5) and not torch.allclose(net(x), both, atol=0.1)
    second.remove()
    assert torch.equal(net(x), plain)


def test_nothing_remains_below_a_stack_that_was_put_on_later(net, patches):
    stack = SwitchedStack(net, patches, COMPUTE)
    stack_ledger.attach(net, 1, [Stack(patches, tuple(patches))])
    stack.remove()
    stack_ledger.detach(net, 1)
    assert not [part for part in net.modules() if "forward" in vars(part)]


def test_what_cannot_be_switched_is_listed(net):
    weight = net.first.weight
    dora = Patch(DoRA(lora(4, 6), weight.norm(dim=1, keepdim=True)), 1.0)
    both = {"first.weight": [dora, Patch(lora(4, 6), 1.0)], "norm.weight": [Patch(Diff(random(4)), 1.0)]}
    check_switchable(net, {"first.weight": both["first.weight"]}, weights_move=False)
    check_switchable(net, {"inside.0.weight": [Patch(lora(3, 4), 1.0)]}, weights_move=True)
    with pytest.raises(ValueError) as error:
        check_switchable(net, both, weights_move=True)
    assert str(error.value).splitlines() == [
        "- first.weight: DoRA depends on the weight, and the weight is trained",
        "- norm.weight: LayerNorm has no bypass",
    ]
    with pytest.raises(ValueError, match=r"^- norm\.weight: LayerNorm has no bypass$"):
        check_switchable(net, both, weights_move=False)
