"""LoRA stacks on ComfyUI's own quantized layers: every kind at the activations is what a merge into the numbers that
they hold is.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import families
import pytest
import torch
from graft_nodes import host
from graft_nodes.host import lora_stacks
from graft_nodes.patches.lora_files.entry import LoraEntry
from graft_nodes.training.data.dataset import Conditioning
from quantized import parts, with_quantized_layers, with_scaled_layers
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


def exact_change(entries, name):
    """What LoRAs add to a weight, in float64."""
    total = 0.0
    for entry in entries:
        up, down = (entry.state_dict[f"{name}.lora_{side}.weight"].double() for side in ("up", "down"))
        total = total + entry.strength_model * up @ down
    return total


@pytest.mark.parametrize("way", ["float8_e4m3fn", "int8_tensorwise"])
def test_a_stack_merged_into_quantized_layers(way):
    """Mode merge: the sum of float64 within a step of the quantization, as ComfyUI's own loader has it; and back."""
    import comfy.model_management
    import comfy.sd

    quantized, plain = with_quantized_layers("flux", way)
    before = {name: [part.clone() for part in parts(p)] for name, p in quantized.model.named_parameters()}
    touched = ("img_attn.proj.weight", "linear2.weight")
    sides = {name: tuple(weight.shape) for name, weight in plain.model.named_parameters() if name.endswith(touched)}
    entries = [LoraEntry("one", file_of("lora", sides), 0.5), LoraEntry("two", file_of("lora", sides), -0.2)]
    merged, _, report = lora_stacks.apply_lora_stack(quantized, None, entries, "merge")
    assert f"model: {len(sides)} weights merged" in report
    own = quantized
    for entry in entries:
        own, _ = comfy.sd.load_lora_for_models(own, None, dict(entry.state_dict), entry.strength_model, 0)
    with torch.inference_mode():
        found = []
        for patcher in (merged, own):
            comfy.model_management.load_models_gpu([patcher], force_full_load=True)
            found.append({name: patcher.model.get_parameter(name).dequantize().double() for name in sides})
        comfy.model_management.load_models_gpu([quantized], force_full_load=True)
    for name in sides:
        base = plain.model.get_parameter(name).double()
        exact = base + exact_change(entries, name.removesuffix(".weight"))
        errors = [float((weights[name] - exact).norm() / exact_change(entries, name[:-7]).norm()) for weights in found]
        assert errors[0] < 1.1 * errors[1], name
    for name, weight in quantized.model.named_parameters():
        assert all(torch.equal(old, new) for old, new in zip(before[name], parts(weight), strict=True)), name


KINDS = ("lora", "dora", "oft", "glora", "ia3", "set_weight")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["scaled fp8", "float8_e4m3fn", "int8_tensorwise"])
def test_a_stack_on_quantized_layers(way, kind):
    quantized, plain = with_scaled_layers("flux") if way == "scaled fp8" else with_quantized_layers("flux", way)
    before = {name: [part.clone() for part in parts(p)] for name, p in quantized.model.named_parameters()}
    touched = ("img_attn.proj.weight", "linear2.weight")
    sides = {name: tuple(weight.shape) for name, weight in plain.model.named_parameters() if name.endswith(touched)}
    entries = [LoraEntry("first", file_of("lora", sides), 0.5), LoraEntry(kind, file_of(kind, sides), 0.7)]
    x, sigma, text = (
        families.random(1, *EVERY["flux"].latent, seed=4),
        torch.tensor([0.6]),
        families.conditions("flux", 3),
    )

    def denoised(patcher):
        with torch.inference_mode(), host.denoiser.open_denoiser(patcher) as denoiser:
            return denoiser.denoise(x, sigma, [Conditioning(*text)], {})

    base, (found, _, report) = denoised(quantized), lora_stacks.apply_lora_stack(quantized, None, entries)
    wanted = denoised(lora_stacks.apply_lora_stack(plain, None, entries, "merge").model)
    assert f"model: {len(sides)} at the activations because" in report and "model: 0 weights merged" in report
    size, own = (
        float((wanted - base).abs().max()),
        float((denoised(plain) - base).abs().max()),
    )  # int8 layers round what goes in, too
    assert size > 1e-2 and float((denoised(found) - wanted).abs().max()) < 5e-3 * size + 3 * own
    assert way == "int8_tensorwise" or own < 1e-3 * size
    assert torch.equal(denoised(quantized), base)
    for name, weight in quantized.model.named_parameters():
        assert all(torch.equal(old, new) for old, new in zip(before[name], parts(weight), strict=True)), name


BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "quantized.py"
SIZES = {"width": 128, "depth": 1, "single": 1, "side": 8, "text": 8, "rounds": 1, "threads": 1}
PROMISED = ("apply", "strength", "forward", "image of 20 steps", "memory", "error of the change")


@pytest.mark.parametrize("base", ["int8", "fp8", "gguf"])
def test_the_benchmark_of_quantized_bases_writes_its_rows(tmp_path, base):
    quant = pytest.importorskip("comfy.quant_ops")
    if "int8_tensorwise" not in getattr(quant, "QUANT_ALGOS", {}):
        pytest.skip("this ComfyUI has no int8 layers")
    file = tmp_path / "rows.json"
    tiny = [f"--{name}={size}" for name, size in SIZES.items()]
    child = subprocess.run(
        [sys.executable, str(BENCHMARK), *tiny, "--bases", base, "--json", str(file)],
        cwd=tmp_path,
        env={**os.environ, "COMFYUI_PATH": os.environ["GRAFT_TEST_COMFYUI"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    values = {row["name"]: row["value"] for row in json.loads(file.read_text(encoding="utf-8"))["rows"]}
    assert {f"{base} activations {what}" for what in PROMISED} <= values.keys()
    assert (f"{base} merged apply" in values) == (base != "gguf")
    assert all(map(math.isfinite, values.values()))
