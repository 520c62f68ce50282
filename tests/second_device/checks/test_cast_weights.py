"""Frozen weights of another type than the computation's: cast once on the device, and back afterwards."""

import pytest
import torch
from graft_nodes import host as wall
from graft_nodes.patches.core.calls import around
from graft_nodes.tests.second_device.device import DEVICE, meter
from graft_nodes.training.memory.cast_weights import cast_weights
from torch import nn

from ...nodes import conftest as node_models

WIDTH, DEPTH = 64, 8
BF16 = torch.bfloat16


class Casting(nn.Linear):
    """A layer that casts its weight to the type of its input, as ComfyUI's do."""

    comfy_cast_weights = True
    seen: torch.dtype

    def forward(self, x):
        self.seen = x.dtype
        return nn.functional.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


def network(dtype, kind=nn.Linear):
    torch.manual_seed(0)
    layers = [part for _ in range(DEPTH) for part in (nn.LayerNorm(WIDTH), kind(WIDTH, WIDTH), nn.SiLU())]
    return nn.Sequential(*layers).requires_grad_(False).to(dtype).to(DEVICE)


def gradient(model):
    x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).to(DEVICE).requires_grad_()
    with torch.autocast("second", BF16):
        out = model(x)
    meter.clear()
    out.float().square().sum().backward()
    return x.grad.cpu(), meter.peak


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_one_copy_the_same_gradients_and_the_model_as_before(dtype, inference):
    with torch.inference_mode(inference):
        model = network(dtype)
    before = {name: (id(p), p.detach().cpu().clone()) for name, p in model.named_parameters()}
    start = meter.allocated
    if not inference:  # autograd refuses to keep such weights
        expected, copies = gradient(model)
    with cast_weights(model, BF16):
        weights = [layer.weight for layer in model if isinstance(layer, nn.Linear)]
        assert {weight.dtype for weight in weights} == {BF16}
        assert meter.allocated == start - sum(p.numel() for p in flat(model)) * (dtype.itemsize - 2)
        if not inference:
            found, peak = gradient(model)
            assert torch.equal(found, expected)
            assert copies - peak >= DEPTH * WIDTH * WIDTH * min(2, dtype.itemsize)
    del weights
    assert meter.allocated == start
    for name, p in model.named_parameters():
        assert id(p) == before[name][0] and p.device == DEVICE and torch.equal(p.cpu(), before[name][1])
        assert p.is_inference() == inference


def flat(model):
    return [p for layer in model if isinstance(layer, nn.Linear) for p in layer.parameters()]


def test_layers_that_share_a_weight_share_the_cast_one():
    model = network(torch.float16)
    model[4].weight = model[1].weight
    with cast_weights(model, BF16):
        assert model[4].weight is model[1].weight and model[1].weight.dtype == BF16
    assert model[4].weight is model[1].weight and model[1].weight.numel() == WIDTH * WIDTH


def test_trained_weights_are_left_alone():
    model = network(torch.float16)
    with cast_weights(model, BF16, {"1.weight"}):
        assert model[1].weight.dtype == torch.float16 and model[4].weight.dtype == BF16


def test_what_a_host_s_layer_unpacks_is_unpacked_to_the_type_of_the_computation():
    """Behind a LayerNorm, which autocast computes in float32, fp8 weights would be unpacked to float32 first."""
    model = network(torch.float32, Casting)
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.weight.data = layer.weight.data.to(torch.float8_e4m3fn)
    expected, peak = gradient(model)
    assert model[1].seen == torch.float32
    with cast_weights(model, BF16):
        found, lower = gradient(model)
        assert model[1].seen == BF16 and model[1].weight.dtype == torch.float8_e4m3fn
    assert torch.equal(found, expected) and lower <= peak
    gradient(model)
    assert model[1].seen == torch.float32


def _cast_to_input(weights, x):
    return [weight.to(x.dtype) for weight in weights]


