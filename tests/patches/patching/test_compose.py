"""Patches of every kind at the activations against the same patches in the weight: alone, in a part of it, in random
order.
"""

import random

import pytest
import torch
from graft_nodes.patches.adapters.diff import Diff, Set
from graft_nodes.patches.adapters.dora import DoRA
from graft_nodes.patches.adapters.glora import GLoRA
from graft_nodes.patches.adapters.ia3 import IA3
from graft_nodes.patches.adapters.input_oft import InputOFT
from graft_nodes.patches.adapters.loha import LoHa
from graft_nodes.patches.adapters.lokr import LoKr
from graft_nodes.patches.adapters.lora import LoRA
from graft_nodes.patches.adapters.oft import OFT
from graft_nodes.patches.models.layers import bias_of, weight_of
from graft_nodes.patches.patching import fuse as stacks
from graft_nodes.patches.patching import stack_ledger
from graft_nodes.patches.patching.bypass import Bypass, put_bypass
from graft_nodes.patches.patching.fuse import Patch, Stack, apply_in_order
from graft_nodes.patches.patching.strength_schedule import Clock, Schedule
from torch import nn

MODULES = {
    "linear": (lambda: nn.Linear(16, 24), (2, 5, 16)),
    "linear without bias": (lambda: nn.Linear(16, 24, bias=False), (3, 16)),
    "conv": (lambda: nn.Conv2d(16, 24, 3, stride=2, padding=1, padding_mode="reflect"), (2, 16, 9, 8)),
    "conv 1x1": (lambda: nn.Conv2d(16, 24, 1), (2, 16, 5, 4)),
    "conv 1d": (lambda: nn.Conv1d(16, 24, 3), (2, 16, 9)),
    "conv of groups": (lambda: nn.Conv2d(32, 24, 3, groups=2), (2, 32, 5, 5)),
}
CPU = torch.float32, torch.device("cpu")


def drawn(generator, *shape, scale=0.3):
    return torch.randn(*shape, generator=generator) * scale


def orthogonal(generator, *shape):
    skew = drawn(generator, *shape)
    skew, one = skew - skew.transpose(-1, -2), torch.eye(shape[-1])
    return (one - skew) @ torch.linalg.inv(one + skew)


