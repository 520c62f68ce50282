"""LoRA stacks of every kind on a UNet whose convolutions are quantized (fp8, int8, NF4, as ComfyUI-GGUF's) against a
merge in float64.
"""

import pytest
import torch
from graft_nodes.host import lora_stacks
from graft_nodes.patches.lora_files.entry import LoraEntry
from torch import nn

from .gguf import packed, unpacked

STRENGTH = 0.7


class Kept(nn.Conv2d):
    """The geometry and bias of another convolution, with a weight of its own."""

    def __init__(self, of):
        nn.Module.__init__(self)
        self.__dict__.update(
            {name: value for name, value in of.__dict__.items() if not name.startswith("_") or "padding" in name}
        )
        self.bias = of.bias

    def forward(self, x):
        return self._conv_forward(x, self.held().to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class Int8(Kept):
    """A scale a row and 8 bits a number, in the weight's own shape."""

    def __init__(self, of):
        super().__init__(of)
        self.weight_scale = of.weight.detach().abs().amax((1, 2, 3), keepdim=True) / 127
        self.weight = nn.Parameter((of.weight.detach() / self.weight_scale).round().to(torch.int8), requires_grad=False)

    def held(self):
        return self.weight.float() * self.weight_scale.to(self.weight.device)


class NF4(Kept):
    """bitsandbytes' own bytes, two numbers in each, in another shape."""

    def __init__(self, of):
        super().__init__(of)
        parameter = pytest.importorskip("bitsandbytes").nn.Params4bit
        self.weight = parameter(of.weight.detach().contiguous(), requires_grad=False, quant_type="nf4").to("cpu")

    def held(self):
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(self.weight.data, self.weight.quant_state).reshape(
            self.out_channels, self.in_channels, *self.kernel_size
        )


class GGUF(Kept):
    """Blocks of 8 bits a number."""

    def __init__(self, of):
        super().__init__(of)
        self.weight = nn.Parameter(packed(of.weight), requires_grad=False)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "weight"] = torch.zeros(self.weight.shape, device="meta")  # what a host counts memory with
        destination[prefix + "bias"] = self.bias.detach()

    def held(self):
        return unpacked(self.weight, torch.float32)


