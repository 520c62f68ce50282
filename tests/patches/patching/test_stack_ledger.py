"""The ledger: whatever comes and goes, in any order, the base is there again, bit for bit, and live is base + what is
on it.
"""

import gc
import itertools
import sys
import weakref

import pytest
import torch
from graft_nodes.patches.adapters.diff import Diff
from graft_nodes.patches.adapters.dora import DoRA
from graft_nodes.patches.adapters.ia3 import IA3
from graft_nodes.patches.adapters.lora import LoRA
from graft_nodes.patches.patching import stack_ledger
from graft_nodes.patches.patching.fuse import Patch, Stack
from graft_nodes.patches.patching.huge_pages import allocate
from graft_nodes.patches.patching.plan import plan_weights
from graft_nodes.patches.patching.stack_ledger import Version, attach, attached_stacks, detach
from graft_nodes.training.memory.inference_tensors import use_normal_tensors
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


def layer(shape, seed, kind="lora"):
    generator = torch.Generator().manual_seed(seed)
    if len(shape) == 1:
        return Diff(torch.randn(shape, generator=generator))
    lora = LoRA(torch.randn(shape[0], 3, generator=generator), torch.randn(3, shape[1], generator=generator))
    if kind == "dora":
        return DoRA(lora, torch.rand(shape[0], 1, generator=generator) + 0.5)
    return lora if kind == "lora" else IA3(torch.rand(shape[1], generator=generator), columns=True)


def stack(of, names, seed=0, strength=0.5, bypass=False, kind="lora"):
    shapes = {name: tuple(of.get_parameter(name).shape) for name in names}
    patches = {name: [Patch(layer(shape, seed + n, kind), strength)] for n, (name, shape) in enumerate(shapes.items())}
    return Stack(patches, [name for name in names if len(shapes[name]) == 2] if bypass else ())


class Snapshot:
    """What a model is: bytes, parameter objects, classes, attributes, hooks."""

    def __init__(self, of):
        self.bytes = {name: tensor.clone() for name, tensor in of.state_dict().items()}
        self.objects = {name: id(parameter) for name, parameter in of.named_parameters()}
        self.attributes = [(type(module), set(module.__dict__)) for module in of.modules()]
        self.hooks = [len(module._forward_hooks) + len(module._forward_hooks_with_kwargs) for module in of.modules()]

    def check(self, of):
        now = Snapshot(of)
        assert now.bytes.keys() == self.bytes.keys() and all(
            torch.equal(now.bytes[name], self.bytes[name]) for name in self.bytes
        )
        assert (now.objects, now.attributes, now.hooks) == (self.objects, self.attributes, self.hooks)


def expected(base, stacks, x):
    """The output of a copy whose weights are patched in float64 by hand."""
    by_hand = model().double()
    for name, parameter in by_hand.named_parameters():
        parameter.copy_(base[name])
        for patch in [patch for of in stacks for patch in of.patches.get(name, ())]:
            if not patch.layer.is_additive:
                parameter += patch.strength * (patch.layer.apply(parameter.float()) - parameter)
                continue
            change = (
                patch.layer.diff
                if isinstance(patch.layer, Diff)
                else patch.layer.up.double() @ patch.layer.down.double()
            )
            parameter += patch.strength * change
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
        assert torch.allclose(of(x).double(), expected(before.bytes, attached_stacks(of), x), atol=1e-4)
        detach(of, name)
    before.check(of)


def test_twice_by_one_owner_and_once_by_two():
    of = model()
    before, one = Snapshot(of), stack(of, NAMES)
    attach(of, "a", [one])
    live = of.get_parameter("0.weight")
    attach(of, "a", [one])
    attach(of, "b", [one])
    assert attached_stacks(of) == [one] and of.get_parameter("0.weight") is live
    detach(of, "a")
    assert attached_stacks(of) == [one]
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
    monkeypatch.setattr(stack_ledger, "apply_patches", lambda *_, **__: pytest.fail("computed again"))
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


