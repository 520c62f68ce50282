"""Fused stacks against deltas worked out by hand in float64."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from graft_nodes.patches.adapters.diff import Diff, Set
from graft_nodes.patches.adapters.dora import DoRA
from graft_nodes.patches.adapters.lora import LoRA
from graft_nodes.patches.adapters.rank_mask import RankMask
from graft_nodes.patches.patching.fuse import (
    Patch,
    Stack,
    apply_in_order,
    apply_patches,
    bfloat16_factors,
    fuse,
    multiplies_fast,
    split_stacks,
)
from graft_nodes.patches.patching.strength_schedule import MaskedRanks, Schedule
from torch.utils._python_dispatch import TorchDispatchMode


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def random(*shape, seed=0, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, generator=generator(seed)) * scale).to(dtype)


def linear(out=12, columns=20, rank=4, alpha=2.0, seed=0, dtype=torch.float32):
    return LoRA(random(out, rank, seed=seed, dtype=dtype), random(rank, columns, seed=seed + 1, dtype=dtype), alpha)


def by_hand(base, patches):
    """base + sum of strength * alpha / rank * up @ down, all in float64."""
    total = base.double()
    for patch in patches:
        if isinstance(patch.layer, Diff):
            change = patch.strength * patch.layer.diff.double()
        else:
            up, down, alpha = patch.layer.up.double(), patch.layer.down.double(), patch.layer.alpha
            rank = down.shape[0]
            change = patch.strength * (1.0 if alpha is None else alpha / rank) * (up.flatten(1) @ down.flatten(1))
        if patch.part is None:
            total = total + change.reshape(total.shape)
        else:
            total.narrow(*patch.part).add_(change)
    return total


def test_what_changes_while_sampling():
    whole, some, half = linear(), SimpleNamespace(rank_mask=RankMask(4, 1)), Schedule(((0.0, 0.5),))
    assert Patch(whole, 1.0).changes is None and Patch(whole, 1.0, schedule=half).changes == half
    assert Patch(some, 1.0).changes == MaskedRanks(RankMask(4, 1), None)
    assert Patch(some, 1.0, schedule=half).changes == MaskedRanks(RankMask(4, 1), half)


@pytest.mark.parametrize("alpha", [None, 2.0, 4.0])
@pytest.mark.parametrize("count", [1, 3])
def test_linear_weights(alpha, count):
    base = random(12, 20, seed=9)
    patches = [Patch(linear(seed=2 * n, alpha=alpha, rank=n + 2), 0.7 - 0.5 * n) for n in range(count)]
    assert torch.allclose(apply_patches(base, patches).double(), by_hand(base, patches), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [None, 1])
def test_a_scalar_weight(dtype, seed):
    base, add, put = (
        torch.tensor(1.0, dtype=dtype),
        Patch(Diff(torch.tensor(0.5)), 0.5),
        Patch(Set(torch.tensor(3.0)), 0.5),
    )
    assert fuse([add], ()).diff == 0.25
    for patches, expected in (([add, add], 1.5), ([put], 2.0), ([add, put, add], 2.375)):
        made = apply_patches(base, patches, seed=seed)
        assert made.shape == () and made.dtype == dtype and made == expected
    assert apply_patches(base, [add], out=base) is base and base == 1.25


def test_convolutions_flatten():
    base = random(8, 6, 3, 3)
    patches = [
        Patch(LoRA(random(8, 4, 1, 1), random(4, 6, 3, 3, seed=1), 4.0), 1.3),
        Patch(LoRA(random(8, 2), random(2, 54, seed=3)), -0.5),
    ]
    assert torch.allclose(apply_patches(base, patches).double(), by_hand(base, patches), rtol=0, atol=1e-5)


def test_tucker_core():
    up, mid, down = random(8, 4, 1, 1), random(4, 5, 3, 3, seed=1), random(5, 6, 1, 1, seed=2)
    expected = torch.zeros(8, 6, 3, 3, dtype=torch.float64)
    for o in range(8):
        for i in range(6):
            for a in range(4):
                for b in range(5):
                    expected[o, i] += up[o, a, 0, 0].double() * mid[a, b].double() * down[b, i, 0, 0].double()
    layer = LoRA(up, down, alpha=2.5, mid=mid)
    assert layer.mismatch((8, 6, 3, 3)) is None
    assert torch.allclose(layer.delta((8, 6, 3, 3)).double(), 2.5 / 5 * expected, rtol=0, atol=1e-5)
    base = random(8, 6, 3, 3, seed=5)
    assert torch.allclose(
        apply_patches(base, [Patch(layer, 0.5)]).double(), base.double() + 0.25 * expected, rtol=0, atol=1e-5
    )


def test_differences_and_pairs_together():
    base, patches = (
        random(12, 20, seed=8),
        [Patch(linear(), 0.5), Patch(Diff(random(12, 20, seed=4)), 2.0), Patch(linear(seed=6), -1.0)],
    )
    assert torch.allclose(apply_patches(base, patches).double(), by_hand(base, patches), rtol=0, atol=1e-5)
    bias = random(12)
    assert torch.allclose(apply_patches(bias, [Patch(Diff(random(12, seed=1)), 0.5)]), bias + 0.5 * random(12, seed=1))


@pytest.mark.parametrize("part", [(0, 4, 4), (1, 5, 10)])
def test_a_part_of_a_fused_weight(part):
    base = random(12, 20, seed=8)
    shape = (4, 20) if part[0] == 0 else (12, 10)
    patches = [
        Patch(linear(*shape, seed=3), 0.8, part),
        Patch(Diff(random(*shape, seed=5)), 0.3, part),
        Patch(linear(), 1.0),
    ]
    assert torch.allclose(apply_patches(base, patches).double(), by_hand(base, patches), rtol=0, atol=1e-5)


@pytest.fixture(params=[True, False], ids=["bfloat16 products", "float32 products"])
def bfloat16_products(request, monkeypatch):
    """A machine that multiplies bfloat16 at full speed, and one that does not."""

    def multiplies(dtype, device):
        return dtype == torch.float32 or (dtype == torch.bfloat16 and request.param)

    monkeypatch.setattr("graft_nodes.patches.patching.fuse.multiplies_fast", multiplies)


@pytest.mark.usefixtures("bfloat16_products")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "file_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]
)
def test_half_precision_is_rounded_once(dtype, file_dtype):
    """Mean error against float64 at most 1% above that of exact arithmetic rounded once, which is the best there is."""
    base = random(96, 160, seed=7, dtype=dtype)
    patches = [Patch(linear(96, 160, 16, 16.0, seed=5 * n, dtype=file_dtype), 0.1 * (n + 1)) for n in range(4)]
    exact = by_hand(base, patches)
    best, error = (
        (exact.to(dtype).double() - exact).abs().mean(),
        (apply_patches(base, patches).double() - exact).abs().mean(),
    )
    assert error <= 1.01 * best


@pytest.mark.parametrize("file_dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
def test_a_weight_in_float32_takes_files_of_any_type_without_loss(file_dtype):
    base = random(96, 160, seed=7)
    patches = [Patch(linear(96, 160, 16, 16.0, seed=5 * n, dtype=file_dtype), 0.1 * (n + 1)) for n in range(4)]
    assert torch.allclose(apply_patches(base, patches).double(), by_hand(base, patches), rtol=0, atol=1e-5)


def test_writes_into_the_memory_it_is_given():
    base, out = random(12, 20), torch.empty(12, 20)
    assert apply_patches(base, [Patch(linear(), 1.0)], out=out) is out
    assert torch.equal(base, random(12, 20))


@pytest.mark.usefixtures("bfloat16_products")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_writes_over_a_weight_in_channels_last(dtype):
    base, patches = (
        random(8, 6, 3, 3).to(dtype),
        [Patch(LoRA(random(8, 4, 1, 1), random(4, 6, 3, 3, seed=1), 4.0), 0.3)],
    )
    wanted, weight = apply_patches(base, patches), base.contiguous(memory_format=torch.channels_last)
    assert apply_patches(weight, patches, out=weight) is weight and weight.is_contiguous(
        memory_format=torch.channels_last
    )
    assert torch.equal(weight, wanted)


def test_ranks_add_up_in_one_product():
    fused = fuse([Patch(linear(rank=3), 1.0), Patch(linear(rank=5, seed=4), 1.0)], (12, 20))
    assert fused.up.shape == (12, 8) and fused.down.shape == (8, 20) and fused.diff is None


def test_identity_is_what_the_stack_does():
    def stack(strength=1.0, seed=0, bypass=()):
        return Stack({"a.weight": [Patch(linear(seed=seed), strength)]}, bypass)

    assert stack().identity == stack().identity
    assert (
        len({stack().identity, stack(0.5).identity, stack(seed=3).identity, stack(bypass=["a.weight"]).identity}) == 4
    )


def test_identity_tells_parts_schedules_and_alphas_apart():
    schedules = [Schedule.from_range(0.2, end) for end in (0.8, 0.9)]
    made = [
        Patch(linear(), 1.0),
        Patch(linear(), 1.0, (0, 0, 12)),
        Patch(linear(), 1.0, (0, 1, 12)),
        Patch(linear(alpha=3.0), 1.0),
    ]
    made += [Patch(linear(), 1.0, schedule=schedule) for schedule in schedules]
    assert len({Stack({"a.weight": [patch]}).identity for patch in made}) == len(made)


@pytest.mark.usefixtures("bfloat16_products")
@pytest.mark.parametrize("file_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("change", [0.001, 0.01, 0.03, 0.1, 0.5])
def test_bfloat16_factors_are_as_many_as_it_takes(change, file_dtype):
    """Whatever the stack's size: the mean error is at most a hundredth of a percent above the least
    that is possible.
    """
    base = random(256, 512, seed=7).bfloat16()
    layers = [linear(256, 512, 16, 16.0, seed=5 * n, dtype=file_dtype) for n in range(4)]
    size = float(sum(layer.delta((256, 512)) for layer in layers).norm() / base.float().norm())
    patches = [Patch(layer, change / size) for layer in layers]
    exact = by_hand(base, patches)
    best, error = (
        (exact.bfloat16().double() - exact).abs().mean(),
        (apply_patches(base, patches).double() - exact).abs().mean(),
    )
    assert error <= 1.0001 * best
    fused = fuse(patches, base.shape)
    inner = bfloat16_factors(fused.up, fused.down, base)[0].shape[1]
    most = 2 if file_dtype == torch.bfloat16 else 3
    fewest, most = {
        0.001: (64, 64),
        0.01: (65, 128),
        0.03: (65, 128),
        0.1: (128, 64 * most),
        0.5: (64 * most, 64 * most),
    }[change]
    assert fewest <= inner <= most


@pytest.mark.usefixtures("bfloat16_products")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_exact_when_the_factors_are_split_in_blocks_of_rows(monkeypatch, dtype):
    base, patches = random(300, 64, seed=7).to(dtype), [Patch(linear(300, 64, 16, 16.0, seed=n), 0.3) for n in range(3)]
    exact = by_hand(base, patches)
    monkeypatch.setattr("graft_nodes.patches.patching.fuse.FACTOR_ELEMENTS", 48 * 7)  # seven rows at a time
    best, error = (
        (exact.to(dtype).double() - exact).abs().mean(),
        (apply_patches(base, patches).double() - exact).abs().mean(),
    )
    assert (
        error <= (1.0001 if dtype == torch.bfloat16 else 8) * best
    )  # float32 sums of 48 products are rounded on the way


class Peak(TorchDispatchMode):
    """`highest`: the most bytes that were made inside and alive at once; `before` was there already."""

    def __init__(self, before):
        super().__init__()
        self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in before}
        self.alive = self.highest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            if storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                self.alive += storage.nbytes()
                weakref.finalize(storage, self.freed, storage._cdata)
        self.highest = max(self.highest, self.alive)
        return result

    def freed(self, key):
        self.alive -= self.sizes.pop(key)


def test_wide_weights_take_no_more_memory_beside_their_joined_factors(monkeypatch):
    """Only the factors side by side, in the files' type, are as long as a row; they are split and rounded in blocks."""
    monkeypatch.setattr("graft_nodes.patches.patching.fuse.FACTOR_ELEMENTS", 2**12)
    monkeypatch.setattr("graft_nodes.patches.patching.fuse.multiplies_fast", lambda dtype, device: True)
    peaks, rank = {}, 16
    for columns in (640, 5120):
        base = random(64, columns, seed=1, dtype=torch.bfloat16)
        patches = [Patch(linear(64, columns, rank, seed=n, dtype=torch.float16), 0.3) for n in range(2)]
        made, factors = torch.empty_like(base), [part for each in patches for part in (each.layer.up, each.layer.down)]
        with Peak([base, made, *factors]) as peak:
            apply_patches(base, patches, out=made)
        peaks[columns] = peak.highest - 2 * 2 * rank * columns
        exact = by_hand(base, patches)
        best = (exact.bfloat16().double() - exact).abs().mean()
        assert (made.double() - exact).abs().mean() <= 1.0001 * best
    assert peaks[5120] < 1.1 * peaks[640]


