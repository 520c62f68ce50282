"""Calls around a forward: their order, leaving in any order, beside other packs, copied, and under torch.compile."""

import copy
import itertools
from functools import partial

import pytest
import torch
from graft_nodes.patches.core.calls import LAYERS, around, has_other_forward, layers_around
from torch import nn

NAMES = [layer.name for layer in LAYERS]
X = torch.tensor([[1.0, 2.0, 3.0]])


class Network(nn.Module):
    """Adds its weight; a forward that tells the calls apart from each other by what they write down."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 1.0, 1.0]))

    def forward(self, x, shift=0.0):
        return x + self.weight + shift


def noting(name, notes):
    def call(module, inner, *args, **kwargs):
        notes.append(name)
        out = inner(*args, **kwargs)
        notes.append(f"/{name}")
        return out

    return call


def times(factor):
    return lambda module, inner, x, **kwargs: inner(x, **kwargs) * factor


def plus(number):
    return lambda module, inner, x, **kwargs: inner(x, **kwargs) + number


def together(names):
    """Whether these layers may be around one module at once."""
    module = Network()
    try:
        for name in names:
            around(module, name, plus(0))
    except ValueError:
        return False
    return True


def test_the_order_is_that_of_the_layers_whoever_comes_first():
    some = [name for name in NAMES if name not in ("compiled", "ring")]
    for order in (some, some[::-1], some[1::2] + some[::2]):
        module, notes = Network(), []
        for name in order:
            around(module, name, noting(name, notes))
        assert torch.equal(module(X, shift=2.0), X + 3.0)
        assert notes == some + [f"/{name}" for name in reversed(some)] and layers_around(module) == some


def test_every_layer_has_a_name_of_its_own_and_says_why_it_is_there():
    assert len(set(NAMES)) == len(NAMES) and all(layer.why.endswith(".") for layer in LAYERS)


def test_of_one_layer_the_last_to_come_is_outermost():
    module = Network()
    first, second = around(module, "bypass", times(2)), around(module, "bypass", plus(1))
    assert torch.equal(module(X), (X + 1) * 2 + 1)
    first.leave()
    assert torch.equal(module(X), X + 2)
    third = around(module, "bypass", times(3))
    assert torch.equal(module(X), (X + 2) * 3)
    second.leave(), third.leave()
    assert torch.equal(module(X), X + 1) and "forward" not in vars(module)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_they_leave_in_any_order(order):
    module, attributes = Network(), dict(vars(Network()))
    calls = [times(2), plus(5), times(3)]
    layers = ["adapter", "bypass", "routing"]
    handles = [around(module, layer, call) for layer, call in zip(layers, calls, strict=True)]
    left = dict(zip(layers, calls, strict=True))
    for place in order:
        handles[place].leave()
        del left[layers[place]]
        expected = X + 1
        for layer in ("bypass", "adapter", "routing"):
            if layer in left:
                expected = left[layer](module, lambda _, out=expected: out, X)
        assert torch.equal(module(X), expected)
        handles[place].leave()  # twice is once
    assert set(vars(module)) == set(attributes) and type(module) is Network


class Other:
    """Another pack's wrapper, which puts back what it found, as most do."""

    def __init__(self, module, style):
        self.module, self.style = module, style

    def on(self):
        found = self.found = self.module.forward
        self.had = vars(self.module).get("forward")

        def wrapper(*args, **kwargs):
            return found(*args, **kwargs) + 100

        class Callable:
            def __init__(self):
                self.inner = {"forward": found}

            def __call__(self, *args, **kwargs):
                return self.inner["forward"](*args, **kwargs) + 100

            def method(self, *args, **kwargs):
                return self(*args, **kwargs)

        def with_first(first, *args, **kwargs):
            return first(*args, **kwargs) + 100

        self.module.forward = {
            "closure": wrapper,
            "object": Callable(),
            "method": Callable().method,
            "partial": partial(with_first, found),
        }[self.style]

    def off(self):
        if self.had is None:
            del self.module.forward
        else:
            self.module.forward = self.had


