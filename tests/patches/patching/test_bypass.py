"""Bypass adapters against the same module with its weight patched in float64."""

import shutil

import pytest
import torch
from graft_nodes.patches.adapters.diff import Diff
from graft_nodes.patches.adapters.dora import DoRA
from graft_nodes.patches.adapters.glora import GLoRA
from graft_nodes.patches.adapters.input_oft import InputOFT
from graft_nodes.patches.adapters.lora import LoRA
from graft_nodes.patches.adapters.oft import OFT
from graft_nodes.patches.patching.bypass import Bypass, put_bypass, supports_bypass
from graft_nodes.patches.patching.fuse import Patch
from graft_nodes.patches.patching.strength_schedule import Clock, Schedule
from torch import nn

G = torch.Generator().manual_seed(0)


def random(*shape):
    return torch.randn(*shape, generator=G)


def factors(shape, rank=3):
    """A pair for a weight of `shape`: convolutional factors for a convolution."""
    ones = (1,) * (len(shape) - 2)
    return LoRA(random(shape[0], rank, *ones), random(rank, *shape[1:]), 2.0)


MODULES = {
    "linear": (lambda: nn.Linear(7, 5), (2, 4, 7)),
    "linear without bias": (lambda: nn.Linear(7, 5, bias=False), (2, 7)),
    "conv 1x1": (lambda: nn.Conv2d(6, 4, 1), (2, 6, 5, 5)),
    "conv stride": (lambda: nn.Conv2d(6, 4, 3, stride=2, padding=1), (2, 6, 9, 8)),
    "conv dilation": (lambda: nn.Conv2d(6, 4, 3, padding="same", dilation=2), (1, 6, 9, 8)),
    "conv circular": (lambda: nn.Conv2d(6, 4, 3, padding=1, padding_mode="circular"), (1, 6, 9, 8)),
    "conv groups": (lambda: nn.Conv2d(6, 4, 3, padding=1, groups=2), (1, 6, 5, 5)),
    "conv 1d": (lambda: nn.Conv1d(6, 4, 3), (1, 6, 9)),
    "conv 3d": (lambda: nn.Conv3d(2, 4, 3, padding=1), (1, 2, 5, 5, 5)),
}


