"""The ledger: who has something on a model, alone or together with others, and what a failure leaves."""

import copy

import pytest
import torch
from graft_nodes.patches.core.calls import around, layers_around
from graft_nodes.patches.core.ledger import ATTRIBUTE, Joint, enter_joint, find_joint, open_entry, owners
from graft_nodes.patches.core.slots import swap
from torch import nn


class Sum(Joint):
    """Numbers that are added to a bias together, and one call around the module."""

    owner = "sums"

    def install(self, model, things, about):
        for handle in (*self.slots.values(), *self.calls.values()):
            handle.leave()
        self.slots, self.calls = {}, {}
        if not things:
            return
        self.calls["call"] = around(model, "bypass", lambda _, inner, x: inner(x))
        if about == "fails":
            raise MemoryError("on purpose")
        bias = nn.Parameter(model.bias.detach() + sum(things), requires_grad=False)
        self.slots["bias"] = swap(model, "bias", bias)


def module():
    return nn.Linear(2, 2).requires_grad_(False)


def test_owners_in_the_order_in_which_they_came_and_nothing_afterwards():
    of = module()
    attributes = set(vars(of))
    with open_entry(of, "first") as one:
        one.enter_context(around(of, "copies", lambda _, inner, x: inner(x)))
        with open_entry(of, "second") as two:
            two.enter_context(around(of, "bypass", lambda _, inner, x: inner(x) * 2))
            assert owners(of) == ["first", "second"] and layers_around(of) == ["copies", "bypass"]
        assert owners(of) == ["first"] and layers_around(of) == ["copies"]
    assert owners(of) == [] and set(vars(of)) == attributes


def test_an_error_on_the_way_leaves_the_base():
    of = module()
    attributes, bias = set(vars(of)), of.bias
    with pytest.raises(MemoryError), open_entry(of, "one") as stack:
        stack.enter_context(swap(of, "bias", torch.ones(2)))
        raise MemoryError
    assert set(vars(of)) == attributes and of.bias is bias


def attach(of, owner, things, about=""):
    on = find_joint(of, Sum.owner)
    if on is None:
        on = Sum()
        enter_joint(of, on)
    on.attach(of, owner, things, about)
    return on


def test_what_several_owners_have_together():
    of = module()
    attributes, bias = set(vars(of)), of.bias
    value = bias.clone()
    on = attach(of, "a", [1.0, 2.0])
    assert attach(of, "b", [2.0, 4.0]) is on and on.things == [1.0, 2.0, 4.0]
    assert torch.equal(of.bias, value + 7) and owners(of) == ["sums"]
    on.detach(of, "nobody", "")
    on.detach(of, "a", "")
    assert on.things == [2.0, 4.0] and torch.equal(of.bias, value + 6)
    on.attach(of, "b", [8.0], "")  # another time: in place of what it had
    assert torch.equal(of.bias, value + 8)
    on.detach(of, "b", "")
    assert of.bias is bias and set(vars(of)) == attributes and find_joint(of, Sum.owner) is None


def test_a_failure_takes_everything_of_all_owners_off():
    of = module()
    attributes, bias = set(vars(of)), of.bias
    on = attach(of, "a", [1.0])
    with pytest.raises(MemoryError):
        on.attach(of, "b", [2.0], "fails")
    assert of.bias is bias and set(vars(of)) == attributes and not on.owners
    with pytest.raises(MemoryError):
        attach(of, "c", [2.0], "fails")
    assert set(vars(of)) == attributes


def test_others_stay_when_one_leaves():
    of = module()
    with open_entry(of, "training"):
        on = attach(of, "a", [1.0])
        assert owners(of) == ["training", "sums"]
        on.detach(of, "a", "")
        assert owners(of) == ["training"]


def test_a_deep_copy_begins_anew():
    of = module()
    with open_entry(of, "training"):
        on = attach(of, "a", [1.0])
        copied = copy.deepcopy(of)
        assert owners(copied) == [] and find_joint(copied, Sum.owner) is None
        with open_entry(copied, "other"):
            assert owners(of) == ["training", "sums"] and owners(copied) == ["other"]
        on.detach(of, "a", "")
    assert ATTRIBUTE not in vars(of)