@pytest.mark.parametrize("style", ["closure", "object", "method", "partial"])
def test_another_pack_that_came_later_stays_and_holds_nothing_of_ours(style):
    module, other = Network(), Other(Network(), style)
    other.module = module
    handle = around(module, "bypass", times(2))
    other.on()
    theirs = vars(module)["forward"]
    assert torch.equal(module(X), (X + 1) * 2 + 100) and has_other_forward(module)
    # what comes now lies where its layer is: inside of the other pack's, which calls ours
    second = around(module, "routing", plus(1))
    assert vars(module)["forward"] is theirs and torch.equal(module(X), (X + 1) * 2 + 1 + 100)
    handle.leave(), second.leave()
    assert vars(module)["forward"] is theirs and torch.equal(module(X), X + 101)
    other.off()
    assert torch.equal(module(X), X + 1)
    around(module, "bypass", times(2)).leave()  # takes away what the other pack has put back
    assert "forward" not in vars(module)


def test_another_pack_that_was_there_first_comes_back():
    module, other = Network(), Other(Network(), "closure")
    other.module = module
    other.on()
    theirs = vars(module)["forward"]
    with around(module, "bypass", times(2)), around(module, "adapter", plus(1)):
        assert torch.equal(module(X), (X + 101) * 2 + 1)
    assert vars(module)["forward"] is theirs


def test_a_forward_that_does_not_call_ours_gets_ours_around_it():
    module = Network()
    first = around(module, "bypass", times(2))
    module.forward = lambda x: x * 0 + 7
    second = around(module, "bypass", times(3))
    assert torch.equal(module(X), X * 0 + 21)
    first.leave(), second.leave()
    assert torch.equal(module(X), X * 0 + 7)


ORDERS = [
    order
    for order in map("".join, itertools.permutations("aAbBoO"))
    if all(order.index(name) < order.index(name.upper()) for name in "abo")
]


@pytest.mark.parametrize("is_polite", [True, False])
def test_ours_and_another_pack_in_every_order(is_polite):
    """a, b: ours come; o: another pack's comes; capitals: they leave. What runs is always what is on."""
    for order in ORDERS:
        module, on, handles, notes = Network(), set(), {}, []
        layers, state = {"a": "bypass", "b": "routing"}, {}
        for action in order:
            name = action.lower()
            if action in layers:
                handles[action] = around(module, layers[action], noting(action, notes))
            elif action == "o":
                state |= {"found": module.forward, "had": vars(module).get("forward"), "on": True}

                def wrapper(x, state=state, notes=notes):
                    if state["on"]:
                        notes.append("o")
                    return state["found"](x)

                module.forward = wrapper
            elif action == "O":
                state["on"] = not is_polite
                if (
                    not is_polite or vars(module).get("forward") is wrapper
                ):  # most put back what they found, come what may
                    vars(module).pop("forward", None)
                    if state["had"] is not None:
                        module.forward = state["had"]
            else:
                handles[name].leave()
            on ^= {name}
            notes.clear()
            assert torch.equal(module(X), X + 1)
            ran = {note for note in notes if not note.startswith("/")}
            if is_polite or "o" in on or not on:
                assert ran == on, order
            else:
                assert ran <= on, order  # it may have thrown away what came on top of it


def test_pairs_that_must_not_meet_raise_where_the_second_one_comes():
    apart = {tuple(sorted(pair)) for pair in itertools.combinations_with_replacement(NAMES, 2) if not together(pair)}
    assert apart == {
        ("adapter", "compiled"),
        ("bypass", "compiled"),
        ("compiled", "input"),
        ("compiled", "probe"),
        ("compiled", "replacement"),
        ("compiled", "compiled"),
        ("replacement", "replacement"),
        ("sharding", "sharding"),
        ("ring", "sharding"),
    }
    module = Network()
    with around(module, "compiled", plus(1)):
        with pytest.raises(ValueError, match="Network: bypass cannot be put around a module that has compiled already"):
            around(module, "bypass", plus(1))
        assert layers_around(module) == ["compiled"]
    assert "forward" not in vars(module)