@pytest.mark.parametrize("difference", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_equal_to_a_patched_weight(name, difference):
    build, shape = MODULES[name]
    module, x = build().requires_grad_(False), random(*shape)
    patches = [Patch(factors(module.weight.shape), 0.7), Patch(factors(module.weight.shape, 5), -0.3)]
    patches += [Patch(Diff(random(*module.weight.shape)), 0.5)] if difference else []
    bias = [Patch(Diff(random(*module.bias.shape)), 2.0)] if difference and module.bias is not None else []
    wrapped = put_bypass(module, Bypass(module, patches, bias))
    result = module(x)
    wrapped.leave()
    module.double()
    for patch in patches:
        layer = patch.layer
        change = (
            layer.diff
            if isinstance(layer, Diff)
            else 2.0 / layer.rank * layer.up.flatten(1).double() @ layer.down.flatten(1).double()
        )
        module.weight += patch.strength * change.double().reshape(module.weight.shape)
    for patch in bias:
        module.bias += patch.strength * patch.layer.diff
    assert torch.allclose(result.double(), module(x.double()), rtol=0, atol=1e-5)


def test_activations_of_another_type_and_a_keyword_argument():
    module = nn.Linear(7, 5).bfloat16().requires_grad_(False)
    put_bypass(module, Bypass(module, [Patch(factors((5, 7)), 1.0)]))
    assert module(input=random(2, 7).bfloat16()).dtype == torch.bfloat16


def test_gradients_pass_through():
    module, x = nn.Linear(7, 5).requires_grad_(False), random(2, 7).requires_grad_()
    with torch.inference_mode():
        adapter = Bypass(module, [Patch(factors((5, 7)), 1.0)])
    put_bypass(module, adapter)
    with torch.inference_mode():
        module(random(2, 7))
    module(x).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize(
    "layer",
    [
        lambda: OFT(random(4, 2, 2), random(8)),
        lambda: OFT(random(2, 4, 2, 2), random(8)),
        lambda: InputOFT(torch.linalg.qr(random(1, 4, 2, 2))[0], random(8)),
        lambda: GLoRA(random(8, 1), random(1, 8), random(8, 1), random(1, 8)),
    ],
    ids=["OFT", "BOFT", "OFT of the input", "GLoRA"],
)
def test_gradients_pass_through_layers_that_were_read_in_inference_mode(layer):
    module, x = nn.Linear(8, 8).requires_grad_(False), random(2, 8).requires_grad_()
    with torch.inference_mode():
        patch = Patch(layer(), 1.0)
    put_bypass(module, Bypass(module, [patch]))
    module(x).square().sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("kernel", [1, 3])
def test_gradients_pass_through_convolutions_in_the_form_for_torch_compile(kernel):
    """As where a model under TorchCompileModel is trained."""
    module, x = nn.Conv2d(7, 5, kernel, padding=kernel // 2).requires_grad_(False), random(2, 7, 4, 4)
    patch, gradients = Patch(factors((5, 7, kernel, kernel)), 0.5), []
    for compiled in (False, True):
        wrapped = put_bypass(module, Bypass(module, [patch], compiled=compiled, compute=(torch.float32, x.device)))
        given = x.clone().requires_grad_()
        gradients += torch.autograd.grad(module(given).square().sum(), [given])
        wrapped.leave()
    torch.testing.assert_close(*gradients)


def test_a_magnitude_of_columns_on_a_weight_of_one_row():
    module, magnitude = nn.Linear(5, 1).requires_grad_(False), random(1, 5).abs()
    layer, x = DoRA(factors((1, 5), 2), magnitude), random(2, 5)
    assert layer.mismatch((1, 5)) is None
    changed = module.weight.double() + layer.inner.delta((1, 5), x.device).double()
    changed = changed * magnitude / changed.abs()  # each column is one number
    wrapped = put_bypass(module, Bypass(module, [Patch(layer, 1.0)]))
    torch.testing.assert_close(module(x).double(), x.double() @ changed.T + module.bias, rtol=1e-4, atol=1e-5)
    wrapped.leave()


def test_it_knows_its_schedules():
    schedule = Schedule.from_range(0.5, 1.0)
    patches = [Patch(factors((5, 7)), 1.0), Patch(factors((5, 7)), 1.0, schedule=schedule)]
    assert Bypass(nn.Linear(7, 5), patches).schedules == {schedule}
    assert Bypass(nn.Linear(7, 5), patches[:1]).schedules == set()


def test_what_is_supported():
    assert supports_bypass(nn.Linear(1, 1)) and supports_bypass(nn.Conv2d(1, 1, 1))
    assert not supports_bypass(nn.LayerNorm(2)) and not supports_bypass(nn.Embedding(2, 2))


def adapter(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return Bypass(
        nn.Linear(7, 5),
        [Patch(LoRA(torch.randn(5, 3, generator=generator), torch.randn(3, 7, generator=generator)), 1.0)],
    )


def test_nothing_remains():
    module, x = nn.Linear(7, 5), random(2, 7)
    attributes, before = set(module.__dict__), module(x)
    wrapped = put_bypass(module, adapter())
    assert not torch.equal(module(x), before)
    wrapped.leave()
    assert set(module.__dict__) == attributes and torch.equal(module(x), before)


@pytest.mark.parametrize("ours_first", [True, False])
def test_among_other_wrappers_that_go_in_the_order_they_came(ours_first):
    """Hosts eject in injection order: each wrapper puts back what it found, whatever has come on top of it since."""
    module, x = nn.Linear(7, 5), random(2, 7)
    before = module(x)

    class Other:
        def on(self):
            self.found = module.forward
            module.forward = lambda *args: self.found(*args) + 1

        def off(self):
            module.forward = self.found

    for _ in range(2):
        other = Other()
        if ours_first:
            wrapped = put_bypass(module, adapter())
            other.on()
        else:
            other.on()
            wrapped = put_bypass(module, adapter())
        alone = adapter()
        assert torch.allclose(module(x), alone(module, x, lambda _: before) + 1, atol=1e-5)
        for each in (wrapped.leave, other.off) if ours_first else (other.off, wrapped.leave):
            each()
        assert torch.equal(module(x), before)


def test_under_torch_compile_a_change_is_seen():
    module, x = nn.Sequential(nn.Linear(7, 5), nn.SiLU()).requires_grad_(False), random(2, 7)
    compiled = torch.compile(module, backend="eager")
    with torch.no_grad():
        for seed in range(3):
            wrapped = put_bypass(module[0], adapter(seed))
            assert torch.allclose(compiled(x), module(x))
            wrapped.leave()
            assert torch.allclose(compiled(x), module(x))


def test_activations_of_one_dimension():
    module, x = nn.Linear(7, 5).requires_grad_(False), random(7)
    alone, before = adapter(), module(x)
    put_bypass(module, alone)
    assert torch.allclose(module(x), alone(module, x[None], lambda _: before[None])[0], atol=1e-5)


def scheduled(shape):
    """Patches with a schedule, one without, a difference with another one, and the weights' changes at a multiplier of
    each.
    """
    rising, late = Schedule(((0.0, 0.0), (1.0, 2.0))), Schedule.from_range(0.5, 1.0)
    patches = [
        Patch(factors(shape), 0.7, schedule=rising),
        Patch(factors(shape, 5), -0.3),
        Patch(Diff(random(*shape)), 0.5, schedule=late),
    ]

    def patched(weight, percent):
        return weight + sum(
            patch.strength * (1.0 if patch.schedule is None else patch.schedule.at(percent)) * patch.layer.delta(shape)
            for patch in patches
        )

    return patches, patched


@pytest.mark.parametrize("name", ["linear", "conv stride", "conv groups"])
def test_scheduled_strengths(name):
    build, shape = MODULES[name]
    module, x, clock = build().requires_grad_(False), random(*shape), Clock()
    patches, patched = scheduled(module.weight.shape)
    bias = [Patch(Diff(random(*module.bias.shape)), 2.0, schedule=patches[0].schedule)]
    wrapped = put_bypass(module, Bypass(module, patches, bias, clock))
    found = {}
    for percent in (0.0, 0.25, 0.75):
        clock.tick(percent)
        found[percent] = module(x)
    wrapped.leave()
    base, offset = module.weight.clone(), module.bias.clone()
    for percent, result in found.items():
        module.weight.copy_(patched(base, percent))
        module.bias.copy_(offset + 2.0 * bias[0].layer.diff * percent * 2.0)
        assert torch.allclose(result, module(x), rtol=0, atol=1e-4), percent


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_one_form_for_torch_compile(backend):
    """Any patches, or none, give adapters that the guards of a compiled module cannot tell apart, of linear layers and
    convolutions.
    """
    if backend == "inductor" and shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("inductor needs a C++ compiler")
    module = nn.Sequential(nn.Conv2d(7, 6, 3, padding=1), nn.Flatten(2), nn.Linear(16, 5), nn.SiLU()).requires_grad_(
        False
    )
    shapes, x = {0: (6, 7, 3, 3), 2: (5, 16)}, random(2, 7, 4, 4)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend=backend)
    compute = torch.float32, torch.device("cpu")
    with torch.no_grad():
        for number, ranks in enumerate(
            [[], [3], [4, 8, 16], [2], [-5], [3, -9]]
        ):  # below 0: DoRA, and a whole difference beside it
            wrapped = []
            for place, shape in shapes.items():
                patches = [Patch(factors(shape, rank), 0.5) for rank in ranks if rank > 0]
                patches += [
                    Patch(DoRA(factors(shape, -rank), random(shape[0]).abs()), 0.5) for rank in ranks if rank < 0
                ]
                patches += [Patch(Diff(random(*shape)), 0.5) for rank in ranks if rank < 0]
                wrapped.append(
                    put_bypass(module[place], Bypass(module[place], patches, compiled=True, compute=compute))
                )
            with torch._dynamo.config.patch(error_on_recompile=number > 0):
                assert torch.allclose(compiled(x), module(x), atol=1e-5)
            for one in wrapped:
                one.leave()
    torch._dynamo.reset()


def test_schedules_under_torch_compile():
    """The first one compiles anew, once; other ranks, schedules and moments of sampling do not."""
    module, x, clock = nn.Sequential(nn.Linear(16, 5)).requires_grad_(False), random(2, 16), Clock()
    rising, late = Schedule(((0.0, 0.0), (1.0, 2.0))), Schedule.from_range(0.5, 1.0)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="eager")
    with torch.no_grad():
        for number, patches in enumerate(
            [[(3, None)], [(3, rising)], [(12, late)], [(3, None), (4, late), (20, rising)], [(9, None)]]
        ):
            of = [Patch(factors((5, 16), rank), 0.5, None, schedule) for rank, schedule in patches]
            wrapped = put_bypass(
                module[0], Bypass(module[0], of, (), clock, True, (torch.float32, torch.device("cpu")))
            )
            for percent in (0.2, 0.8):
                clock.tick(percent)
                with torch._dynamo.config.patch(error_on_recompile=number > 1 or (number, percent) == (1, 0.8)):
                    found = compiled(x)
                gains = [1.0 if patch.schedule is None else patch.schedule.at(percent) for patch in of]
                weight = module[0].weight + sum(
                    0.5 * gain * patch.layer.delta((5, 16)) for gain, patch in zip(gains, of, strict=True)
                )
                assert torch.allclose(found, nn.functional.linear(x, weight, module[0].bias), atol=1e-5)
            wrapped.leave()
    torch._dynamo.reset()
