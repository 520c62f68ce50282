"""What token routing (Apply TREAD) gains: a LoRA training step of a transformer in Flux' layout, and of a UNet in
SD1.5's shape with and without ToDo.

COMFYUI_PATH=… python benchmarks/tread.py [--what flux,sd15] [--tiny] [--limit] [--rounds 3] [--threads 2]
                                          [--clock wall|cpu] [--json FILE]

The transformer has 12 blocks of width 512 (4 double, 8 single) and sees 1,024 image tokens and 256 text tokens; the
UNet sees 768 px. `--limit` also measures the UNet without the blocks that tokens can skip: no ratio and no way of
skipping saves more. Each round measures every way once, one after the other; ratios are taken within a round, and
medians are printed. Before, each way's prediction is checked: with all tokens back in place it is finite, of the plain
model's shape and not the plain model's. Float32 and two threads on a CPU, bfloat16 on a CUDA device.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import todo
import torch
import torch.nn.functional as F
from device_timer import Timer
from torch import Tensor, nn

FLUX = {
    "in_channels": 16,
    "out_channels": 16,
    "vec_in_dim": 64,
    "context_in_dim": 256,
    "hidden_size": 512,
    "mlp_ratio": 4.0,
    "num_heads": 4,
    "depth": 4,
    "depth_single_blocks": 8,
    "axes_dim": [16, 56, 56],
    "theta": 10000,
    "patch_size": 2,
    "qkv_bias": True,
    "guidance_embed": False,
}
SEED = 1
RANK = 16


def build_flux(device: torch.device, dtype: torch.dtype) -> Any:
    """A ModelPatcher of a small Flux with random weights."""
    import comfy.latent_formats
    import comfy.model_base
    import comfy.model_patcher
    import comfy.supported_models_base
    from comfy.ldm.flux.model import Flux, FluxParams

    class Config(comfy.supported_models_base.BASE):
        unet_config: dict = {}  # noqa: RUF012 (ComfyUI's own form)
        unet_extra_config: dict = {}  # noqa: RUF012
        sampling_settings = {"shift": 1.0, "multiplier": 1.0}  # noqa: RUF012
        latent_format = comfy.latent_formats.Flux

    known = FluxParams.__dataclass_fields__
    text_ids = {"txt_ids_dims": []} if "txt_ids_dims" in known else {}
    config = Config({**FLUX, **text_ids})
    config.set_inference_dtype(dtype, None)
    model = comfy.model_base.BaseModel(config, comfy.model_base.ModelType.FLOW, device=device, unet_model=Flux)
    model.diffusion_model.requires_grad_(False)
    for parameter in model.diffusion_model.parameters():
        if parameter.ndim > 1:
            parameter.copy_(torch.randn(parameter.shape, device=device) * parameter[0].numel() ** -0.5)
        else:
            parameter.fill_(1.0)
    model.to(device)
    return comfy.model_patcher.ModelPatcher(model, load_device=device, offload_device=device)


class Step:
    """One training step of a LoRA on every linear layer of the blocks."""

    def __init__(
        self, patcher: Any, latent: tuple[int, ...], conditions: dict[str, tuple[int, ...]], dtype: torch.dtype
    ):
        self.model, self.device = patcher.model, patcher.load_device
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(latent, generator=generator).to(self.device, dtype)
        self.sigma = torch.full((1,), 0.5, device=self.device)
        self.conditions = {
            name: torch.randn(shape, generator=generator).to(self.device, dtype) for name, shape in conditions.items()
        }
        trained: list[nn.Parameter] = []
        for name, module in patcher.model.diffusion_model.named_modules():
            if isinstance(module, nn.Linear) and "blocks." in name and "mod" not in name:
                trained += _with_lora(module)
        self.optimizer = torch.optim.AdamW(trained, lr=1e-6)

    def predict(self, options: dict[str, Any]) -> Tensor:
        """The prediction in a training step with these transformer_options."""
        where = {"step": 0, "total_steps": 1, "routing": SEED}
        options = {**options, "sigmas": self.sigma, "graft_training": where}
        return self.model.apply_model(self.x, self.sigma, transformer_options=options, **self.conditions)

    def run(self, options: dict[str, Any]) -> None:
        """Forward, backward, update."""
        self.predict(options).float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _with_lora(module: nn.Linear) -> list[nn.Parameter]:
    weight = module.weight
    down = nn.Parameter(torch.randn(RANK, module.in_features, device=weight.device, dtype=weight.dtype) * 0.01)
    up = nn.Parameter(torch.zeros(module.out_features, RANK, device=weight.device, dtype=weight.dtype))

    def add(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + F.linear(F.linear(inputs[0], down), up)

    module.register_forward_hook(add)
    return [down, up]


def with_tread(patcher: Any, ratio: float, start: int = 2, end: int = -2) -> Any:
    """The model with TREAD."""
    from graft_nodes.host.token_routing import apply_routing
    from graft_nodes.patches.token_routing.settings import RoutingSettings

    return apply_routing(patcher, RoutingSettings(ratio, start, end))[0]


def without_blocks(patcher: Any) -> Any:
    """The model without the blocks that tokens can skip: tokens pass by them."""
    from graft_nodes.patches.core.calls import around
    from graft_nodes.patches.core.clones import put_call
    from graft_nodes.patches.token_routing.routing_plan import plan_routing
    from graft_nodes.patches.token_routing.settings import RoutingSettings

    unet = patcher.model.diffusion_model
    spans = plan_routing(unet, RoutingSettings(0.5)).spans(unet)
    blocks = [block for span in spans for block, _ in span]

    def call(executor: Any, *args: Any, **kwargs: Any) -> Tensor:
        with contextlib.ExitStack() as stack:
            for block in blocks:
                stack.enter_context(around(block, "replacement", lambda _, __, x, *___, **____: x))
            return executor(*args, **kwargs)

    clone = patcher.clone()
    put_call(clone, "without_blocks", call)
    return clone


def with_todo(patcher: Any) -> Any:
    """The model with ToDo at factor 2."""
    from graft_nodes.host.token_downsampling import apply_todo
    from graft_nodes.patches.token_downsampling.tokens import ToDoSettings

    return apply_todo(patcher, ToDoSettings(factor=2.0))[0]


def measure(name: str, step: Step, ways: dict[str, Any], rounds: int, timer: Timer) -> list[dict[str, Any]]:
    """One row a way: median seconds, and the median over rounds of how many times faster than `off` it is."""
    options = {key: one.model_options["transformer_options"] for key, one in ways.items()}
    with torch.no_grad():
        plain = step.predict(options["off"])
        for key in list(options)[1:]:
            other = step.predict(options[key])
            assert other.shape == plain.shape and torch.isfinite(other).all() and not torch.equal(other, plain), key
    step.run(options["off"])
    results, keys = [], list(options)
    for number in range(rounds):
        first = number * len(keys) // rounds
        found = {key: timer.seconds(lambda key=key: step.run(options[key])) for key in keys[first:] + keys[:first]}
        results.append(found)
        print("  " + "  ".join(f"{key} {found[key]:.3f}" for key in keys), flush=True)
    rows = []
    for key in keys:
        seconds = statistics.median(one[key] for one in results)
        ratio = statistics.median(one["off"] / one[key] for one in results)
        rows.append({"name": f"tread_{name}_{key}", "value": seconds, "unit": "s", "ratio": ratio})
        print(f"{name} {key}: {seconds:.3f} s, {ratio:.2f}x", flush=True)
    return rows


def flux(device: torch.device, dtype: torch.dtype, side: int) -> tuple[Step, dict[str, Any]]:
    """A Flux of 12 blocks, and the ways to train it."""
    patcher = build_flux(device, dtype)
    step = Step(patcher, (1, 16, side, side), {"c_crossattn": (1, 256, 256), "y": (1, 64)}, dtype)
    ways = {"off": patcher, "half": with_tread(patcher, 0.5), "half_all": with_tread(patcher, 0.5, 0, -1)}
    return step, ways


def sd15(device: torch.device, dtype: torch.dtype, side: int) -> tuple[Step, dict[str, Any]]:
    """A UNet in SD1.5's shape, and the ways to train it."""
    patcher = todo.build("sd15" if side > 16 else "tiny", device, dtype)
    context = todo.SHAPES["sd15" if side > 16 else "tiny"]["context_dim"]
    step = Step(patcher, (1, 4, side, side), {"c_crossattn": (1, 77, context)}, dtype)
    routed = with_tread(patcher, 0.5)
    ways = {"off": patcher, "half": routed, "todo": with_todo(patcher), "half_todo": with_todo(routed)}
    return step, ways