def test_a_layer_that_is_not_there():
    module = Network()
    with pytest.raises(ValueError, match="adaptor is not a layer of calls: expected one of announcement, cast, copies"):
        around(module, "adaptor", plus(1))
    assert "forward" not in vars(module)


def test_an_exception_passes_and_leaves_nothing():
    module = Network()

    def fails(module, inner, *args):
        raise RuntimeError("within")

    with pytest.raises(RuntimeError, match="within"), around(module, "adapter", plus(1)), around(module, "ring", fails):
        module(X)
    assert "forward" not in vars(module) and torch.equal(module(X), X + 1)


def test_a_call_may_come_and_leave_while_the_module_computes():
    """A block runs again as it ran, whatever has come in between: gradient checkpointing keeps `inner`."""
    module, kept = Network(), []

    def outer(module, inner, *args, **kwargs):
        kept.append(inner)
        with around(module, "routing", plus(1000)):
            return inner(*args, **kwargs)

    inner_handle = around(module, "adapter", times(2))
    with around(module, "checkpointing", outer):
        assert torch.equal(module(X), (X + 1) * 2)
    inner_handle.leave()
    assert torch.equal(kept[0](X), (X + 1) * 2) and torch.equal(module(X), X + 1)


def test_nested_modules_have_calls_of_their_own():
    inside = Network()
    outside = nn.Sequential(inside, nn.Identity())
    notes = []
    with around(outside, "routing", noting("outer", notes)), around(inside, "routing", noting("inner", notes)):
        assert torch.equal(outside(X), X + 1)
    assert notes == ["outer", "inner", "/inner", "/outer"]


def test_a_deep_copy_computes_as_its_original_did_with_weights_of_its_own():
    module = nn.Sequential(Network())
    seen = []

    def call(module, inner, x):
        seen.append(module)
        return inner(x) * 2

    handle = around(module[0], "bypass", call)
    copied = copy.deepcopy(module)
    with torch.no_grad():
        copied[0].weight.fill_(5.0)
    assert torch.equal(copied(X), (X + 5) * 2) and torch.equal(module(X), (X + 1) * 2)
    assert seen == [copied[0], module[0]]
    handle.leave()
    assert torch.equal(module(X), X + 1) and torch.equal(copied(X), (X + 5) * 2)


def test_a_deep_copy_after_leaving_has_nothing():
    module = Network()
    around(module, "bypass", times(2)).leave()
    assert "forward" not in vars(copy.deepcopy(module))


class Gain:
    """A call of one form with another number each time."""

    def __init__(self, factor):
        self.factor = torch.tensor(factor)


def gained(factor):
    gain = Gain(factor)

    def call(module, inner, x):
        return inner(x) * gain.factor

    return call


def test_under_torch_compile_another_call_of_the_same_form_compiles_nothing_again():
    module = nn.Sequential(Network(), nn.SiLU()).requires_grad_(False)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="eager")
    with torch.no_grad():
        for number in range(4):
            once = torch._dynamo.config.patch(error_on_recompile=number > 0)
            adapter, bypass = gained(number + 1.0), gained(number + 2.0)
            with around(module[0], "adapter", adapter), around(module[0], "bypass", bypass), once:
                assert torch.allclose(compiled(X), module(X))
        # and it is seen that they are gone
        assert torch.allclose(compiled(X), module(X))
        handle = around(module[0], "bypass", gained(2.0))
        found = compiled(X)
        handle.leave()
        assert torch.allclose(found, nn.functional.silu((X + 1) * 2))
    torch._dynamo.reset()


def test_under_torch_compile_one_that_is_exchanged_beside_one_that_stays():
    module = nn.Sequential(Network()).requires_grad_(False)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="eager")
    with torch.no_grad(), around(module[0], "adapter", gained(3.0)):
        for number in range(4):
            once = torch._dynamo.config.patch(error_on_recompile=number > 0)
            with around(module[0], "bypass", gained(number + 2.0)), once:
                assert torch.allclose(compiled(X), (X + 1) * (number + 2) * 3)
    torch._dynamo.reset()