def fp8(of):
    """The host's own convolution with a plain fp8 weight, that it casts at each call."""
    of.weight = nn.Parameter(of.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    of.comfy_cast_weights = True
    of.held = lambda: of.weight.float()
    return of


WAYS = {
    "fp8": (fp8, "its type is torch.float8_e4m3fn"),
    "int8": (Int8, "it is quantized (weight_scale)"),
    "nf4": (NF4, "it is a Params4bit"),
    "gguf": (GGUF, "it is a GGUFTensor"),
}


def quantized(small, way):
    """(a UNet with quantized convolutions, the same with the numbers that those stand for, {weight: those numbers})."""
    model, plain, held = small.unet(mult=(1, 1), depth=(0, 1)), small.unet(mult=(1, 1), depth=(0, 1)), {}
    for name, module in list(model.model.named_modules()):
        if isinstance(module, nn.Conv2d):
            parent, _, attribute = name.rpartition(".")
            made = WAYS[way][0](module)
            setattr(model.model.get_submodule(parent), attribute, made)
            held[f"{name}.weight"] = plain.model.get_submodule(name).weight.data = made.held().clone()
    return model, plain, held


def file_of_every_kind(weights):
    """(a LoRA and, for each weight another kind in turn, a file's tensors; {weight: what both make of
    it in float64}).
    """
    first, second, merged = {}, {}, {}
    for number, (name, weight) in enumerate(sorted(weights.items())):
        generator, (out, columns, *kernel), flat = (
            torch.Generator().manual_seed(number),
            weight.shape,
            weight[0].numel(),
        )

        def random(*shape, generator=generator):
            return torch.randn(*shape, generator=generator) * 0.1

        def dora(changed, magnitude, over):
            return magnitude.double() * changed / changed.pow(2).sum(over, keepdim=True).sqrt()

        base, ups, downs = name.removesuffix(".weight"), random(2, out, 4, 1, 1), random(2, 4, columns, *kernel)
        first |= {f"{base}.lora_up.weight": ups[0], f"{base}.lora_down.weight": downs[0]}
        products = [
            (up.double().flatten(1) @ down.double().flatten(1)).view(weight.shape)
            for up, down in zip(ups, downs, strict=True)
        ]
        found = weight.double() + 0.5 * products[0]
        pair, magnitude = {"lora_up.weight": ups[1], "lora_down.weight": downs[1]}, random(columns).abs() + 0.5
        blocks, factors = (
            random(4, out // 4, out // 4),
            [random(columns, 3), random(3, columns), random(out, 3), random(3, flat)],
        )
        skew, one = (blocks - blocks.transpose(1, 2)).double(), torch.eye(out // 4)
        turned = torch.block_diag(*((one + skew) @ torch.linalg.inv(one - skew))).T @ found.flatten(1)
        a1, a2, b1, b2 = (factor.double() for factor in factors)
        mixed = found + torch.einsum("oi...,ij->oj...", found, a1 @ a2) + (b1 @ b2).view(weight.shape)
        value = random(*weight.shape)
        kinds = [
            (
                pair | {"dora_scale": magnitude.repeat(out)[:out].view(-1, 1, 1, 1)},
                dora(found + products[1], magnitude.repeat(out)[:out].view(-1, 1, 1, 1), (1, 2, 3)),
            ),
            ({"oft_blocks": blocks}, turned.view(weight.shape)),
            (
                pair | {"dora_scale": magnitude.view(1, -1, 1, 1)},
                dora(found + products[1], magnitude.view(1, -1, 1, 1), (0, 2, 3)),
            ),
            (dict(zip(("a1.weight", "a2.weight", "b1.weight", "b2.weight"), factors, strict=True)), mixed),
            ({"weight": magnitude, "on_input": torch.tensor(True)}, found * (1 + magnitude.double().view(1, -1, 1, 1))),
            ({"set_weight": value}, value.double()),
        ]
        tensors, made = kinds[number % len(kinds)] if out % 4 == 0 and out != columns * 9 else kinds[0]
        second |= {f"{base}.{role}": tensor for role, tensor in tensors.items()}
        merged[name] = found + STRENGTH * (made - found)
    return first, second, merged


@pytest.mark.parametrize(("way", "mode"), [*((way, "auto") for way in WAYS), ("fp8", "bypass")])
def test_every_kind_on_quantized_convolutions(small, way, mode):
    """What a merge in float64 into the numbers gives; the report says why it is at the activations; nothing of the
    model changes.
    """
    model, plain, held = quantized(small, way)
    first, second, merged = file_of_every_kind(held)
    before = {
        name: (id(p), p.data.as_subclass(torch.Tensor).cpu().clone().view(torch.uint8))
        for name, p in model.model.named_parameters()
    }
    base = small.forward(model, (4, 4))
    patched, _, report = lora_stacks.apply_lora_stack(
        model, None, [LoraEntry("first", first, 0.5), LoraEntry("second", second, STRENGTH)], mode
    )
    assert f"model: 0 weights merged while it is loaded, {len(held)} at the activations" in report
    assert mode == "bypass" or f"model: {len(held)} at the activations because {WAYS[way][1]}" in report
    found = small.forward(patched, (4, 4))
    for name, weight in merged.items():
        plain.model.get_submodule(name.removesuffix(".weight")).weight.data = weight.float()
    wanted = small.forward(plain, (4, 4))
    assert (wanted - base).abs().max() > 0.2 and (found - wanted).abs().max() < 1e-4 * wanted.abs().max()
    assert torch.equal(small.forward(model, (4, 4)), base)
    for name, parameter in model.model.named_parameters():
        assert before[name][0] == id(parameter)
        assert torch.equal(before[name][1], parameter.data.as_subclass(torch.Tensor).cpu().view(torch.uint8)), name
