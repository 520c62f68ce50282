"""LoRA stacks on quantized models: real NF4 and int8 modules of bitsandbytes, and modules that behave like
ComfyUI-GGUF's.
"""

import json
import os

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from .gguf import packed, unpacked

bitsandbytes = pytest.importorskip("bitsandbytes")


class GGUFLinear(nn.Linear):
    """Blocks of 8 bits a number, multiplied out in the forward, in the type of the activations."""

    def __init__(self, of):
        nn.Module.__init__(self)
        self.in_features, self.out_features = of.in_features, of.out_features
        self.weight = nn.Parameter(packed(of.weight), requires_grad=False)
        self.bias = of.bias

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "weight"] = torch.zeros(self.weight.shape, device="meta")  # what a host counts memory with
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias.detach()

    def forward(self, x):
        weight = unpacked(self.weight, x.dtype)
        return nn.functional.linear(x, weight, None if self.bias is None else self.bias.to(x.dtype))


def nf4(of):
    made = bitsandbytes.nn.Linear4bit(
        of.in_features, of.out_features, bias=of.bias is not None, compute_dtype=torch.float32, quant_type="nf4"
    )
    made.load_state_dict(of.state_dict())
    return made.requires_grad_(False).to("cpu")


def int8(of):
    made = bitsandbytes.nn.Linear8bitLt(
        of.in_features, of.out_features, bias=of.bias is not None, has_fp16_weights=False
    )
    made.load_state_dict(of.state_dict())
    return made.requires_grad_(False).to("cpu")


WAYS = {"nf4": (nf4, "Params4bit"), "int8": (int8, "Int8Params"), "gguf": (GGUFLinear, "GGUFTensor")}


def quantized(small, way):
    """(small.unet() with quantized attention and feed-forward, the same model with the numbers that those stand for,
    how many).
    """
    models, made = [], {}
    for plain in (False, True):
        patcher = small.unet(channels=32, mult=(1,), depth=(1,))
        for name, module in list(patcher.model.named_modules()):
            if isinstance(module, nn.Linear) and any(part in name for part in ("attn", ".ff.")):
                if plain:
                    module.weight.data = made[name](torch.eye(module.in_features)).T.contiguous()
                    module.weight.data -= 0 if module.bias is None else module.bias.detach()[:, None]
                else:
                    parent, _, attribute = name.rpartition(".")
                    made[name] = WAYS[way][0](module)
                    setattr(patcher.model.get_submodule(parent), attribute, made[name])
        models.append(patcher)
    return *models, len(made)


def stored(model):
    """The bytes and objects of every parameter, packed ones as they are kept."""
    named = model.named_parameters()
    return {
        name: (id(parameter), parameter.data.as_subclass(torch.Tensor).cpu().clone(), type(parameter))
        for name, parameter in named
    }


def unchanged(before, model):
    now = stored(model)
    assert before.keys() == now.keys()
    assert all(
        old[0] == now[name][0] and torch.equal(old[1], now[name][1]) and old[2] is now[name][2]
        for name, old in before.items()
    )
    assert not [name for name, module in model.named_modules() if "forward" in module.__dict__]


def dora(patcher):
    state = {}
    for name, weight in patcher.model.named_parameters():
        if name.endswith(("to_q.weight", "to_out.0.weight")):
            base, generator = name.removesuffix(".weight"), torch.Generator().manual_seed(len(state))
            state[f"{base}.lora_up.weight"] = torch.randn(weight.shape[0], 4, generator=generator) * 0.1
            state[f"{base}.lora_down.weight"] = torch.randn(4, weight.shape[1], generator=generator) * 0.1
            state[f"{base}.dora_scale"] = weight.detach().norm(dim=1, keepdim=True) * 1.3
    return state


@pytest.mark.parametrize("way", WAYS)
def test_a_stack_on_a_quantized_model(host, small, way):
    """LoRA, then DoRA, through the nodes in mode auto: what a merge into the numbers gives; the report says why;
    nothing stays behind.
    """
    model, plain, count = quantized(small, way)
    before, base = stored(model.model), small.forward(model)
    assert (base - small.forward(plain)).abs().max() < 2e-2  # int8 rounds what goes in, too
    save_file(small.lora(plain), os.path.join(host.models, "loras", "q.safetensors"))
    save_file(dora(plain), os.path.join(host.models, "loras", "dora.safetensors"))
    rows = {"version": 1, "rows": [{"file": "q.safetensors", "model": 0.8}, {"file": "dora.safetensors", "model": 0.6}]}
    stack, _ = host.call("GraftLoRAStack", rows=json.dumps(rows))
    patched, _, report = host.call("LoRAStackPatch", model=model, lora_stack=stack, mode="auto")
    assert f"model: {count} at the activations because it is a {WAYS[way][1]}" in report
    wanted = small.forward(host.call("LoRAStackPatch", model=plain, lora_stack=stack, mode="merge")[0])
    found = small.forward(patched)
    assert (found - wanted).abs().max() < (5e-2 if way == "int8" else 1e-3) and (wanted - base).abs().max() > 0.2
    assert torch.equal(small.forward(model), base)
    unchanged(before, model.model)
    with pytest.raises(
        ValueError, match=rf"cannot be merged, it is a {WAYS[way][1]}; set patch mode to auto, bypass or host"
    ):
        host.call("LoRAStackPatch", model=model, lora_stack=stack, mode="merge")


@pytest.mark.parametrize("way", WAYS)
def test_a_changed_strength_on_a_quantized_model(host, small, way):
    """The model stays loaded, the adapters change; two nodes in a row are one."""
    model, _, _ = quantized(small, way)
    before, state = stored(model.model), small.lora(small.unet(channels=32, mult=(1,), depth=(1,)))

    def patched(patcher, strength):
        return host.call("LoRAStackPatch", model=patcher, lora_model=state, lora_strength=strength)[0]

    half = small.forward(patched(model, 0.5))
    assert torch.allclose(small.forward(patched(patched(model, 0.25), 0.25)), half, atol=1e-4)
    assert not torch.allclose(small.forward(patched(model, 1.0)), half, atol=1e-2)
    assert torch.equal(small.forward(patched(model, 0.5)), half)
    small.load(model)
    unchanged(before, model.model)