def layer(kind, shape, generator):
    """A layer of a kind for a weight of `shape`, nothing in it zero."""
    out, columns, kernel = shape[0], shape[1], shape[2:]
    flat, ones = torch.Size(shape[1:]).numel(), (1,) * len(kernel)

    def random(*sides, scale=0.3):
        return drawn(generator, *sides, scale=scale)

    lora = LoRA(random(out, 3, *ones), random(3, *shape[1:]), 2.0)
    return {
        "lora": lambda: lora,
        "tucker": lambda: (
            LoRA(random(out, 3, *ones), random(2, columns, *ones), 2.0, random(3, 2, *kernel)) if kernel else lora
        ),
        "diff": lambda: Diff(random(*shape)),
        "loha": lambda: LoHa(random(out, 9), random(9, flat), random(out, 9), random(9, flat), 3.0),
        "lokr": lambda: LoKr(random(4, 4), random(out // 4, columns // 4, *kernel), alpha=2.0),
        "dora": lambda: DoRA(lora, random(out, 1, *ones).abs() + 0.5),
        "dora of columns": lambda: DoRA(lora, random(1, columns, *ones).abs() + 0.5),
        "oft": lambda: OFT(random(out // 4, 4, 4)),
        "oft rescaled": lambda: OFT(random(out // 4, 4, 4), random(out, *ones, 1) + 1.0),
        "boft": lambda: OFT(random(2, out // 4, 4, 4)),
        "peft's oft": lambda: InputOFT(orthogonal(generator, 1, flat // 4, 4, 4)),
        "peft's boft": lambda: InputOFT(orthogonal(generator, 3, flat // 4, 4, 4), random(out) + 1.0, "BOFT"),
        "glora": lambda: GLoRA(random(columns, 3), random(3, columns), random(out, 3), random(3, flat), 2.0),
        "glora with a core": lambda: GLoRA(
            random(columns, 3),
            random(3, columns),
            random(out, 3),
            random(2, columns),
            2.0,
            random(3, 2, *kernel) if kernel else random(3, 2),
        ),
        "ia3": lambda: IA3(random(out), False),
        "ia3 of columns": lambda: IA3(random(columns) + 1.0, True, whole=True),
        "set": lambda: Set(random(*shape)),
    }[kind]()


KINDS = (
    "lora",
    "tucker",
    "diff",
    "loha",
    "lokr",
    "dora",
    "dora of columns",
    "oft",
    "oft rescaled",
    "boft",
    "peft's oft",
    "peft's boft",
    "glora",
    "glora with a core",
    "ia3",
    "ia3 of columns",
    "set",
)
MAPPED = set(KINDS) - {
    "lora",
    "tucker",
    "diff",
    "loha",
    "lokr",
    "peft's oft",
    "peft's boft",
}  # never a difference of the whole weight


def patched(module, patches, x, bias=()):
    """The module's output with its weight and bias changed."""
    weight, offset = (
        apply_in_order(module.weight.detach(), patches),
        None if module.bias is None else apply_in_order(module.bias.detach(), bias),
    )
    return (
        nn.functional.linear(x, weight, offset)
        if isinstance(module, nn.Linear)
        else module._conv_forward(x, weight, offset)
    )


def at_activations(module, patches, x, bias=(), compiled=False):
    """(the module's output with the patches around it, what the adapter multiplies with); the module is as it was
    afterwards.
    """
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    adapter = Bypass(module, patches, bias, compiled=compiled, compute=CPU)
    wrapped = put_bypass(module, adapter)
    output = module(x)
    wrapped.leave()
    assert "forward" not in module.__dict__ and all(
        torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items()
    )
    return output, adapter.parts


@pytest.mark.parametrize("strength", [1.0, 0.6, -0.5])
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind(kind, name, strength):
    build, shape = MODULES[name]
    generator, module = torch.Generator().manual_seed(1), build().requires_grad_(False)
    x, patch = torch.randn(*shape, generator=generator), Patch(layer(kind, module.weight.shape, generator), strength)
    assert patch.layer.mismatch(module.weight.shape) is None
    found, parts = at_activations(module, [patch], x)
    assert torch.allclose(found, patched(module, [patch], x), rtol=0, atol=2e-5)
    assert not torch.allclose(found, module(x), atol=1e-2)
    if kind in MAPPED and name != "conv of groups":
        assert not parts.diffs or kind == "set"


def form(parts):
    """What torch.compile tells adapters apart by: what is there, and every size but the rank."""
    factors = [
        None if one is None else [side for place, side in enumerate(one.shape) if place != dimension or side % 8]
        for one, dimension in ((parts.down, 0), (parts.up, 1))
    ]
    maps = [[(type(one), one.factors.shape, one.factors.dtype) for one in of] for of in (parts.inputs, parts.outputs)]
    return factors, parts.places, [(place, one.shape) for place, one in (*parts.diffs, *parts.biases)], maps, parts.own


@pytest.mark.parametrize("name", MODULES)
def test_each_kind_in_one_form(name):
    """For torch.compile every kind, at any strength, is the same change in an adapter of the same form as no kind at
    all.
    """
    build, shape = MODULES[name]
    module = build().requires_grad_(False)
    _, empty = at_activations(module, [], torch.zeros(shape), compiled=True)
    for strength, kind in [(1.0, kind) for kind in KINDS] + [(0.6, kind) for kind in KINDS]:
        generator = torch.Generator().manual_seed(1)
        x, patch = (
            torch.randn(*shape, generator=generator),
            Patch(layer(kind, module.weight.shape, generator), strength),
        )
        found, parts = at_activations(module, [patch], x, compiled=True)
        assert torch.allclose(found, patched(module, [patch], x), rtol=0, atol=3e-5), kind
        assert form(parts) == form(empty), kind


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_in_any_order(name, compiled):
    """Five patches of any kind, each for the whole weight or a part of its rows or columns, with any strength; and of
    the bias.
    """
    build, shape = MODULES[name]
    for seed in range(10 if compiled else 40):
        generator, draw = torch.Generator().manual_seed(seed), random.Random(seed)
        module = build().requires_grad_(False)
        whole, patches = tuple(module.weight.shape), []
        for _ in range(5):
            part = draw.choice([None, None, (0, 8, 16), (1, 4, 8)])
            own = [part[2] if part and dimension == part[0] else side for dimension, side in enumerate(whole)]
            one = layer(draw.choice([kind for kind in KINDS if kind != "peft's boft" or own[1] > 8]), own, generator)
            assert one.mismatch(own) is None
            patches.append(Patch(one, draw.choice([1.0, 0.5, -0.25]), part))
        bias = (
            []
            if module.bias is None
            else [Patch(Diff(drawn(generator, 24)), 0.5), Patch(IA3(drawn(generator, 24), False, True), 0.5)]
        )
        x = torch.randn(*shape, generator=generator)
        wanted = patched(module, patches, x, bias)
        found, _ = at_activations(module, patches, x, bias, compiled)
        assert (found - wanted).abs().max() <= 2e-5 * max(1.0, float(wanted.abs().max())), (
            seed,
            [patch.layer.kind for patch in patches],
        )


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["linear", "conv", "conv of groups"])
@pytest.mark.parametrize("kind", ["dora", "oft", "set"])
def test_scheduled_strengths_after_another_kind(kind, name, compiled):
    build, shape = MODULES[name]
    generator, module, clock = torch.Generator().manual_seed(1), build().requires_grad_(False), Clock()
    of, x, rising = module.weight.shape, torch.randn(*shape, generator=generator), Schedule(((0.0, 0.0), (1.0, 2.0)))
    first, more = Patch(layer(kind, of, generator), 0.7), [layer("lora", of, generator), layer("diff", of, generator)]
    patches = [first, *(Patch(one, 0.5, None, rising) for one in more)]
    wrapped = put_bypass(module, Bypass(module, patches, (), clock, compiled, CPU))
    found = {}
    for percent in (0.0, 0.25, 0.75):
        clock.tick(percent)
        found[percent] = module(x)
    wrapped.leave()
    for percent, output in found.items():
        wanted = patched(module, [first, *(Patch(one, 0.5 * rising.at(percent)) for one in more)], x)
        assert torch.allclose(output, wanted, rtol=0, atol=3e-5), percent


@pytest.mark.parametrize("part", [None, (0, 64, 384), (1, 32, 384)])
@pytest.mark.parametrize("kind", ["lokr", "lokr of factors", "loha"])
def test_a_product_stays_about_as_small_as_its_file(kind, part):
    """What a model at the activations carries must not be a second copy of its weights."""
    generator, module = torch.Generator().manual_seed(1), nn.Linear(512, 640).requires_grad_(False)
    out, columns = (part[2] if part and part[0] == side else size for side, size in enumerate((640, 512)))

    def random(*sides):
        return drawn(generator, *sides)

    made = {
        "lokr": lambda: LoKr(random(8, 4), random(out // 8, columns // 4)),
        "lokr of factors": lambda: LoKr(
            random(4, 4), None, None, None, random(out // 4, 2), random(2, columns // 4), alpha=3.0
        ),
        "loha": lambda: LoHa(random(out, 9), random(9, columns), random(out, 9), random(9, columns), 3.0),
    }[kind]()
    patches, x = (
        [Patch(made, 0.7, part), Patch(layer("lora", (640, 512), generator), 1.0)],
        torch.randn(2, 5, 512, generator=generator),
    )
    assert made.mismatch((out, columns)) is None
    found, parts = at_activations(module, patches, x)
    assert torch.allclose(found, patched(module, patches, x), rtol=0, atol=1e-5 * float(found.abs().max()))
    products = [tensor for _, kron in parts.krons for tensor in (kron.first, *kron.second)]
    held = sum(tensor.numel() for tensor in (parts.up, parts.down, *products, *(diff for _, diff in parts.diffs)))
    assert held < 640 * 512 / 3, "a difference of the whole weight has 640 * 512"


@pytest.mark.parametrize("kind", ["lora", "loha", "lokr", "diff"])
def test_gradients_pass_layers_that_were_read_in_inference_mode(kind):
    """As the executor reads files; what is trained beside a stack needs the gradient of its output."""
    module, x = nn.Linear(16, 24).requires_grad_(False), torch.randn(3, 16, requires_grad=True)
    with torch.inference_mode():
        patches = [Patch(layer(kind, (24, 16), torch.Generator().manual_seed(1)), 0.5)]
    wrapped = put_bypass(module, Bypass(module, patches, compute=CPU))
    module(x).sum().backward()
    wrapped.leave()
    with torch.no_grad():
        wanted = apply_in_order(module.weight, patches).sum(0)
    assert torch.allclose(x.grad, wanted.expand(3, -1), rtol=0, atol=1e-5)


def test_set_weight_at_strength_one_is_exact():
    generator, module, x = torch.Generator().manual_seed(1), nn.Linear(16, 24).requires_grad_(False), torch.randn(3, 16)
    value = drawn(generator, 24, 16)
    module.weight[0] = 1e6  # nothing is left of it
    patches = [Patch(layer("lora", (24, 16), generator), 1.0), Patch(Set(value), 1.0)]
    assert torch.equal(stacks.apply_patches(module.weight, patches), value)
    assert torch.allclose(
        at_activations(module, patches, x)[0], nn.functional.linear(x, value, module.bias), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("kind", ["dora", "oft", "peft's oft", "glora", "ia3", "set"])
def test_within_the_rounding_of_bfloat16(kind):
    """Over many outputs, no further from exact arithmetic than one and a half times a merged bfloat16 weight is."""
    generator = torch.Generator().manual_seed(3)
    module = nn.Linear(256, 128).requires_grad_(False)
    patch, x = Patch(layer(kind, (128, 256), generator), 0.7), torch.randn(200, 256, generator=generator).bfloat16()
    half = nn.Linear(256, 128).requires_grad_(False).bfloat16()
    half.weight.copy_(module.weight), half.bias.copy_(module.bias)
    exact = nn.functional.linear(x.double(), apply_in_order(half.weight.float(), [patch]).double(), half.bias.double())
    merged = nn.functional.linear(x, stacks.apply_patches(half.weight, [patch]), half.bias)
    found, _ = at_activations(half, [patch], x)
    assert found.dtype == torch.bfloat16
    assert (found.double() - exact).abs().mean() <= 1.5 * (merged.double() - exact).abs().mean()


class Quantized(nn.Module):
    """A host's linear module whose weight is bytes in another shape, multiplied out in its forward."""

    def __init__(self, rows, columns):
        super().__init__()
        self.out_features, self.in_features = rows, columns
        self.weight = nn.Parameter(torch.randint(-127, 127, (rows * columns, 1), dtype=torch.int8), requires_grad=False)
        self.weight_scale, self.bias = torch.tensor(0.003), nn.Parameter(torch.randn(rows), requires_grad=False)

    def forward(self, x):
        weight = (self.weight.to(x.dtype) * self.weight_scale.to(x.dtype)).view(self.out_features, self.in_features)
        return nn.functional.linear(x, weight, self.bias.to(x.dtype))


def test_a_quantized_weight_is_read_through_its_forward():
    module = Quantized(24, 16)
    assert torch.allclose(weight_of(module, *CPU), (module.weight.float() * 0.003).view(24, 16), atol=1e-6)
    assert torch.equal(bias_of(module, *CPU), module.bias)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_on_a_quantized_module(kind):
    generator, module, x = torch.Generator().manual_seed(1), Quantized(24, 16), torch.randn(3, 16)
    patches = [Patch(layer("lora", (24, 16), generator), 0.5), Patch(layer(kind, (24, 16), generator), 0.7)]
    wanted = nn.functional.linear(x, apply_in_order(weight_of(module, *CPU), patches), module.bias)
    assert torch.allclose(at_activations(module, patches, x)[0], wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("first", "second"), [("lora", "dora"), ("dora", "lora"), ("oft", "dora")])
@pytest.mark.parametrize("modes", [(True, True), (True, False), (False, True), (False, False)])
def test_order_is_kept_between_stacks_of_any_mode(first, second, modes):
    """What does not merely add sees what came before it, wherever that is; another base is noticed."""
    generator, model = torch.Generator().manual_seed(1), nn.Sequential(nn.Linear(16, 24)).requires_grad_(False)
    patches, x = [Patch(layer(kind, (24, 16), generator), 0.7) for kind in (first, second)], torch.randn(3, 16)
    held = [
        Stack({"0.weight": [patch]}, ["0.weight"] if bypass else ())
        for patch, bypass in zip(patches, modes, strict=True)
    ]
    before = model[0].weight
    for load in range(3):
        version = stack_ledger.Version(load)
        wanted = patched(model[0], patches, x)
        for number, one in enumerate(held):
            stack_ledger.attach(model, number, [one], version)
        assert torch.allclose(model(x), wanted, rtol=0, atol=1e-5)
        for number in (1, 0):
            stack_ledger.detach(model, number, version)
        assert model[0].weight is before and "forward" not in model[0].__dict__
        before.data.copy_(torch.randn(24, 16, generator=generator))  # as a host's load does
