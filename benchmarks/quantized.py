"""Four LoRAs of rank 16 on an int8, an fp8 and a GGUF base in Flux' layout: at the activations, merged into a
requantized copy, and ComfyUI's own loaders.

COMFYUI_PATH=… python benchmarks/quantized.py [--bases int8,fp8,gguf] [--width 1024] [--depth 2] [--single 4]
    [--side 64] [--text 256] [--loras 4] [--rank 16] [--change 0.01] [--rounds 3] [--threads 2] [--clock wall|cpu]
    [--json FILE]

It needs ComfyUI 0.33 or later with comfy-kitchen, whose layers hold int8 and fp8 weights; those of the GGUF base are
stand-ins that unpack 8-bit blocks in their forward, as ComfyUI-GGUF's do, and nobody merges into them. The LoRAs are on
every linear layer of the blocks, in float16; each changes a weight by about 1 % (--change) of its norm.

Each round applies every way once (from the LoRAs' tensors to a loaded model), changes one of the strengths, and runs
one forward, between two forwards of the bare model. Medians are printed: seconds to apply and to change a strength, the
share that a forward takes longer, what is held in memory beside the model, and the error of the change: of a dozen
layers' outputs for random input, with the LoRAs minus without, against float64, as a share of the change itself. Before
that it checks that the change at the activations is float64's within 0.1 %, that a merge is as exact as ComfyUI's own,
and that the base comes back.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lora as lora_benchmark
import torch
from device_timer import Timer
from todo import open_host
from torch import Tensor, nn

FORMATS = {"int8": ("int8_tensorwise", {}), "fp8": ("float8_e4m3fn", {"scale": "recalculate"})}
STEPS = 20  # forwards of an image, for the cost of one
SAMPLED = 12  # layers whose outputs are compared with float64
EXACT = 1e-3  # the error of the change at the activations, at most


class Blocks8(nn.Linear):
    """A layer as ComfyUI-GGUF has it: 8-bit blocks, unpacked in the forward."""

    def __init__(self, of: nn.Linear) -> None:
        from graft_nodes.tests.nodes.gguf import packed

        nn.Module.__init__(self)
        self.in_features, self.out_features = of.in_features, of.out_features
        self.weight = nn.Parameter(packed(of.weight), requires_grad=False)
        self.bias = of.bias

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = torch.zeros(self.weight.shape, device="meta")
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        from graft_nodes.tests.nodes.gguf import unpacked

        return nn.functional.linear(x, unpacked(self.weight, x.dtype), self.bias)


def build(arguments: argparse.Namespace, base: str) -> Any:
    """A ModelPatcher of a Flux with random weights, the blocks' linear layers quantized."""
    import comfy.latent_formats
    import comfy.model_base
    import comfy.model_patcher
    import comfy.supported_models_base
    from comfy.ldm.flux.model import Flux

    heads = arguments.width // 128
    settings = {
        **{"in_channels": 16, "out_channels": 16, "vec_in_dim": 64, "context_in_dim": 256, "mlp_ratio": 4.0},
        **{"hidden_size": arguments.width, "num_heads": heads, "depth": arguments.depth},
        **{"depth_single_blocks": arguments.single, "axes_dim": [16, 56, 56], "theta": 10000, "patch_size": 2},
        **{"qkv_bias": True, "guidance_embed": False, "txt_ids_dims": []},
    }

    class Config(comfy.supported_models_base.BASE):
        unet_config: dict = {}  # noqa: RUF012 (ComfyUI's own form)
        unet_extra_config: dict = {}  # noqa: RUF012
        sampling_settings = {"shift": 1.0, "multiplier": 1.0}  # noqa: RUF012
        latent_format = comfy.latent_formats.Flux

    config = Config(settings)
    config.set_inference_dtype(torch.float32, torch.float32 if base in FORMATS else None)
    if base in FORMATS:
        config.quant_config = {"mixed_ops": True}
    cpu = torch.device("cpu")
    model = comfy.model_base.BaseModel(config, comfy.model_base.ModelType.FLOW, device=cpu, unet_model=Flux)
    flux = model.diffusion_model.requires_grad_(False)
    flux.load_state_dict(weights(flux, base), strict=False)
    if base == "gguf":
        for path in layers(flux):
            parent, _, attribute = path.rpartition(".")
            setattr(flux.get_submodule(parent), attribute, Blocks8(flux.get_submodule(path)))
    return comfy.model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu)