def test_another_stack_takes_over_the_memory():
    """A changed strength is another stack: the model's patched weights are held once, whatever stacks wait for their
    turn.
    """
    of, one, two = model(), stack(model(), NAMES), stack(model(), NAMES, 0, 0.25)
    x, base = torch.randn(2, 6), Snapshot(of).bytes
    attach(of, "a", [one])
    memory = {name: of.get_parameter(name).data_ptr() for name in NAMES}
    detach(of, "a")
    attach(of, "b", [two])
    assert {name: of.get_parameter(name).data_ptr() for name in NAMES} == memory
    assert torch.allclose(of(x).double(), expected(base, [two], x), atol=1e-4)
    detach(of, "b")
    attach(of, "a", [one])
    assert torch.allclose(of(x).double(), expected(base, [one], x), atol=1e-4)


def test_nothing_is_imported_when_a_stack_goes(monkeypatch):
    """It may go while Python shuts down, when nothing can be imported any more."""
    of = model()
    before = Snapshot(of)
    for bypass in (False, True):
        attach(of, 1, [stack(of, NAMES, bypass=bypass)])
        with monkeypatch.context() as patched:
            patched.delitem(sys.modules, allocate.__module__)
            patched.setattr(sys, "meta_path", None)
            detach(of, 1)
        before.check(of)


def test_memory_that_some_weights_share_goes_when_others_leave_it(monkeypatch):
    """One mapping is held by the last of its weights: a weight that stays must not keep the memory of those that have
    gone.
    """
    mappings = []

    class Mapping(bytearray):
        """Memory that can be watched."""

    def together(like):
        mapping, made = Mapping(4 * sum(of.numel() for of in like)), []
        for of in like:
            start = sum(4 * other.numel() for other in made)
            made.append(torch.frombuffer(mapping, dtype=torch.float32, count=of.numel(), offset=start).view(of.shape))
        mappings.extend([weakref.ref(mapping)] if like else [])
        return made

    monkeypatch.setattr(stack_ledger, "allocate", together)
    of = model()
    base = {name: of.get_parameter(name).clone() for name in NAMES}
    attach(of, "a", [stack(of, NAMES[:2])])
    attach(of, "a", [stack(of, (NAMES[0], NAMES[2]), seed=5)])
    gc.collect()
    assert len(mappings) == 2 and mappings[0]() is None and mappings[1]() is not None
    detach(of, "a")
    assert all(torch.equal(of.get_parameter(name), base[name]) for name in NAMES)


def test_forgotten_memory_is_free():
    import weakref

    of, one, two = model(), stack(model(), NAMES), stack(model(), NAMES, 5)
    for each in (one, two):
        attach(of, "a", [each])
    live = weakref.ref(of.get_parameter("0.weight"))
    detach(of, "a")
    assert live() is not None
    stack_ledger.forget(of)
    assert live() is None


def in_place(monkeypatch):
    """What is done on a device, done on the CPU."""
    monkeypatch.setattr(stack_ledger, "is_patched_in_place", lambda base: True)


@pytest.mark.parametrize("inference", [False, True])
def test_on_a_device_weights_change_in_place(monkeypatch, inference):
    in_place(monkeypatch)
    with torch.inference_mode(inference):
        of = model()
        before, one, two, x = Snapshot(of), stack(of, NAMES), stack(of, NAMES[:2], 9), torch.randn(3, 6)
    copies = []
    real = stack_ledger.copy_to_host
    monkeypatch.setattr(stack_ledger, "copy_to_host", lambda base: copies.append(base) or real(base))
    with torch.inference_mode(inference):
        for _ in range(2):
            attach(of, "a", [one], Version(1))
            attach(of, "b", [two], Version(1))
            assert Snapshot(of).objects == before.objects
            assert torch.allclose(of(x).double(), expected(before.bytes, [one, two], x), atol=1e-4)
            detach(of, "a", Version(1))
            assert torch.allclose(of(x).double(), expected(before.bytes, [two], x), atol=1e-4)
            detach(of, "b", Version(1))
            before.check(of)
        assert len(copies) == len(NAMES), "the base is copied at the first touch only"
        of[0].weight.data.mul_(2)
        before = Snapshot(of)
        attach(of, "a", [one], Version(2))  # a load of the host writes other bytes: they are the base from then on
        detach(of, "a", Version(2))
        before.check(of)


