"""Slots: what is exchanged comes back, as the same object with the same bytes, in whatever order things leave."""

import copy
import itertools

import pytest
import torch
from graft_nodes.patches.core import slots
from graft_nodes.patches.core.slots import Swap, exchange, find_slot, hold_values, slots_by_tensor, swap, swap_all
from torch import nn


def model():
    built = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    built[2].weight = built[0].weight  # tied
    return built


def state(module):
    return [
        (type(part), set(vars(part)), {n: id(t) for n, t in (*part._parameters.items(), *part._buffers.items())})
        for part in module.modules()
    ], [tensor.clone() for tensor in (*module.parameters(), *module.buffers())]


def check(module, before):
    now = state(module)
    assert now[0] == before[0] and all(map(torch.equal, now[1], before[1]))


def parameter(value):
    return nn.Parameter(torch.full((3, 3), float(value)), requires_grad=False)


def test_a_parameter_and_a_buffer_are_exchanged_by_reference():
    module = model()
    before = state(module)
    mean = torch.ones(3)
    with swap(module, "1.running_mean", mean), swap(module, "1.bias", mean):
        assert module[1].running_mean is mean and module[1].bias is mean
    check(module, before)


def test_every_name_of_a_tied_weight_is_exchanged():
    module, other = model(), parameter(1)
    before = state(module)
    with swap(module, "2.weight", other) as handle:
        assert module[0].weight is other and module[2].weight is other
        another = parameter(2)
        handle.put(another)
        assert module[0].weight is another and module[2].weight is another
    check(module, before)
    assert sorted(len(names) for names in slots_by_tensor(module).values()) == [1] * 7 + [2]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_swaps_of_one_slot_leave_in_any_order(order):
    module = model()
    before, values = state(module), [parameter(n) for n in range(3)]
    handles = [swap(module, "0.weight", value) for value in values]
    on = list(range(3))
    for place in order:
        handles[place].leave()
        handles[place].leave()
        on.remove(place)
        if on:
            assert module[0].weight is values[max(on)] and module[2].weight is values[max(on)]
    check(module, before)


def test_a_swap_beneath_another_one_changes_what_that_one_gives_back():
    module = model()
    before = state(module)
    below, above = swap(module, "0.weight", parameter(1)), swap(module, "0.weight", parameter(2))
    later = parameter(3)
    below.put(later)
    assert float(module[0].weight[0, 0]) == 2.0
    above.leave()
    assert module[0].weight is later
    below.leave()
    check(module, before)


@pytest.mark.parametrize("yields", [True, False])
def test_what_somebody_else_has_put_there_since(yields):
    module, theirs = model(), parameter(9)
    own = module[0].weight
    handle = swap(module, "0.weight", parameter(1), yields)
    module[0].weight = theirs
    handle.put(parameter(2))
    assert (module[0].weight is theirs) == yields
    handle.leave()
    assert module[0].weight is (theirs if yields else own) and module[2].weight is own
    assert not any("_graft_swaps" in vars(part) for part in module.modules())


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match=r"0\.nothing: the model has no such weight any more"):
        find_slot(model(), "0.nothing")
    without = nn.Linear(3, 3, bias=False)
    with pytest.raises(ValueError, match="bias: the model has no such weight"):
        swap(without, "bias", torch.zeros(3))


def test_many_slots_at_once_and_an_error_on_the_way():
    module = model()
    before, asked = state(module), []

    def new(slot):
        asked.append(slot.name)
        if slot.tensor.ndim == 0:
            return None
        if len(asked) == 5:
            raise MemoryError
        return nn.Parameter(slot.tensor.detach() + 1, requires_grad=False)

    with pytest.raises(MemoryError), swap_all(slots.slots(module.modules()), new):
        pass
    check(module, before)
    asked.clear()
    with swap_all(
        slots.slots(module.modules()), lambda slot: None if slot.tensor.ndim == 0 else slot.tensor.detach() + 1
    ):
        assert module[0].weight is module[2].weight and torch.equal(module[0].weight, before[1][0] + 1)
        assert int(module[1].num_batches_tracked) == 0
    check(module, before)


def test_attributes_that_are_no_buffers():
    module = model()
    module[0].places = torch.arange(3)
    kept = module[0].places
    with swap_all(slots.slots(module.modules(), attributes=True), lambda slot: slot.tensor.detach().clone()):
        assert module[0].places is not kept
    assert module[0].places is kept


def test_a_deep_copy_keeps_what_it_has():
    module, other = model(), parameter(4)
    handle = swap(module, "0.weight", other)
    copied = copy.deepcopy(module)
    handle.leave()
    assert torch.equal(copied[0].weight, other) and copied[0].weight is copied[2].weight
    with swap(copied, "0.weight", parameter(5)):
        pass
    assert torch.equal(copied[0].weight, other)


def test_nobody_keeps_a_model_that_is_gone():
    import gc
    import weakref

    module = model()
    handle = Swap(find_slot(module, "0.weight"), parameter(1))
    gone = weakref.ref(module)
    del module, handle
    gc.collect()
    assert gone() is None


def test_values_in_place_come_back():
    tensor = torch.tensor([1.0, 2.0])
    address = tensor.data_ptr()
    with hold_values(tensor):
        tensor.add_(5)
    saved = slots.copy_to_host(tensor)
    with torch.inference_mode():
        made_there = torch.ones(2)
    handles = [hold_values(made_there), hold_values(tensor, saved)]
    slots.write_(made_there, torch.zeros(2)), slots.write_(tensor, torch.zeros(2))
    assert float(made_there.sum() + tensor.sum()) == 0.0
    for handle in handles:
        handle.leave()
    assert made_there.tolist() == [1.0, 1.0] and tensor.tolist() == [1.0, 2.0] and tensor.data_ptr() == address


def test_two_tensors_exchange_their_values_and_get_them_back():
    left, right = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    with exchange(left, right, left.clone()):
        assert left.tolist() == [3.0, 4.0] and right.tolist() == [1.0, 2.0]
    assert left.tolist() == [1.0, 2.0] and right.tolist() == [3.0, 4.0]


def test_a_slot_that_was_removed_meanwhile_stays_removed():
    layer = nn.Linear(2, 2)
    layer.register_buffer("numbers", torch.zeros(2))
    held = swap(layer, "numbers", torch.ones(2))
    del layer.numbers
    held.leave()
    assert "numbers" not in layer._buffers and "numbers" not in dict(layer.named_buffers())