class CastingLayerNorm(nn.LayerNorm):
    comfy_cast_weights = True

    def forward(self, x):
        return nn.functional.layer_norm(x, self.normalized_shape, *_cast_to_input((self.weight, self.bias), x))


class CastingGroupNorm(nn.GroupNorm):
    comfy_cast_weights = True

    def forward(self, x):
        return nn.functional.group_norm(x, self.num_groups, *_cast_to_input((self.weight, self.bias), x))


@pytest.mark.parametrize(
    ("plain", "casting", "sizes"),
    [(nn.LayerNorm, CastingLayerNorm, (WIDTH,)), (nn.GroupNorm, CastingGroupNorm, (4, WIDTH))],
    ids=["layer", "group"],
)
def test_a_norm_that_a_host_casts_keeps_the_digits_of_its_weights(plain, casting, sizes):
    """As one whose model is on the device whole: there autocast takes the weights as they are."""
    norms = [kind(*sizes).requires_grad_(False) for kind in (plain, casting)]
    with torch.no_grad():
        for norm in norms:
            norm.weight.copy_(torch.linspace(0.7, 1.3, WIDTH))
            norm.bias.copy_(torch.linspace(-0.3, 0.2, WIDTH))
    expected, rounded, found = (nn.Sequential(nn.Linear(WIDTH, WIDTH), norm) for norm in (norms[0], norms[1], norms[1]))
    for model in (expected, rounded, found):
        torch.manual_seed(0)
        nn.init.normal_(model[0].weight)
        nn.init.zeros_(model[0].bias)
        model.requires_grad_(False).to(DEVICE)
    whole, _ = gradient(expected)
    assert not torch.equal(gradient(rounded)[0], whole)
    with cast_weights(found, BF16):
        assert torch.equal(gradient(found)[0], whole)


def test_what_an_adapter_reads_beside_a_layer_is_not_cast():
    """Gradients add up in the input's own type, or a model whose weights wait in host memory would learn otherwise."""
    model = network(BF16, Casting)
    for layer in model:
        if isinstance(layer, nn.LayerNorm):
            layer.float()
    pairs = {layer: torch.randn(WIDTH, WIDTH).to(DEVICE) / WIDTH for layer in model if isinstance(layer, nn.Linear)}
    seen = []

    def adapter(layer, inner, x):
        seen.append(x.dtype)
        return inner(x) + nn.functional.linear(x, pairs[layer])

    handles = [around(layer, "adapter", adapter) for layer in pairs]
    expected, _ = gradient(model)
    with cast_weights(model, BF16):
        found, _ = gradient(model)
        assert model[1].seen == BF16
    assert torch.equal(found, expected) and set(seen) == {torch.float32}
    for handle in handles:
        handle.leave()


def test_an_error_leaves_the_model_as_it_was():
    model = network(torch.float16)
    before = {name: (id(p), p.cpu().clone()) for name, p in model.named_parameters()}
    with pytest.raises(KeyboardInterrupt), cast_weights(model, BF16):
        raise KeyboardInterrupt
    for name, p in model.named_parameters():
        assert id(p) == before[name][0] and torch.equal(p.cpu(), before[name][1])


def test_a_merged_stack_is_as_it_was_and_comes_off(host):
    model = node_models.build_unet()
    plain = node_models.forward(model)
    patched = host.call("LoRAStackPatch", model=model, lora_model=node_models.build_lora(model), mode="merge")[0]
    expected = node_models.forward(patched)
    with wall.denoiser.open_denoiser(patched) as denoiser, torch.inference_mode(False):
        weights = [part.weight for part in denoiser.module.modules() if isinstance(part, nn.Linear)]
        with cast_weights(denoiser.module, BF16) as count:
            assert count > len(weights)
    assert torch.equal(node_models.forward(patched), expected)
    assert torch.equal(node_models.forward(model), plain) and not torch.equal(plain, expected)