def test_a_failure_on_a_device_writes_every_base_back(monkeypatch):
    in_place(monkeypatch)
    of = model()
    before, real, calls = Snapshot(of), stack_ledger.apply_patches, itertools.count(1)

    def failing(*arguments, **keywords):
        result = real(*arguments, **keywords)
        if next(calls) == 2:
            raise MemoryError("out of memory")
        return result

    monkeypatch.setattr(stack_ledger, "apply_patches", failing)
    with pytest.raises(MemoryError):
        attach(of, "a", [stack(of, NAMES)])
    before.check(of)


@pytest.mark.slow
def test_memory_over_the_base_is_the_touched_weights():
    """By the bytes of every tensor that is alive: 5 % over the touched weights at most, at the worst moment of all."""
    from torch.utils._python_dispatch import TorchDispatchMode

    of = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(24)).requires_grad_(False).bfloat16()
    names = [f"{n}.weight" for n in range(24)]

    def wide(seed):
        generator = torch.Generator().manual_seed(seed)
        factors = [torch.randn(2, 1024 * 16, generator=generator).half() for _ in range(4)]
        layers = [LoRA(up.view(1024, 16), down.view(16, 1024)) for up, down in factors]
        return Stack({name: [Patch(each, 0.3) for each in layers] for name in names})

    class Peak(TorchDispatchMode):
        """The most bytes of storages that were made inside and are alive."""

        alive = highest = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
                if storage is not None and storage._cdata not in known and storage.nbytes():
                    known[storage._cdata] = storage.nbytes()
                    Peak.alive += storage.nbytes()
                    weakref.finalize(storage, self.freed, storage._cdata)
            Peak.highest = max(Peak.highest, Peak.alive)
            return result

        def freed(self, key):
            Peak.alive -= known.pop(key)

    import weakref

    one, two = wide(0), wide(5)
    known = {tensor.untyped_storage()._cdata: 0 for tensor in of.parameters()}
    touched = sum(parameter.numel() * 2 for parameter in of.parameters())
    with Peak():
        attach(of, "a", [one])
        detach(of, "a")
        attach(of, "a", [two])
        detach(of, "a")
    assert touched <= Peak.highest <= 1.05 * touched, (touched, Peak.highest)


def test_kept_memory_goes_with_the_model():
    import weakref

    of, one = model(), stack(model(), ["0.weight"])
    attach(of, "a", [one])
    live = weakref.ref(of.get_parameter("0.weight"))
    detach(of, "a")
    gc.collect()
    assert live() is not None and stack_ledger.is_kept(of)
    del of
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
    real, calls = stack_ledger.apply_patches, itertools.count(1)

    def failing(*arguments, **keywords):
        result = real(*arguments, **keywords)
        if next(calls) == call:
            raise MemoryError("out of memory")
        return result

    monkeypatch.setattr(stack_ledger, "apply_patches", failing)
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


def test_what_stands_in_for_a_weight_is_an_inference_tensor_where_that_is_one():
    """A compiled model's guards look at this."""
    for mode in (True, False):
        with torch.inference_mode(mode):
            of = model()
            before, one = Snapshot(of), stack(of, NAMES)
        for inside in (False, True):
            with torch.inference_mode(inside):
                attach(of, "a", [one])
                assert of.get_parameter("0.weight").is_inference() is mode
                attach(of, "b", [stack(of, NAMES, 9)])
                of(torch.randn(2, 6))
                detach(of, "a")
                detach(of, "b")
                before.check(of)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_restored_bit_for_bit(dtype):
    of = model(dtype)
    before = Snapshot(of)
    attach(of, "a", [stack(of, NAMES)])
    assert of.get_parameter("0.weight").dtype == dtype
    detach(of, "a")
    before.check(of)


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
        kind=st.sampled_from(["lora", "lora", "dora", "ia3"]),
    )
    def attach(self, owner, seeds, names, bypass, strength, kind):
        self.owners.pop(owner, None)
        self.owners[owner] = [stack(self.model, sorted(names), seed, strength, bypass, kind) for seed in seeds]
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
        assert attached_stacks(self.model) == held
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


class Packed(nn.Parameter):
    """As NF4 weights are: two to a byte, in another shape."""

    def __new__(cls, data):
        return torch.Tensor._make_subclass(cls, data, False)