def test_one_strong_layer_among_weak_ones_gets_its_low_parts_alone():
    base = random(128, 256, seed=7).bfloat16()
    weak, strong = [linear(128, 256, 8, 8.0, seed=5 * n, dtype=torch.bfloat16) for n in (1, 2)]
    fused = fuse([Patch(weak, 1e-4), Patch(strong, 0.1)], base.shape)
    up, down = bfloat16_factors(fused.up, fused.down, base)
    assert 16 < up.shape[1] <= 24 and down.shape[0] == up.shape[1]
    assert torch.allclose(up.double() @ down.double(), fused.up.double() @ fused.down.double(), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("capability", "expected"), [("AVX512", True), ("AVX2", False), ("DEFAULT", False), ("SVE256", False)]
)
def test_bfloat16_is_multiplied_only_where_the_processor_can(monkeypatch, capability, expected):
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (7, 5) if device.index else (8, 0))
    decide = multiplies_fast.__wrapped__
    assert decide(torch.bfloat16, torch.device("cpu")) is expected
    assert decide(torch.float32, torch.device("cpu")) and not decide(torch.float16, torch.device("cpu"))
    assert decide(torch.bfloat16, torch.device("cuda", 0)) and not decide(torch.bfloat16, torch.device("cuda", 1))


def test_a_slow_processor_is_never_asked_for_a_bfloat16_product(monkeypatch):
    monkeypatch.setattr(
        "graft_nodes.patches.patching.fuse.multiplies_fast", lambda dtype, device: dtype == torch.float32
    )
    monkeypatch.setattr("graft_nodes.patches.patching.fuse.bfloat16_factors", None)
    base, patches = random(96, 160, seed=7).bfloat16(), [Patch(linear(96, 160, 16, 16.0), 0.3)]
    assert torch.equal(apply_patches(base, patches), by_hand(base, patches).bfloat16())


