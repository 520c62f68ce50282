"""Stacks merged into quantized weights: what comes out is float64's sum within a step of the quantization, without a
bias, and the base comes back byte for byte.
"""

import zlib

import pytest
import torch
from graft_nodes.patches.adapters.ia3 import IA3
from graft_nodes.patches.adapters.lora import LoRA
from graft_nodes.patches.core.slots import stored_tensors
from graft_nodes.patches.models.layers import dequantize, requantize, requantizes
from graft_nodes.patches.patching import stack_ledger
from graft_nodes.patches.patching.fuse import Patch, Stack
from graft_nodes.patches.patching.plan import PatchTarget, plan_stack, plan_weights
from graft_nodes.patches.patching.stack_ledger import attach, detach
from torch import nn

WIDTH = 64
SETTINGS = {"one scale": {}, "a scale a row": {"per_channel": True}}


def int8_model(**settings):
    """One linear layer in int8, as ComfyUI 0.33 keeps it."""
    tensors = pytest.importorskip("comfy_kitchen.tensor")
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)).requires_grad_(False)
    weight = torch.randn(WIDTH, WIDTH, generator=generator)
    made = tensors.QuantizedTensor.from_float(weight, "TensorWiseINT8Layout", **settings)
    model[0].weight = nn.Parameter(made, requires_grad=False)
    return model


def four_loras():
    generator = torch.Generator().manual_seed(1)
    loras = []
    for _ in range(4):
        up, down = torch.randn(WIDTH, 4, generator=generator), torch.randn(4, WIDTH, generator=generator)
        loras.append(Patch(LoRA(up * 0.02, down * 0.1), 0.5))
    return Stack({"0.weight": loras})


def exact(base, stack):
    """The sum in float64."""
    total = base.double()
    for patch in stack.patches["0.weight"]:
        total = total + patch.strength * patch.layer.scale * patch.layer.up.double() @ patch.layer.down.double()
    return total


def contents(model):
    weight = model[0].weight
    return id(weight), [tensor.clone() for tensor in stored_tensors(weight)]


def same(one, other):
    return one[0] == other[0] and all(torch.equal(left, right) for left, right in zip(one[1], other[1], strict=True))


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("device", [False, True], ids=["in another parameter", "in place"])
def test_four_loras_in_an_int8_weight(monkeypatch, settings, device):
    monkeypatch.setattr(stack_ledger, "is_patched_in_place", lambda base: device)
    model, stack = int8_model(**settings), four_loras()
    before, wanted = contents(model), exact(dequantize(model[0].weight), stack)
    for _ in range(2):
        attach(model, "a", [stack])
        merged = model[0].weight
        step = merged._params.scale.double()
        error = (dequantize(merged).double() - wanted) / step
        assert float(error.abs().max()) <= 1.001  # one of both neighbors
        assert abs(float(error.mean())) < 0.05  # as often up as down
        assert (id(merged) == before[0]) == device
        assert torch.equal(stack_ledger.base_weights(model)["0.weight"].dequantize(), exact_base(before, model))
        detach(model, "a")
        assert same(contents(model), before)
    attach(model, "a", [stack])
    again = contents(model)
    detach(model, "a")
    stack_ledger.forget(model)
    attach(model, "a", [stack])
    assert same((0, contents(model)[1]), (0, again[1]))  # drawn with the weight's own seed


def exact_base(before, model):
    """The numbers of a copy that was taken before."""
    quantized, scale = before[1]
    return quantized.float() * scale


def test_a_layer_that_depends_on_the_weight_is_merged_too():
    model = int8_model()
    base = dequantize(model[0].weight)
    columns = torch.linspace(0.1, 0.5, WIDTH)
    attach(model, "a", [Stack({"0.weight": [Patch(IA3(columns, columns=True), 1.0)]})])
    merged = model[0].weight
    error = dequantize(merged) - base * (1 + columns)
    assert float(error.abs().max()) <= 1.001 * float(merged._params.scale)


def test_the_global_generator_is_left_alone():
    model, state = int8_model(), torch.random.get_rng_state()
    attach(model, "a", [four_loras()])
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_failure_leaves_the_base(monkeypatch):
    monkeypatch.setattr(stack_ledger, "is_patched_in_place", lambda base: True)
    model = int8_model()
    before = contents(model)

    def failing(*arguments):
        requantize(*arguments)
        raise MemoryError("out of memory")

    monkeypatch.setattr(stack_ledger, "requantize", failing)
    with pytest.raises(MemoryError):
        attach(model, "a", [four_loras()])
    assert same(contents(model), before)


def test_auto_leaves_them_at_the_activations_and_says_why():
    model, stack = int8_model(), four_loras()
    assert requantizes(model[0].weight) and not requantizes(nn.Linear(2, 2).weight)
    assert plan_weights(model, stack.patches, "auto")[:2] == ([], ["0.weight"])
    assert plan_weights(model, stack.patches, "merge")[:2] == (["0.weight"], [])
    report = plan_stack(PatchTarget("model", model), stack.patches, "auto").report
    assert any("1 quantized weights are not merged: rounding them again" in line for line in report)
    report = plan_stack(PatchTarget("model", model), stack.patches, "bypass").report
    assert not any("not merged" in line for line in report)
    model[0].pre_quant_scale = torch.ones(WIDTH)
    with pytest.raises(ValueError, match=r"cannot be merged, its layer scales its input \(pre_quant_scale\)"):
        plan_weights(model, stack.patches, "merge")


def test_to_the_nearest_a_small_change_would_be_lost():
    """Why the rounding is at random: the base lies on the grid, and a change below half a step is rounded away."""
    model = int8_model()
    weight = model[0].weight
    base, step = dequantize(weight), float(weight._params.scale)
    change = torch.full_like(base, 0.3 * step)
    change[base.abs() > 100 * step] = 0.0  # the scale stays
    kept = dequantize(requantize(weight, base + change, zlib.crc32(b"a"))) - base
    assert 0.2 * step < float(kept[change > 0].mean()) < 0.4 * step
    nearest = weight.requantize_from_float(base + change, scale="recalculate").dequantize() - base
    assert float(nearest.abs().max()) < 0.01 * step
