"""LoRA stacks on ComfyUI's own quantised layers: every kind at the activations is what a merge into the numbers that
they hold is.
"""

from __future__ import annotations

import families
import pytest
import torch
from graft_nodes import host
from graft_nodes.host import lora
from graft_nodes.patches.lora_files.entry import LoraEntry
from graft_nodes.training.data.dataset import Conditioning
from quantised import parts, with_quantised_layers, with_scaled_layers
from tiny_families import EVERY


def file_of(kind, weights):
    """One file's tensors of a kind, for every weight (name -> shape)."""
    state = {}
    for seed, (name, (out, columns)) in enumerate(sorted(weights.items())):
        base, generator = name.removesuffix(".weight"), torch.Generator().manual_seed(seed)

        def random(*shape, generator=generator):
            return torch.randn(*shape, generator=generator) * 0.1

        pair = {"lora_up.weight": random(out, 4), "lora_down.weight": random(4, columns)}
        state |= {
            f"{base}.{role}": tensor
            for role, tensor in {
                "lora": pair,
                "dora": pair | {"dora_scale": random(out, 1).abs() + 0.5},
                "oft": {"oft_blocks": random(4, out // 4, out // 4)},
                "glora": {
                    "a1.weight": random(columns, 4),
                    "a2.weight": random(4, columns),
                    "b1.weight": random(out, 4),
                    "b2.weight": random(4, columns),
                },
                "ia3": {"weight": random(out), "on_input": torch.tensor(False)},
                "set_weight": {"set_weight": random(out, columns)},
            }[kind].items()
        }
    return state


KINDS = ("lora", "dora", "oft", "glora", "ia3", "set_weight")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["scaled fp8", "float8_e4m3fn", "int8_tensorwise"])
def test_a_stack_on_quantised_layers(way, kind):
    quantised, plain = with_scaled_layers("flux") if way == "scaled fp8" else with_quantised_layers("flux", way)
    before = {name: [part.clone() for part in parts(p)] for name, p in quantised.model.named_parameters()}
    touched = ("img_attn.proj.weight", "linear2.weight")
    sides = {name: tuple(weight.shape) for name, weight in plain.model.named_parameters() if name.endswith(touched)}
    entries = [LoraEntry("first", file_of("lora", sides), 0.5), LoraEntry(kind, file_of(kind, sides), 0.7)]
    x, sigma, text = (
        families.random(1, *EVERY["flux"].latent, seed=4),
        torch.tensor([0.6]),
        families.conditions("flux", 3),
    )

    def denoised(patcher):
        with torch.inference_mode(), host.denoiser.denoiser(patcher) as denoiser:
            return denoiser.denoise(x, sigma, [Conditioning(*text)], {})

    base, (found, _, report) = denoised(quantised), lora.apply_lora_stack(quantised, None, entries)
    wanted = denoised(lora.apply_lora_stack(plain, None, entries, "merge").model)
    assert f"model: {len(sides)} at the activations because" in report and "model: 0 weights merged" in report
    size, own = (
        float((wanted - base).abs().max()),
        float((denoised(plain) - base).abs().max()),
    )  # int8 layers round what goes in, too
    assert size > 1e-2 and float((denoised(found) - wanted).abs().max()) < 5e-3 * size + 3 * own
    assert way == "int8_tensorwise" or own < 1e-3 * size
    assert torch.equal(denoised(quantised), base)
    for name, weight in quantised.model.named_parameters():
        assert all(torch.equal(old, new) for old, new in zip(before[name], parts(weight), strict=True)), name