MODELS: dict[str, tuple[Callable[..., tuple[Step, dict[str, Any]]], int, int]] = {  # with sides, and tiny ones
    "flux": (flux, 64, 16),
    "sd15": (sd15, 96, 16),
}


def main() -> None:
    """Measure, print, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", default="flux,sd15")
    parser.add_argument("--tiny", action="store_true", help="to try this script: its figures say nothing")
    parser.add_argument("--limit", action="store_true", help="the UNet without the blocks that tokens can skip, too")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    host = todo.open_host("pytorch", cpu=device.type == "cpu")
    hardware = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    print(f"{host}, torch {torch.__version__}, {hardware}, {arguments.threads} threads of {os.cpu_count()}", flush=True)
    from graft_nodes.host.denoiser import open_denoiser

    timer, rows = Timer(device, time.process_time if arguments.clock == "cpu" else time.perf_counter), []
    for name in arguments.what.split(","):
        make, side, small = MODELS[name]
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        step, ways = make(device, dtype, small if arguments.tiny else side)
        if arguments.limit and name == "sd15":
            without = without_blocks(ways["off"])
            ways |= {"limit": without, "limit_todo": with_todo(without)}
        with open_denoiser(ways["off"]):  # as in training: no kernels without a backward pass
            rows += measure(name, step, ways, arguments.rounds, timer)
    if arguments.json:
        arguments.json.write_text(json.dumps({"host": host, "rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
