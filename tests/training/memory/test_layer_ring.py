"""Layers that wait in host memory: the next block comes ahead, in the order of the last time, and nothing is left."""

from contextlib import contextmanager

import pytest
import torch
from graft_nodes.training.memory import layer_ring, offload
from graft_nodes.training.memory.checkpointing import checkpoint_blocks
from graft_nodes.training.memory.layer_ring import Group, Order, layers_on_host
from torch import nn

CPU = torch.device("cpu")
ROOT = "root"


@pytest.mark.parametrize("own", [False, True])
def test_a_forward_that_somebody_replaced_is_there_again(own):
    module = nn.Sequential(nn.Linear(2, 2))
    if own:
        module.forward = lambda x: x + 1.0
    kept = dict(vars(module))
    with pytest.raises(ValueError, match="inside"), layers_on_host(module, CPU):
        assert vars(module)["forward"] is not kept.get("forward")
        raise ValueError("inside")
    assert vars(module) == kept and vars(module[0]).keys() == vars(nn.Linear(2, 2)).keys()


# --- the order --------------------------------------------------------------------------------------------------------


def _used(order, groups, *names):
    return [order.expect_after(groups[name]) for name in names]


def test_the_order_is_that_of_the_last_time_there_and_back():
    _, first, second, third = groups = [Group([], is_block) for is_block in (False, True, True, True)]
    order, there, back = Order(), (0, 1, 2, 3), (3, 2, 1)
    assert _used(order, groups, *there, *back) == [None] * 7
    expected = [first, second, third, third, second, first, None]
    assert _used(order, groups, *there, *back) == expected
    with torch.no_grad():  # a validation, which has no way back, does not change what training expects
        assert _used(order, groups, *there) == [None] * 4
        assert _used(order, groups, *there) == [first, second, third, None]
    assert _used(order, groups, *there, *back) == expected


def test_a_block_that_is_skipped_is_expected_to_be_skipped_again():
    _, first, second, third = groups = [Group([], is_block) for is_block in (False, True, True, True)]
    order = Order()
    _used(order, groups, 0, 1, 2, 3)
    assert _used(order, groups, 0, 1, 3) == [first, second, None]
    assert _used(order, groups, 0, 1, 3) == [first, third, None]


# --- what is on the device --------------------------------------------------------------------------------------------


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 5), nn.Linear(5, 3)
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        return x + self.outer(torch.tanh(self.inner(x)))


class Model(nn.Module):
    def __init__(self, count=4):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.blocks = nn.ModuleList([Part() for _ in range(count)])
        self.skipped = ()

    def forward(self, x):
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            if number not in self.skipped:
                x = block(x)
        return x


@pytest.fixture
def copies(monkeypatch):
    """Every tensor of the CPU stands for one in host memory; the numbers of what was copied, in order."""
    copied, own = [], layer_ring.copies_on
    monkeypatch.setattr(offload, "is_on_other_device", lambda tensor, device: True)
    monkeypatch.setattr(layer_ring, "copies_ahead", lambda device: True)

    def copies_on(device, tensors):
        copied.append(list(tensors))
        return own(device, tensors)

    monkeypatch.setattr(layer_ring, "copies_on", copies_on)
    return copied


def _named(model, copied):
    """Which block each copy was of."""
    numbers = {id(block.inner.weight): number for number, block in enumerate(model.blocks)}
    found = [numbers.get(id(tensors[0]), ROOT) for tensors in copied]
    copied.clear()
    return found


@contextmanager
def _training(model):
    with layers_on_host(model, CPU), checkpoint_blocks(model), torch.enable_grad():
        yield


def _gradient(model):
    x = torch.linspace(-1, 1, 6).view(2, 3).requires_grad_()
    model(x).square().sum().backward()
    return x.grad


def _model():
    model = Model().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.copy_(torch.randn(p.shape, generator=generator))
    return model


def test_each_block_is_copied_once_there_and_once_back_but_the_last_which_stays(copies):
    model = _model()
    plain = _gradient(model)
    with _training(model):
        found = []
        for _ in range(3):
            assert torch.equal(_gradient(model), plain)
            found.append(_named(model, copies))
    there_and_back = [ROOT, 0, 1, 2, 3, 2, 1, 0]
    assert found[0] == [ROOT, 0, 1, 2, 3, 3, 2, 1, 0]  # nothing is known yet
    assert found[1:] == [there_and_back] * 2


def test_another_order_costs_one_copy_and_no_bytes_of_the_result(copies):
    model = _model()
    whole = _gradient(model)
    model.skipped = (1,)
    without = _gradient(model)
    assert not torch.equal(whole, without)
    with _training(model):
        model.skipped = ()
        assert torch.equal(_gradient(model), whole)
        assert torch.equal(_gradient(model), whole)
        copies.clear()
        model.skipped = (1,)
        assert torch.equal(_gradient(model), without)
        assert sorted(map(str, _named(model, copies))) == sorted(map(str, [ROOT, 0, 1, 2, 3, 2, 1, 0]))
        assert torch.equal(_gradient(model), without)
        assert _named(model, copies) == [ROOT, 0, 2, 3, 2, 0]


def test_a_step_that_is_interrupted_leaves_nothing_and_the_next_is_right(copies):
    model = _model()
    plain = _gradient(model)
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    with _training(model):
        _gradient(model)
        model.blocks[2].register_forward_pre_hook(_interrupt)
        with pytest.raises(KeyboardInterrupt):
            _gradient(model)
        model.blocks[2]._forward_pre_hooks.clear()
        for _ in range(2):
            assert torch.equal(_gradient(model), plain)
    assert all(id(p) == before[name][0] and torch.equal(p, before[name][1]) for name, p in model.named_parameters())


def _interrupt(module, args):
    raise KeyboardInterrupt


def test_weights_that_are_replaced_between_two_uses_are_the_ones_that_count(copies):
    model = _model()
    with _training(model):
        for _ in range(2):
            _gradient(model)
        replaced = []

        def replace(module, args):
            """Block 1 runs, and block 2 has come ahead."""
            if not replaced:
                replaced.append(model.blocks[2].inner)
                model.blocks[2].inner.weight = nn.Parameter(torch.zeros(5, 3), requires_grad=False)

        hook = model.blocks[1].register_forward_pre_hook(replace)
        found = _gradient(model)
        hook.remove()
    assert replaced and torch.equal(found, _gradient(model))