def weights(flux: nn.Module, base: str) -> dict[str, Tensor]:
    """Random weights by name, those of the blocks' layers as ComfyUI's quantized files hold them."""
    quantized, state = set(layers(flux)), dict[str, Tensor]()
    for path, module in flux.named_modules():
        sides = (getattr(module, "out_features", None), getattr(module, "in_features", None))
        if isinstance(sides[0], int) and isinstance(sides[1], int):
            weight = torch.randn(sides) * sides[1] ** -0.5
            state |= as_stored(path, weight, base if path in quantized else "")
            if getattr(module, "bias", None) is not None:
                state[f"{path}.bias"] = torch.zeros(sides[0])
        elif hasattr(module, "scale") and isinstance(module.scale, Tensor):
            state[f"{path}.scale"] = torch.ones_like(module.scale, dtype=torch.float32)
        elif isinstance(getattr(module, "weight", None), Tensor):
            state[f"{path}.weight"] = torch.ones_like(module.weight, dtype=torch.float32)
    return state


def as_stored(path: str, weight: Tensor, base: str) -> dict[str, Tensor]:
    """One layer's weight by name, in a quantized format of ComfyUI's or as it is."""
    if base not in FORMATS:
        return {f"{path}.weight": weight}
    from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor

    name, settings = FORMATS[base]
    made = QuantizedTensor.from_float(weight, QUANT_ALGOS[name]["comfy_tensor_layout"], **settings)
    described = torch.tensor(list(json.dumps({"format": name}).encode()), dtype=torch.uint8)
    return {
        f"{path}.weight": made._qdata,
        f"{path}.weight_scale": made._params.scale,
        f"{path}.comfy_quant": described,
    }


def layers(flux: nn.Module) -> list[str]:
    """The linear layers of the blocks."""
    return [path for path, module in flux.named_modules() if "blocks." in path and hasattr(module, "in_features")]


def lora_file(shapes: dict[str, tuple[int, int]], rank: int, seed: int, change: float) -> dict[str, Tensor]:
    """A LoRA for weights of a normal distribution, which changes each by a share of its norm."""
    generator, state = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for path, (out, columns) in shapes.items():
        down = torch.randn(rank, columns, generator=generator) * columns**-0.5
        up = torch.randn(out, rank, generator=generator) * change * rank**-0.5
        state[f"diffusion_model.{path}.lora_up.weight"] = up.half()
        state[f"diffusion_model.{path}.lora_down.weight"] = down.half()
        state[f"diffusion_model.{path}.alpha"] = torch.tensor(float(rank))
    return state