@pytest.mark.parametrize("part", [None, (0, 3, 4)])
def test_what_depends_on_the_weight_finds_what_came_before_it(part):
    """A LoRA, then half of a DoRA on the whole weight or on four of its rows, then a difference, in float64."""
    weight, first, inner = random(12, 20, seed=8), linear(seed=1), linear(out=4 if part else 12, seed=3)
    magnitude = random(4 if part else 12, 1, seed=5).abs() + 0.5
    last = Patch(Diff(random(12, 20, seed=6)), 2.0)
    patches = [Patch(first, 0.7), Patch(DoRA(inner, magnitude), 0.5, part), last]
    before = weight.clone()
    found = apply_in_order(weight, patches)
    expected = by_hand(weight, patches[:1])
    rows = expected.narrow(*(part or (0, 0, 12)))
    changed = by_hand(rows, [Patch(inner, 1.0)])
    changed *= magnitude.double() / changed.norm(dim=1, keepdim=True)
    rows += 0.5 * (changed - rows)
    torch.testing.assert_close(found.double(), by_hand(expected, [last]), rtol=1e-5, atol=1e-5)
    assert torch.equal(weight, before)
    alone = apply_in_order(weight, patches[1:2])
    assert torch.equal(weight, before) and not torch.equal(alone, weight)


def test_what_comes_after_the_activations_goes_there_too_where_the_order_matters():
    weight = random(12, 20, seed=8)
    additive, dora = Patch(linear(), 1.0), Patch(DoRA(linear(seed=3), weight.norm(dim=1, keepdim=True)), 1.0)
    first, bypassed = Stack({"w": [additive]}), Stack({"w": [additive]}, ["w"])
    last, depending, other = Stack({"w": [additive]}), Stack({"w": [dora]}), Stack({"v": [additive]}, ["w"])
    assert split_stacks([first, bypassed, other, last], "w") == ([first, last], [bypassed])
    assert split_stacks([depending, bypassed], "w") == ([depending], [bypassed])
    assert split_stacks([first, bypassed, depending], "w") == ([first], [bypassed, depending])
    assert split_stacks([first, bypassed], "v") == ([], [])
