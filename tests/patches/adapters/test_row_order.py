"""Layers that compute a new weight, on weights whose rows a model holds in another order than the file: the last
modulation of Flux and SD 3 has diffusers' scale and shift the other way round.
"""

import pytest
import torch
from graft_nodes.patches.adapters.registry import pack_layer, unpack_layer
from graft_nodes.patches.adapters.row_order import InRowOrder, row_order
from graft_nodes.patches.lora_files.parse import Target, patches_of, read
from graft_nodes.patches.patching import stack_ledger
from graft_nodes.patches.patching.fuse import Patch, Stack, apply_patches
from torch import nn

OUT, IN = 12, 8


def swap_halves(tensor):
    first, second = tensor.chunk(2, dim=0)
    return torch.cat([second, first])


def number(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.3


DORA = {
    "lora_up.weight": number(OUT, 2, seed=1),
    "lora_down.weight": number(2, IN, seed=2),
    "dora_scale": number(OUT, 1, seed=3) + 1,
}
OFT = {"oft_blocks": number(3, 4, 4, seed=4)}
IA3 = {"weight": number(OUT, 1, seed=5), "on_input": torch.tensor(False)}


def dora_of(weight):
    changed = weight + DORA["lora_up.weight"].double() @ DORA["lora_down.weight"].double()
    return DORA["dora_scale"].double() * changed / changed.norm(dim=1, keepdim=True)


def oft_of(weight):
    blocks = OFT["oft_blocks"].double()
    skew, one = blocks - blocks.mT, torch.eye(4, dtype=torch.float64)
    turns = (one + skew) @ torch.linalg.inv(one - skew)
    return torch.einsum("knm,kn...->km...", turns, weight.unflatten(0, (3, 4))).flatten(0, 1)


def ia3_of(weight):
    return weight * (1 + IA3["weight"].double())


@pytest.mark.parametrize(
    ("tensors", "theirs"), [(DORA, dora_of), (OFT, oft_of), (IA3, ia3_of)], ids=["DoRA", "OFT", "IA3"]
)
@pytest.mark.parametrize("strength", [1.0, 0.4])
def test_the_new_weight_is_that_of_the_files_order(tensors, theirs, strength):
    module = nn.Linear(IN, OUT)
    module.weight.data = number(OUT, IN, seed=6)
    model = nn.ModuleDict({"a": module}).requires_grad_(False)
    shapes = {("model", f"a.{name}"): tuple(value.shape) for name, value in module.named_parameters()}
    keys = {"lora_unet_a": Target("model", "a.weight", None, swap_halves)}
    state = {f"lora_unet_a.{name}": tensor for name, tensor in tensors.items()}
    found = list(patches_of(read(state, keys, shapes, "file"), "model", shapes))
    of = {}
    for weight, layer, part in found:
        of.setdefault(weight, []).append(Patch(layer, strength, part))
    base = module.weight.double()
    expected = base + strength * (swap_halves(theirs(swap_halves(base))) - base)
    assert torch.allclose(apply_patches(module.weight, of["a.weight"]).double(), expected, rtol=0, atol=1e-6)
    x = number(5, IN, seed=7)
    stack_ledger.attach(model, "test", [Stack({"a.weight": of["a.weight"]}, bypass={"a.weight"})])
    at_activations = module(x)
    stack_ledger.detach(model, "test")
    wanted = nn.functional.linear(x.double(), expected, module.bias.double())
    assert torch.allclose(at_activations.double(), wanted, rtol=0, atol=1e-5)
    layer = of["a.weight"][0].layer
    assert torch.equal(unpack_layer(pack_layer(layer)).apply(module.weight), layer.apply(module.weight))


def test_what_does_more_than_move_rows_has_no_order():
    assert torch.equal(row_order(swap_halves, (4, 3)), torch.tensor([2, 3, 0, 1]))
    assert torch.equal(row_order(lambda rows: rows.roll(1, 0), (3,)), torch.tensor([2, 0, 1]))
    assert row_order(lambda rows: rows * 2, (4, 3)) is None
    assert row_order(lambda rows: rows[:2], (4, 3)) is None
    assert row_order(lambda rows: torch.cat([rows[:1], rows[:3]]), (4, 3)) is None


def test_comfyuis_way_to_apply_oft_reaches_the_layer_inside():
    keys = {"lora_unet_a": Target("model", "a.weight", None, swap_halves)}
    state = {f"lora_unet_a.{name}": tensor for name, tensor in OFT.items()}
    shapes = {("model", "a.weight"): (OUT, IN)}
    ((_, layer, _),) = patches_of(read(state, keys, shapes, "file"), "model", shapes)
    assert isinstance(layer, InRowOrder)
    weight = number(OUT, IN, seed=6)
    theirs = layer.inner.to_comfyui(0.5).apply(swap_halves(weight))
    assert torch.equal(layer.to_comfyui(0.5).apply(weight), swap_halves(theirs))
    assert not torch.allclose(layer.apply(weight), swap_halves(theirs), atol=1e-2)