class Bench:
    """One quantized model and the LoRAs for it."""

    def __init__(self, arguments: argparse.Namespace, base: str, timer: Timer) -> None:
        self.base, self.timer, self.kind = build(arguments, base), timer, base
        flux = self.base.model.diffusion_model
        self.shapes = {
            path: (flux.get_submodule(path).out_features, flux.get_submodule(path).in_features) for path in layers(flux)
        }
        self.states = [
            lora_file(self.shapes, arguments.rank, seed, arguments.change) for seed in range(arguments.loras)
        ]
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(1, 16, arguments.side, arguments.side, generator=generator)
        self.conditions = {
            "c_crossattn": torch.randn(1, arguments.text, 256, generator=generator),
            "y": torch.randn(1, 64, generator=generator),
        }
        self.ways: dict[str, Callable[[Sequence[float]], Any]] = {"activations": self.activations}
        if base in FORMATS:
            self.ways |= {"merged": self.merged, "comfyui": self.comfyui, "comfyui bypass": self.comfyui_bypass}
        load(self.base)
        sampled = list(self.shapes)[:: max(1, len(self.shapes) // SAMPLED)]
        self.inputs = {path: torch.randn(64, self.shapes[path][1], generator=generator) for path in sampled}
        self.bare = self.outputs()

    def activations(self, strengths: Sequence[float]) -> Any:
        return self.graft(strengths, "auto")

    def merged(self, strengths: Sequence[float]) -> Any:
        return self.graft(strengths, "merge")

    def graft(self, strengths: Sequence[float], mode: str) -> Any:
        from graft_nodes.host.lora_stacks import apply_lora_stack
        from graft_nodes.patches.lora_files.entry import LoraEntry

        entries = [LoraEntry(str(n), self.states[n], strength) for n, strength in enumerate(strengths)]
        patched = apply_lora_stack(self.base, None, entries, mode)
        if mode == "auto":
            assert "weights merged while it is loaded" not in patched.report.replace("0 weights merged", "")
        return patched.model

    def comfyui(self, strengths: Sequence[float]) -> Any:
        import comfy.sd

        patcher = self.base
        for state, strength in zip(self.states, strengths, strict=True):
            patcher, _ = comfy.sd.load_lora_for_models(patcher, None, state, strength, 0)
        return patcher

    def comfyui_bypass(self, strengths: Sequence[float]) -> Any:
        return lora_benchmark.core_bypass(SimpleNamespace(base=self.base), len(strengths), self.states)

    def forward(self) -> None:
        """One forward of what is loaded."""
        sigma = torch.full((1,), 0.5)
        with torch.inference_mode():
            self.base.model.apply_model(self.x, sigma, transformer_options={"sigmas": sigma}, **self.conditions)

    def outputs(self) -> dict[str, Tensor]:
        """What some layers make of random input, as they are now."""
        with torch.inference_mode():
            return {path: self.base.model.diffusion_model.get_submodule(path)(x) for path, x in self.inputs.items()}

    def error(self, strengths: Sequence[float]) -> float:
        """The mean error of the loaded stack's change of some layers' outputs, over that change, in float64."""
        errors = []
        for path, output in self.outputs().items():
            x, wanted = self.inputs[path].double(), torch.zeros(output.shape, dtype=torch.float64)
            for state, strength in zip(self.states, strengths, strict=True):
                up, down = (state[f"diffusion_model.{path}.lora_{side}.weight"].double() for side in ("up", "down"))
                wanted += strength * (x @ down.T) @ up.T
            errors.append(float((output.double() - self.bare[path].double() - wanted).norm() / wanted.norm()))
        return statistics.mean(errors)

    def check(self, strengths: Sequence[float]) -> dict[str, tuple[float, int]]:
        """(error, bytes beside the model) of each way; AssertionError if one is wrong or leaves another base."""
        results = {}
        for way, make in self.ways.items():
            load(self.base)
            forget(self.base)
            before = held()
            patcher = make(strengths)
            load(patcher)
            results[way] = self.error(strengths), held() - before
            load(self.base)
            del patcher
            assert all(
                torch.equal(old, new) for old, new in zip(self.bare.values(), self.outputs().values(), strict=True)
            )
        assert results["activations"][0] < EXACT, results
        if "merged" in results:
            assert results["merged"][0] < 1.05 * results["comfyui"][0], results
        return results

    def round(self, strengths: Sequence[float]) -> dict[str, dict[str, float]]:
        """Seconds of everything once, by way; `forward` is over that of the bare model before and after it."""
        changed, results = [*strengths[:-1], 0.25], {}
        load(self.base)
        bare = self.timer.seconds(self.forward)
        for way, make in self.ways.items():
            kept: list[Any] = []
            apply = self.timer.seconds(lambda make=make, kept=kept: apply_to(make, strengths, kept))
            strength = self.timer.seconds(lambda make=make, kept=kept: apply_to(make, changed, kept))
            forward = self.timer.seconds(self.forward)
            load(self.base)
            kept.clear()
            after = self.timer.seconds(self.forward)
            over = 2 * forward / (bare + after) - 1
            results[way] = {"apply": apply, "strength": strength, "bare": bare, "over": over}
            bare = after
        return results


def apply_to(make: Callable[[Sequence[float]], Any], strengths: Sequence[float], kept: list[Any]) -> None:
    """Make a patched model and load it. It is kept: a patcher that nobody holds takes its patches along."""
    kept.append(make(strengths))
    load(kept[-1])


def load(patcher: Any) -> None:
    """As sampling does."""
    lora_benchmark.load(patcher)


def forget(patcher: Any) -> None:
    """Free what Graft keeps for the next stack."""
    from graft_nodes.patches.patching import stack_ledger

    stack_ledger.forget(patcher.model)


def held() -> int:
    """Bytes of all tensors in this process, each memory once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and not hasattr(thing, "__tensor_flatten__") and thing.device.type != "meta":
            storage = thing.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def measure(arguments: argparse.Namespace, base: str, timer: Timer) -> list[dict[str, Any]]:
    """The rows of one base."""
    bench = Bench(arguments, base, timer)
    strengths = [0.5] * arguments.loras
    checked = bench.check(strengths)
    bench.forward()
    rounds = [bench.round(strengths) for _ in range(arguments.rounds)]
    quantized = sum(out * columns for out, columns in bench.shapes.values())
    rows = []
    for way, (error, beside) in checked.items():
        medians = {
            key: statistics.median(one[way][key] for one in rounds) for key in ("apply", "strength", "bare", "over")
        }
        image = medians["apply"] + STEPS * medians["over"] * medians["bare"]
        name = f"{base} {way}"
        rows += [
            {
                "name": f"{name} apply",
                "value": medians["apply"],
                "unit": "s",
                "ratio": medians["apply"] / medians["bare"],
            },
            {"name": f"{name} strength", "value": medians["strength"], "unit": "s"},
            {"name": f"{name} forward", "value": medians["over"], "unit": "share"},
            {"name": f"{name} image of {STEPS} steps", "value": image, "unit": "s"},
            {"name": f"{name} memory", "value": beside / 2**20, "unit": "MB", "ratio": beside / quantized},
            {"name": f"{name} error of the change", "value": error, "unit": "share"},
        ]
        print(
            f"{name}: applied in {medians['apply']:.2f} s, strength in {medians['strength']:.2f} s, forward"
            f" {100 * medians['over']:+.1f} % of {medians['bare']:.2f} s, an image of {STEPS} steps {image:+.1f} s,"
            f" {beside / 2**20:.0f} MB beside {quantized / 2**20:.0f}, error of the change {100 * error:.2g} %",
            flush=True,
        )
    return rows


def main() -> None:
    """Measure, print, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bases", default="int8,fp8,gguf")
    for name, default in (("width", 1024), ("depth", 2), ("single", 4), ("side", 64), ("text", 256), ("loras", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--change", type=float, default=0.01)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not os.environ.get("COMFYUI_PATH"):
        parser.error("set COMFYUI_PATH to a ComfyUI from 0.33: its layers hold the quantized weights")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    host = open_host("pytorch", cpu=True)
    hardware = platform.processor() or platform.machine()
    print(f"{host}, torch {torch.__version__}, {hardware}, {arguments.threads} threads of {os.cpu_count()}", flush=True)
    timer = Timer(torch.device("cpu"), lora_benchmark.CLOCKS[arguments.clock])
    started, rows = time.perf_counter(), []
    for base in arguments.bases.split(","):
        rows += measure(arguments, base, timer)
    print(f"{time.perf_counter() - started:.0f} s in all", flush=True)
    if arguments.json:
        measured = {"host": host, "hardware": hardware, "threads": arguments.threads, "rows": rows}
        arguments.json.write_text(json.dumps(measured, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
