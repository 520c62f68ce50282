"""The ledger: whatever comes and goes, in any order, the base is there again, bit for bit, and live is base + what is on it."""

import gc
import itertools

import pytest
import torch
from graft_nodes.patches import weights
from graft_nodes.patches.adapters import Diff, LoRA
from graft_nodes.patches.stack import Piece, Stack
from graft_nodes.patches.weights import Version, attach, attached, detach, plan
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import nn

NAMES = ("0.weight", "2.weight", "3.weight")


def model(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    built = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 5), nn.LayerNorm(5)).requires_grad_(False)
    for parameter in built.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return built.to(dtype)


def layer(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    if len(shape) == 1:
        return Diff(torch.randn(shape, generator=generator))
    return LoRA(torch.randn(shape[0], 3, generator=generator), torch.randn(3, shape[1], generator=generator))


def stack(of, names, seed=0, strength=0.5, bypass=False):
    shapes = {name: tuple(of.get_parameter(name).shape) for name in names}
    pieces = {name: [Piece(layer(shape, seed + n), strength)] for n, (name, shape) in enumerate(shapes.items())}
    return Stack(pieces, [name for name in names if len(shapes[name]) == 2] if bypass else ())


class Snapshot:
    """What a model is: bytes, parameter objects, classes, attributes, hooks."""

    def __init__(self, of):
        self.bytes = {name: tensor.clone() for name, tensor in of.state_dict().items()}
        self.objects = {name: id(parameter) for name, parameter in of.named_parameters()}
        self.attributes = [(type(module), set(module.__dict__)) for module in of.modules()]
        self.hooks = [len(module._forward_hooks) + len(module._forward_hooks_with_kwargs) for module in of.modules()]

    def check(self, of):
        now = Snapshot(of)
        assert now.bytes.keys() == self.bytes.keys() and all(torch.equal(now.bytes[name], self.bytes[name]) for name in self.bytes)
        assert (now.objects, now.attributes, now.hooks) == (self.objects, self.attributes, self.hooks)


def expected(base, stacks, x):
    """The output of a copy whose weights are patched in float64 by hand."""
    by_hand = model().double()
    for name, parameter in by_hand.named_parameters():
        parameter.copy_(base[name])
        for piece in [piece for of in stacks for piece in of.pieces.get(name, ())]:
            change = piece.layer.diff if isinstance(piece.layer, Diff) else piece.layer.up.double() @ piece.layer.down.double()
            parameter += piece.strength * change
    return by_hand(x.double())


@pytest.mark.parametrize("bypass", [False, True])
def test_attach_and_detach(bypass):
    of = model()
    before, one, x = Snapshot(of), stack(of, NAMES, bypass=bypass), torch.randn(3, 6)
    attach(of, "a", [one])
    assert torch.allclose(of(x).double(), expected(before.bytes, [one], x), atol=1e-4)
    detach(of, "a")
    before.check(of)


@pytest.mark.parametrize("order", list(itertools.permutations("abc")))
def test_detach_in_any_order_restores_the_base(order):
    of, x = model(), torch.randn(3, 6)
    before = Snapshot(of)
    stacks = {"a": stack(of, NAMES[:2], 0), "b": stack(of, NAMES[1:], 10, bypass=True), "c": stack(of, NAMES, 20)}
    for name in "abc":
        attach(of, name, [stacks[name]])
    for name in order:
        assert torch.allclose(of(x).double(), expected(before.bytes, attached(of), x), atol=1e-4)
        detach(of, name)
    before.check(of)


def test_twice_by_one_owner_and_once_by_two():
    of = model()
    before, one = Snapshot(of), stack(of, NAMES)
    attach(of, "a", [one])
    live = of.get_parameter("0.weight")
    attach(of, "a", [one])
    attach(of, "b", [one])
    assert attached(of) == [one] and of.get_parameter("0.weight") is live
    detach(of, "a")
    assert attached(of) == [one]
    detach(of, "b")
    detach(of, "b")
    before.check(of)


def test_untouched_weights_are_not_copied_and_results_are_kept(monkeypatch):
    of, one = model(), stack(model(), ["0.weight"])
    untouched = {name: parameter for name, parameter in of.named_parameters() if name != "0.weight"}
    attach(of, "a", [one])
    live = of.get_parameter("0.weight")
    assert all(of.get_parameter(name) is parameter for name, parameter in untouched.items())
    detach(of, "a")
    monkeypatch.setattr(weights, "patched", lambda *_, **__: pytest.fail("computed again"))
    attach(of, "a", [one])
    assert of.get_parameter("0.weight") is live


def test_memory_is_used_again_when_the_recipe_changes():
    of, one, two = model(), stack(model(), ["0.weight"]), stack(model(), ["0.weight"], 5)
    before = Snapshot(of)
    attach(of, "a", [one])
    memory = of.get_parameter("0.weight").data_ptr()
    attach(of, "b", [two])
    assert of.get_parameter("0.weight").data_ptr() == memory
    x = torch.randn(2, 6)
    assert torch.allclose(of(x).double(), expected(before.bytes, [one, two], x), atol=1e-4)


def test_kept_memory_goes_with_the_stack():
    import weakref

    of, one = model(), stack(model(), ["0.weight"])
    attach(of, "a", [one])
    live = weakref.ref(of.get_parameter("0.weight"))
    detach(of, "a")
    assert live() is not None
    del one
    gc.collect()
    assert live() is None


def test_a_new_base_is_taken_after_a_load():
    """A host's loader may put other Parameter objects in, or write other bytes into the same ones."""
    of, one, x = model(), stack(model(), NAMES), torch.randn(3, 6)
    attach(of, "a", [one], Version(1))
    detach(of, "a", Version(1))
    of[0].weight = nn.Parameter(torch.randn(8, 6), requires_grad=False)
    of[2].weight.data.copy_(torch.randn(5, 8))
    before = Snapshot(of)
    attach(of, "a", [one], Version(2))
    assert torch.allclose(of(x).double(), expected(before.bytes, [one], x), atol=1e-4)
    detach(of, "a", Version(2))
    before.check(of)


def test_passing_contents_are_never_kept():
    of, one, x = model(), stack(model(), NAMES), torch.randn(3, 6)
    real = Snapshot(of)
    attach(of, "a", [one], Version(1))
    detach(of, "a", Version(1))
    hooked = of[0].weight.clone()
    of[0].weight.data.mul_(3)  # what a LoRA hook does: the same load, the same object, other bytes for a while
    base = Snapshot(of).bytes
    attach(of, "a", [one], Version(1, frozenset({"0.weight"})))
    assert torch.allclose(of(x).double(), expected(base, [one], x), atol=1e-4)
    detach(of, "a", Version(1, frozenset({"0.weight"})))
    of[0].weight.data.copy_(hooked)
    attach(of, "a", [one], Version(1))
    assert torch.allclose(of(x).double(), expected(real.bytes, [one], x), atol=1e-4)
    detach(of, "a", Version(1))
    real.check(of)


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_failure_while_computing_takes_everything_off(monkeypatch, call):
    of, one, two = model(), stack(model(), NAMES), stack(model(), NAMES, 10)
    before = Snapshot(of)
    attach(of, "a", [one])
    real, calls = weights.patched, itertools.count(1)

    def failing(*arguments, **keywords):
        result = real(*arguments, **keywords)
        if next(calls) == call:
            raise MemoryError("out of memory")
        return result

    monkeypatch.setattr(weights, "patched", failing)
    with pytest.raises(MemoryError):
        attach(of, "b", [two])
    before.check(of)
    monkeypatch.undo()
    x = torch.randn(3, 6)
    attach(of, "a", [one])
    assert torch.allclose(of(x).double(), expected(before.bytes, [one], x), atol=1e-4)


def test_a_weight_that_is_gone():
    of, one = model(), Stack({"9.weight": []})
    before = Snapshot(of)
    with pytest.raises(AttributeError):
        attach(of, "a", [one])
    before.check(of)


def test_weights_made_in_inference_mode_and_a_backward_through_the_patched_ones():
    with torch.inference_mode():
        of = model()
        before, one = Snapshot(of), stack(of, NAMES)
        attach(of, "a", [one])
        of(torch.randn(2, 6))
        attach(of, "b", [stack(of, NAMES, 9)])
    assert not of.get_parameter("0.weight").is_inference()
    detach(of, "b")
    with torch.inference_mode():
        detach(of, "a")
        before.check(of)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_restored_bit_for_bit(dtype):
    of = model(dtype)
    before = Snapshot(of)
    attach(of, "a", [stack(of, NAMES)])
    assert of.get_parameter("0.weight").dtype == dtype
    detach(of, "a")
    before.check(of)


def test_plan():
    of = model()
    assert plan(of, NAMES, "auto") == (list(NAMES), [], {})
    assert plan(of, NAMES, "bypass") == (["3.weight"], ["0.weight", "2.weight"], {"merged because LayerNorm has no bypass": 1})
    of[0].weight.data = of[0].weight.data.to(torch.float8_e4m3fn)
    merge, bypass, reasons = plan(of, NAMES, "auto")
    assert (merge, bypass) == (["2.weight", "3.weight"], ["0.weight"])
    assert reasons == {"at the activations because its type is torch.float8_e4m3fn": 1}
    with pytest.raises(ValueError, match=r"0\.weight: cannot be merged, its type is torch\.float8_e4m3fn; use mode auto"):
        plan(of, NAMES, "merge")
    with pytest.raises(ValueError, match=r"3\.weight: cannot be merged, paged, and LayerNorm has no bypass; use mode host"):
        plan(of, NAMES, "auto", "paged")


class Sequences(RuleBasedStateMachine):
    """Random attach, change, detach and failure of overlapping stacks by three owners."""

    @initialize()
    def start(self):
        self.model = model()
        self.before = Snapshot(self.model)
        self.owners = {}
        self.loads = itertools.count(1)
        self.version = Version(0)

    @rule(
        owner=st.sampled_from("abc"),
        seeds=st.lists(st.integers(0, 5), min_size=1, max_size=2),
        names=st.sets(st.sampled_from(NAMES), min_size=1),
        bypass=st.booleans(),
        strength=st.sampled_from([0.5, -1.0]),
    )
    def attach(self, owner, seeds, names, bypass, strength):
        self.owners.pop(owner, None)
        self.owners[owner] = [stack(self.model, sorted(names), seed, strength, bypass) for seed in seeds]
        attach(self.model, owner, self.owners[owner], self.version)

    @rule(owner=st.sampled_from("abc"))
    def detach(self, owner):
        self.owners.pop(owner, None)
        detach(self.model, owner, self.version)

    @rule(owner=st.sampled_from("abc"))
    def again(self, owner):
        if owner in self.owners:
            held = self.owners.pop(owner)
            detach(self.model, owner, self.version)
            attach(self.model, owner, held, self.version)
            self.owners[owner] = held

    @rule(owner=st.sampled_from("abc"))
    def fail(self, owner):
        with pytest.raises(AttributeError):
            attach(self.model, owner, [stack(self.model, NAMES), Stack({"gone.weight": []})], self.version)
        self.owners = {}

    @rule()
    def host_load(self):
        """All come off, the host writes other bytes into the parameters, all come on again."""
        for owner in self.owners:
            detach(self.model, owner, self.version)
        self.before.check(self.model)
        load = next(self.loads)
        for parameter in self.model.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(load)))
        self.before, self.version = Snapshot(self.model), Version(load)
        for owner, held in self.owners.items():
            attach(self.model, owner, held, self.version)

    @invariant()
    def live_is_base_and_what_is_on_it(self):
        if not hasattr(self, "model"):
            return
        held = [each for stacks in self.owners.values() for each in stacks]
        assert attached(self.model) == held
        x = torch.linspace(-1, 1, 12).view(2, 6)
        wanted = expected(self.before.bytes, held, x)
        assert torch.allclose(self.model(x).double(), wanted, rtol=1e-3, atol=1e-3)
        if not held:
            self.before.check(self.model)

    def teardown(self):
        if hasattr(self, "model"):
            for owner in list(self.owners):
                detach(self.model, owner, self.version)
            self.before.check(self.model)


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=30, stateful_step_count=12, deadline=None)
