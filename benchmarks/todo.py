"""What token downsampling gains: forward and LoRA training step of UNets in SD1.5's and SDXL's shape, against other ways of doing it.

python benchmarks/todo.py [--models sd15,sdxl] [--sizes 512,768,1024] [--what overhead,forward,train] [--ways off,f2,…] [--rounds 3]
                          [--clock wall|cpu] [--json FILE] [--markdown FILE]

References, all on the same model in the same run: (a) comfy-todo's way (K and V interpolated each, the grid guessed from the square root)
and the kohya fork's (one interpolation), both written here from their descriptions; (b) ToMe at ratio 0.5, merging by the `tomesd` package
(pip install tomesd); (c) the ideal, the same attention fed with a ready-made thinned context. Each round measures every way once, one after
the other, and ratios are taken within a round; the table shows their medians. COMFYUI_PATH names a real ComfyUI; otherwise the embedded
host's UNet is measured. On a CPU two threads and float32, on a CUDA device bfloat16. What does not fit into memory is skipped, and said.
`--clock cpu` counts the processor seconds of this process instead of the time on the wall, for a CPU that others use as well.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
COMMON = {
    "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 320, "use_spatial_transformer": True,
    "use_temporal_attention": False, "legacy": False,
}
SHAPES: dict[str, dict[str, Any]] = {
    "sd15": {
        **COMMON, "num_res_blocks": [2] * 4, "channel_mult": [1, 2, 4, 4], "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0],
        "transformer_depth_output": [1] * 9 + [0] * 3, "transformer_depth_middle": 1, "context_dim": 768, "num_heads": 8,
        "num_head_channels": -1, "use_linear_in_transformer": False, "adm_in_channels": None,
    },
    "sdxl": {
        **COMMON, "num_res_blocks": [2] * 3, "channel_mult": [1, 2, 4], "transformer_depth": [0, 0, 2, 2, 10, 10],
        "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10], "transformer_depth_middle": 10, "context_dim": 2048, "num_heads": -1,
        "num_head_channels": 64, "use_linear_in_transformer": True, "adm_in_channels": 2816, "num_classes": "sequential",
    },
}
SIZES = {"sd15": (512, 768, 1024), "sdxl": (1024,)}
FACTORS = {"f2": "2", "f44": "4 4", "f42": "4 2"}
WAYS = ("off", *FACTORS, *(f"{key} {peer}" for key in ("f2", "f44") for peer in ("comfy-todo", "kohya", "ideal")), "tomesd 0.5")
# float32 bytes of activations a latent pixel keeps for a training step, seen on the CPU (SD1.5's shape; SDXL's is deeper)
TRAIN_BYTES = {"sd15": 1.3e6, "sdxl": 1.6e6}


def open_host() -> str:
    """Open a real ComfyUI or the embedded host; returns which."""
    checkout = os.environ.get("COMFYUI_PATH")
    if checkout:
        sys.path.insert(0, str(ROOT / "tests" / "with_comfyui"))
        import open_comfyui

        open_comfyui.open_checkout(checkout)
        import comfyui_version

        return f"ComfyUI {comfyui_version.__version__}"
    from graft_nodes import comfyui_api_stubs

    comfyui_api_stubs.install()
    return "the embedded host"


def build(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    """A ModelPatcher of a UNet in this shape, random weights."""
    import comfy.latent_formats
    import comfy.model_base
    import comfy.model_patcher
    import comfy.supported_models_base

    class Config(comfy.supported_models_base.BASE):
        unet_config = {}  # noqa: RUF012 (ComfyUI's own form)
        unet_extra_config = {}  # noqa: RUF012
        latent_format = comfy.latent_formats.SD15

    config = Config(dict(SHAPES[name]))
    config.set_inference_dtype(dtype, None)
    model = comfy.model_base.BaseModel(config, comfy.model_base.ModelType.EPS, device=device)
    for parameter in model.diffusion_model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
        else:
            nn.init.ones_(parameter)
    model.to(device)
    return comfy.model_patcher.ModelPatcher(model, load_device=device, offload_device=device)


class Runner:
    """One model at one size: `seconds(options, train)` measures one forward or one training step of a LoRA."""

    def __init__(self, patcher: Any, name: str, size: int, device: torch.device, dtype: torch.dtype, clock: Callable[[], float]):
        self.model, self.device, self.clock = patcher.model, device, clock
        side, shape = size // 8, SHAPES[name]
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(1, 4, side, side, generator=generator).to(device, dtype)
        self.sigma = torch.ones(1, device=device)
        self.conditions = {"c_crossattn": torch.randn(1, 77, shape["context_dim"], generator=generator).to(device, dtype)}
        if shape["adm_in_channels"]:
            self.conditions["y"] = torch.randn(1, shape["adm_in_channels"], generator=generator).to(device, dtype)

    def run(self, options: dict, train: bool) -> Tensor:
        options = {**options, "sigmas": self.sigma}
        if train:
            options["graft_training"] = {"step": 0, "total_steps": 1}
        return self.model.apply_model(self.x, self.sigma, transformer_options=options, **self.conditions)

    def seconds(self, options: dict, train: bool) -> float:
        self._wait()
        start = self.clock()
        if train:
            self.run(options, True).float().square().mean().backward()
        else:
            with torch.inference_mode():
                self.run(options, False)
        self._wait()
        return self.clock() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def put_lora(unet: nn.Module, rank: int = 16) -> list[Any]:
    """A LoRA on every attention projection, as forward hooks; returns the hooks."""
    unet.requires_grad_(False)
    hooks = []
    for name, module in unet.named_modules():
        if isinstance(module, nn.Linear) and (".attn1." in name or ".attn2." in name):
            down = nn.Parameter(torch.randn(rank, module.in_features, device=module.weight.device, dtype=module.weight.dtype) * 0.01)
            up = nn.Parameter(torch.zeros(module.out_features, rank, device=module.weight.device, dtype=module.weight.dtype))

            def add(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, down: Tensor = down, up: Tensor = up) -> Tensor:
                return output + inputs[0] @ down.T @ up.T

            hooks.append(module.register_forward_hook(add))
    return hooks


# --- the other ways, as plain reference code --------------------------------------------------------------------------------------


def shrunk(tokens: Tensor, grid: tuple[int, int], factor: float) -> Tensor:
    """Tokens (B, h*w, C) through F.interpolate, as both peers do it."""
    image = tokens.transpose(1, 2).reshape(tokens.shape[0], -1, *grid)
    size = tuple(int(side / factor) for side in grid)
    return F.interpolate(image, size=size, mode="nearest-exact").flatten(2).transpose(1, 2)


def guessed(q: Tensor, extra: dict, factors: list[float], levels: tuple[int, ...]) -> tuple[tuple[int, int], float] | None:
    """The peers' guess of (token grid, factor) from the token count; None when this level is not thinned."""
    height, width = extra["original_shape"][2:]
    level = math.ceil(math.sqrt(height * width // q.shape[1]))
    depth = levels.index(level) if level in levels else len(factors)
    return ((height // level, width // level), factors[depth]) if depth < len(factors) else None


def comfy_todo(factors: list[float], levels: tuple[int, ...]) -> dict:
    """comfy-todo: K and V are interpolated one after the other."""

    def patch(q: Tensor, k: Tensor, v: Tensor, extra: dict) -> tuple[Tensor, Tensor, Tensor]:
        plan = guessed(q, extra, factors, levels)
        return (q, k, v) if plan is None else (q, shrunk(k, *plan), shrunk(v, *plan))

    return {"patches": {"attn1_patch": [patch]}}


def kohya_todo(factors: list[float], levels: tuple[int, ...]) -> dict:
    """The kohya fork: one interpolation that K and V share."""

    def patch(q: Tensor, k: Tensor, v: Tensor, extra: dict) -> tuple[Tensor, Tensor, Tensor]:
        plan = guessed(q, extra, factors, levels)
        if plan is None:
            return q, k, v
        context = shrunk(k, *plan)
        return q, context, context

    return {"patches": {"attn1_patch": [patch]}}


def ready_made(factors: list[float], levels: tuple[int, ...]) -> dict:
    """The ideal: the thinned context of each block is there already (the first call makes it, and is not measured)."""
    made: dict[tuple, Tensor] = {}

    def patch(q: Tensor, k: Tensor, v: Tensor, extra: dict) -> tuple[Tensor, Tensor, Tensor]:
        plan = guessed(q, extra, factors, levels)
        if plan is None:
            return q, k, v
        key = (*extra["block"], extra["block_index"])
        if key not in made:
            made[key] = shrunk(k, *plan).detach().clone()
        return q, made[key], made[key]

    return {"patches": {"attn1_patch": [patch]}}


def tome(ratio: float, levels: tuple[int, ...]) -> dict:
    """ToMe as the tomesd package does it by default: at the first level all tokens merge before self-attention, and unmerge after."""
    from tomesd.merge import bipartite_soft_matching_random2d

    unmerge: list[Callable[[Tensor], Tensor]] = []

    def merge(q: Tensor, k: Tensor, v: Tensor, extra: dict) -> tuple[Tensor, Tensor, Tensor]:
        height, width = extra["original_shape"][2:]
        if q.shape[1] != (height // levels[0]) * (width // levels[0]):
            return q, k, v
        merging, restoring = bipartite_soft_matching_random2d(
            q, width // levels[0], height // levels[0], 2, 2, int(q.shape[1] * ratio), generator=torch.Generator(q.device).manual_seed(0)
        )
        unmerge.append(restoring)
        merged = merging(q)
        return merged, merged, merged

    def restore(output: Tensor, extra: dict) -> Tensor:
        return unmerge.pop()(output) if unmerge else output

    return {"patches": {"attn1_patch": [merge], "attn1_output_patch": [restore]}}


# --- measuring --------------------------------------------------------------------------------------------------------------------


def graft(patcher: Any, factors: str) -> dict:
    """transformer_options of the model with Graft's ToDo."""
    from graft_nodes import host
    from graft_nodes.patches.todo import ToDoSettings

    return host.todo.apply_todo(patcher, ToDoSettings.parse(depth_factors=factors))[0].model_options["transformer_options"]


def ways(patcher: Any, name: str) -> dict[str, dict]:
    """{way: transformer_options}; `off` is the plain model."""
    levels = (1, 2, 4, 8) if name == "sd15" else (2, 4)
    all_ways: dict[str, dict] = {"off": {}, **{key: graft(patcher, factors) for key, factors in FACTORS.items()}}
    for key in ("f2", "f44"):
        numbers = [float(word) for word in FACTORS[key].split()]
        all_ways[f"{key} comfy-todo"] = comfy_todo(numbers, levels)
        all_ways[f"{key} kohya"] = kohya_todo(numbers, levels)
        all_ways[f"{key} ideal"] = ready_made(numbers, levels)
    all_ways["tomesd 0.5"] = tome(0.5, levels)
    return all_ways


def compare(runner: Runner, options: dict[str, dict], train: bool, rounds: int) -> list[dict[str, float]]:
    """Seconds of every way, one dictionary a round; what is thinned gives the same result as the peers' thinning first."""
    check(runner, options)
    for key in options:
        if key.endswith("ideal"):
            runner.seconds(options[key], False)  # makes its context
    results = []
    for _ in range(rounds):
        results.append({key: runner.seconds(option, train) for key, option in options.items()})
        print("  " + "  ".join(f"{key} {seconds:.2f}" for key, seconds in results[-1].items()), flush=True)
    return results


def check(runner: Runner, options: dict[str, dict]) -> None:
    """On grids that divide, Graft's result is the peers' to rounding; and it is not that of the plain model."""
    peers = [key for key in ("f2 kohya", "f2 comfy-todo") if key in options]
    if "f2" not in options or not peers:
        return
    with torch.inference_mode():
        off, ours, peer = (runner.run(options[key], False) for key in ("off", "f2", peers[0]))
    allowed = (2e-2 if ours.dtype != torch.float32 else 1e-4) * float(off.abs().max())
    assert float((ours - peer).abs().max()) <= allowed, "ToDo differs from the peers' result"
    assert not torch.equal(ours, off), "ToDo did nothing"


def rows_of(prefix: str, results: list[dict[str, float]]) -> list[dict[str, Any]]:
    """One row a way: median seconds, and the median over rounds of how many times faster than `off` it is."""
    rows = []
    for key in results[0]:
        ratio = statistics.median(one["off"] / one[key] for one in results)
        seconds = statistics.median(one[key] for one in results)
        rows.append({"name": f"{prefix}_{key.replace(' ', '_')}", "value": seconds, "unit": "s", "ratio": ratio})
    pairs = [(key, f"{key} {peer}") for key in ("f2", "f44") for peer in ("comfy-todo", "kohya", "ideal")] + [("f2", "tomesd 0.5")]
    for key, peer in pairs:
        if key in results[0] and peer in results[0]:
            ratio = statistics.median(one[key] / one[peer] for one in results)
            name = f"{prefix}_{key}_over_{peer.removeprefix(f'{key} ').replace(' ', '_')}"
            rows.append({"name": name, "value": ratio, "unit": "times its seconds", "ratio": ratio})
    return rows


def overhead(
    patcher: Any, name: str, size: int, device: torch.device, dtype: torch.dtype, rounds: int, clock: Callable[[], float]
) -> list[dict[str, Any]]:
    """Self-attention of the finest level through the patch, against the same attention fed with a ready-made thinned context."""
    from graft_nodes.patches.todo import target_grid, thin

    side = size // 8 // (1 if name == "sd15" else 2)
    block = ("input", 1 if name == "sd15" else 4)
    attention = patcher.model.diffusion_model.input_blocks[block[1]][1].transformer_blocks[0].attn1
    tokens = torch.randn(1, side * side, attention.to_q.in_features).to(device, dtype)
    extra = {"block": block, "block_index": 0, "activations_shape": [1, tokens.shape[2], side, side]}
    rows = []
    for key in ("f2", "f44"):
        patch = graft(patcher, FACTORS[key])["patches"]["attn1_patch"][0]
        ready = thin(tokens, (side, side), target_grid((side, side), float(FACTORS[key].split()[0])))

        def patched(patch: Callable = patch) -> None:
            q, context, value = patch(tokens, tokens, tokens, extra)
            attention(q, context=context, value=value)

        def ideal(ready: Tensor = ready) -> None:
            attention(tokens, context=ready, value=ready)

        times: dict[str, list[float]] = {"patched": [], "ideal": []}
        with torch.inference_mode():
            for number in range(2 + 10 * rounds):
                for kind, function in (("patched", patched), ("ideal", ideal)) if number % 2 else (("ideal", ideal), ("patched", patched)):
                    start = clock()
                    function()
                    if device.type == "cuda":
                        torch.cuda.synchronize()
                    if number >= 2:
                        times[kind].append(clock() - start)
        ratio = statistics.median(one / two for one, two in zip(times["patched"], times["ideal"], strict=True))
        rows.append({"name": f"overhead_vs_ideal_{name}_{size}_{key}", "value": ratio - 1, "unit": "share", "ratio": ratio})
        seconds = {kind: statistics.median(values) for kind, values in times.items()}
        print(f"  {key}: patched {seconds['patched']:.4f} s, ideal {seconds['ideal']:.4f} s, ratio {ratio:.4f}", flush=True)
    return rows


def free_bytes(device: torch.device) -> float:
    """Memory that is free for the measurement."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        import psutil
    except ImportError:
        return math.inf
    return float(psutil.virtual_memory().available)


COLUMNS = {
    "off": "off (s)", "f2": "2", "f44": "4 4", "f42": "4 2", "f2_comfy-todo": "2, comfy-todo", "f44_comfy-todo": "4 4, comfy-todo",
    "f2_kohya": "2, kohya", "f44_kohya": "4 4, kohya", "tomesd_0.5": "ToMe 0.5", "f2_ideal": "2, ideal", "f44_ideal": "4 4, ideal",
}


def markdown(rows: list[dict[str, Any]], where: str) -> str:
    """The table: times faster than the plain model."""
    found = {row["name"]: row for row in rows}
    prefixes = [name.removesuffix("_off") for name in found if name.endswith("_off")]
    columns = [key for key in COLUMNS if any(f"{prefix}_{key}" in found for prefix in prefixes)]
    lines = ["| | " + " | ".join(COLUMNS[key] for key in columns) + " |", "|---" * (len(columns) + 1) + "|"] if columns else []
    for prefix in prefixes:
        ratios = [found.get(f"{prefix}_{key}") for key in columns[1:]]
        cells = [f"{found[f'{prefix}_off']['value']:.1f}", *("" if row is None else f"{row['ratio']:.2f}x" for row in ratios)]
        lines.append(f"| {prefix.replace('_', ' ')} | " + " | ".join(cells) + " |")
    single = [row for row in rows if row["name"].startswith("overhead_vs_ideal_")]
    if single:
        parts = [f"{row['name'].removeprefix('overhead_vs_ideal_').replace('_', ' ')}: {100 * row['value']:+.1f}%" for row in single]
        lines += ["", "Patch against ready-made context, one attention: " + "; ".join(parts)]
    return "\n".join([*lines, "", where])


def measure(name: str, options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Rows of one model."""
    wanted = [size for size in SIZES[name] if size in options.sizes]
    needed = {"sd15": 0.9e9, "sdxl": 2.6e9}[name] * torch.empty(0, dtype=dtype).element_size() * 1.15
    if free_bytes(device) < needed:
        print(f"{name}: skipped, its weights need {needed / 1e9:.0f} GB and {free_bytes(device) / 1e9:.0f} are free")
        return []
    patcher = build(name, device, dtype)
    rows: list[dict[str, Any]] = []
    if "overhead" in options.what:
        for size in wanted:
            print(f"{name} {size} px, one attention:")
            rows += overhead(patcher, name, size, device, dtype, options.rounds, options.clock)
    hooks: list[Any] = []
    for what in ("forward", "train"):
        if what not in options.what:
            continue
        hooks = put_lora(patcher.model.diffusion_model) if what == "train" else []
        for size in wanted:
            need = TRAIN_BYTES[name] * (size // 8) ** 2 * torch.empty(0, dtype=dtype).element_size() / 4 if what == "train" else 2e9
            if free_bytes(device) < need:
                print(f"{name} {what} {size} px: skipped, it needs about {need / 1e9:.0f} GB and {free_bytes(device) / 1e9:.0f} are free")
                continue
            print(f"{name} {what} {size} px:", flush=True)
            runner = Runner(patcher, name, size, device, dtype, options.clock)
            prefix = f"{what}_{size}" if name == "sd15" else f"{name}_{what}_{size}"
            chosen = {key: option for key, option in ways(patcher, name).items() if key in options.ways}
            rows += rows_of(prefix, compare(runner, chosen, what == "train", options.rounds))
    for hook in hooks:
        hook.remove()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default="sd15,sdxl", type=lambda text: text.split(","))
    parser.add_argument("--sizes", default="512,768,1024", type=lambda text: [int(word) for word in text.split(",")])
    parser.add_argument("--what", default="overhead,forward,train", type=lambda text: text.split(","))
    parser.add_argument("--ways", default=list(WAYS), type=lambda text: ["off", *(word for word in text.split(",") if word != "off")])
    parser.add_argument("--clock", default="wall", choices=("wall", "cpu"))
    parser.add_argument("--rounds", default=3, type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    unknown = [word for word in options.ways if word not in WAYS]
    if unknown:
        parser.error(f"--ways: {', '.join(unknown)} is none of {', '.join(WAYS)}")
    kind, options.clock = options.clock, {"wall": time.perf_counter, "cpu": time.process_time}[options.clock]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.set_num_threads(2)
    where = open_host()
    machine = torch.cuda.get_device_name() if device.type == "cuda" else f"2 threads of {os.cpu_count()} cores, {platform.machine()}"
    load = f", load average {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    number = str(dtype).removeprefix("torch.")
    line = f"{where}, {machine}, {number}, torch {torch.__version__}, {kind} time, median of {options.rounds} rounds{load}"
    print(line)
    rows = [row for name in options.models for row in measure(name, options, device, dtype)]
    worst = [row for row in rows if row["name"].startswith("overhead_vs_ideal_")]
    if worst:
        rows.append({**max(worst, key=lambda row: row["ratio"]), "name": "overhead_vs_ideal"})
    text = markdown(rows, line)
    print(text)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if options.markdown:
        options.markdown.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