class Int8Linear(nn.Module):
    """As packs of quantized models have it: no nn.Linear, but with its features."""

    def __init__(self, of):
        super().__init__()
        self.in_features, self.out_features = of.in_features, of.out_features
        self.weight_scale = of.weight.abs().max() / 127
        self.weight = nn.Parameter((of.weight / self.weight_scale).round().to(torch.int8), requires_grad=False)
        self.bias = of.bias

    def forward(self, x):
        return nn.functional.linear(x, self.weight * self.weight_scale, self.bias)


def test_quantized_weights_are_patched_at_the_activations():
    of, x = model(), torch.randn(3, 6)
    one = stack(of, NAMES, bypass=True)
    of[0], of[2] = Int8Linear(of[0]), Int8Linear(of[2])
    of[2].weight = Packed(torch.zeros(20, 1, dtype=torch.uint8))
    assert stack_ledger.weight_shapes(of)["0.weight"] == (8, 6) and stack_ledger.weight_shapes(of)["2.weight"] == (5, 8)
    merge, bypass, _, reasons = plan_weights(of, one.patches, "auto")
    assert (merge, bypass) == (["3.weight"], ["0.weight", "2.weight"])
    assert reasons == {
        "at the activations because it is quantized (weight_scale)": 1,
        "at the activations because it is a Packed": 1,
    }
    del of[3], of[2]
    before = Snapshot(of)
    wanted = of[0](x) + 0.5 * x @ (one.patches["0.weight"][0].layer.up @ one.patches["0.weight"][0].layer.down).T
    attach(of, "a", [Stack({"0.weight": one.patches["0.weight"]}, ["0.weight"])])
    assert torch.allclose(of[0](x), wanted, atol=1e-4)
    detach(of, "a")
    before.check(of)


def test_fp8_is_merged_with_stochastic_rounding():
    of = nn.Sequential(nn.Linear(64, 64, bias=False)).requires_grad_(False)
    of[0].weight.data = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    base, change = of[0].weight.float(), LoRA(torch.full((64, 1), 1.0), torch.full((1, 64), 0.01))
    before = Snapshot(of)
    attach(of, "a", [Stack({"0.weight": [Patch(change, 1.0)]})])
    assert abs(float((of[0].weight.float() - base).mean()) - 0.01) < 0.003
    detach(of, "a")
    before.check(of)


def tied():
    of = model()
    of.append(nn.Linear(6, 8))
    of[4].weight = of[0].weight
    return of


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("names", [("0.weight",), ("4.weight",), ("0.weight", "4.weight")])
def test_every_name_of_a_tied_weight_is_one_weight(monkeypatch, on_device, names):
    if on_device:
        in_place(monkeypatch)
    of = tied()
    before, base = Snapshot(of), of[0].weight.detach().double().clone()
    one, two = stack(of, names, 0), stack(of, ("0.weight", "2.weight"), 20)
    for _ in range(2):
        attach(of, "a", [one])
        attach(of, "b", [two])
        assert of[0].weight is of[4].weight and set(names) <= set(stack_ledger.base_weights(of))
        patches = [
            patch for each in (one, two) for name in ("0.weight", "4.weight") for patch in each.patches.get(name, ())
        ]
        change = sum(patch.strength * patch.layer.up.double() @ patch.layer.down.double() for patch in patches)
        assert torch.allclose(of[0].weight.double(), base + change, atol=1e-5)
        detach(of, "a")
        detach(of, "b")
        before.check(of)


def test_a_stack_that_comes_beneath_a_training_run_is_on_the_base():
    """Normal tensors lie over a merged weight while it is trained on; another stack goes on the base all the same."""
    of = model()
    before, one, two, x = Snapshot(of), stack(of, NAMES), stack(of, NAMES, 10), torch.randn(3, 6)
    attach(of, "a", [one])
    with use_normal_tensors(of):
        attach(of, "b", [two])
    assert torch.allclose(of(x).double(), expected(before.bytes, [one, two], x), atol=1e-4)
    detach(of, "b")
    assert torch.allclose(of(x).double(), expected(before.bytes, [one], x), atol=1e-4)
    detach(of, "a")
    before.check(of)
