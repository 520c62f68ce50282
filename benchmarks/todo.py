"""What token downsampling gains: forward and LoRA training step of UNets in SD1.5's and SDXL's shape, against other
ways of doing it.

python benchmarks/todo.py [--quick] [--models sd15,sdxl] [--sizes 512,768,1024] [--what profile,overhead,forward,train]
[--ways off,f2,…]
                          [--kernel default|pytorch|split|quad] [--dtype float32] [--checkpointing] [--rounds 3]
                            [--threads 2]
                          [--clock wall|cpu] [--json FILE] [--markdown FILE]

The other ways are in todo_ways.py: comfy-todo's, the kohya fork's, ToMe at ratio 0.5 (pip install
"graft-nodes[benchmarks]"), the ideal. All run on the same model in the same process: each round measures every way
once, one after the other, ratios are taken within a round, and the tables show medians. `profile` shows where a forward
spends its time, and what no thinning could beat: the time without any self-attention at the thinned depths.
COMFYUI_PATH names a real ComfyUI, else the embedded host's UNet is measured; `--kernel` is ComfyUI's own setting.
Float32 and two threads on a CPU, bfloat16 on a CUDA device, unless asked otherwise. What does not fit into memory is
skipped, and said. `--clock cpu` counts this process's processor seconds, for a CPU that others use as well (with
--threads 1, or waiting threads count too). `--quick` is 512 px, one round.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import todo_ways
import torch
import torch.nn.functional as F
from device_timer import Timer, wait
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
COMMON = {
    "image_size": 32,
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 320,
    "use_spatial_transformer": True,
    "use_temporal_attention": False,
    "legacy": False,
}
SHAPES: dict[str, dict[str, Any]] = {
    "sd15": {
        **COMMON,
        "num_res_blocks": [2] * 4,
        "channel_mult": [1, 2, 4, 4],
        "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0],
        "transformer_depth_output": [1] * 9 + [0] * 3,
        "transformer_depth_middle": 1,
        "context_dim": 768,
        "num_heads": 8,
        "num_head_channels": -1,
        "use_linear_in_transformer": False,
        "adm_in_channels": None,
    },
    "sdxl": {
        **COMMON,
        "num_res_blocks": [2] * 3,
        "channel_mult": [1, 2, 4],
        "transformer_depth": [0, 0, 2, 2, 10, 10],
        "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
        "transformer_depth_middle": 10,
        "context_dim": 2048,
        "num_heads": -1,
        "num_head_channels": 64,
        "use_linear_in_transformer": True,
        "adm_in_channels": 2816,
        "num_classes": "sequential",
    },
    "66M": {  # compiled within the time of dev.py gpu
        **COMMON,
        "model_channels": 128,
        "num_res_blocks": [1] * 3,
        "channel_mult": [1, 2, 4],
        "transformer_depth": [1] * 3,
        "transformer_depth_output": [1] * 6,
        "transformer_depth_middle": 1,
        "context_dim": 128,
        "num_heads": 8,
        "num_head_channels": -1,
        "use_linear_in_transformer": False,
        "adm_in_channels": None,
    },
    "tiny": {  # to try this script: its figures say nothing
        **COMMON,
        "model_channels": 32,
        "num_res_blocks": [1] * 2,
        "channel_mult": [1, 2],
        "transformer_depth": [1, 1],
        "transformer_depth_output": [1] * 4,
        "transformer_depth_middle": 1,
        "context_dim": 64,
        "num_heads": 2,
        "num_head_channels": -1,
        "use_linear_in_transformer": False,
        "adm_in_channels": None,
    },
}
SIZES = {"sd15": (512, 768, 1024), "sdxl": (1024,), "tiny": (128,)}
LEVELS = {
    "sd15": (1, 2, 4, 8),
    "sdxl": (2, 4),
    "tiny": (1, 2),
}  # how much smaller than the latent's sides each depth's tokens are
# Bytes in float32: of the weights, and a latent pixel's share of what a training step keeps beside attention matrices
# (seen on the CPU).
WEIGHTS = {"sd15": 3.5e9, "sdxl": 10.4e9, "tiny": 5e6}
KEPT = {"sd15": 0.35e6, "sdxl": 1.0e6, "tiny": 0.05e6}
# (self-attention blocks, heads) at each depth
BLOCKS = {"sd15": ((5, 8), (5, 8), (5, 8), (1, 8)), "sdxl": ((10, 10), (60, 20)), "tiny": ((3, 2), (4, 2))}
FACTORS = {"f2": "2", "f44": "4 4", "f42": "4 2"}
WAYS = (
    "off",
    *FACTORS,
    *(f"{key} {peer}" for key in ("f2", "f44") for peer in ("comfy-todo", "kohya", "ideal")),
    "tomesd 0.5",
)
QUICK = ("off", *FACTORS, "f2 ideal", "f44 ideal")
KERNELS = {"default": [], **{name: [f"--use-{name}-cross-attention"] for name in ("pytorch", "split", "quad")}}


def open_host(kernel: str, cpu: bool) -> str:
    """Open a real ComfyUI or the embedded host; returns which, with its attention function."""
    checkout = os.environ.get("COMFYUI_PATH")
    if checkout:
        sys.path.insert(0, str(ROOT / "tests" / "with_comfyui"))
        import open_comfyui

        open_comfyui.open_checkout(checkout, *KERNELS[kernel], cpu=cpu)
        import comfyui_version

        name = f"ComfyUI {comfyui_version.__version__}"
    else:
        from graft_nodes.headless import embedded

        embedded.install()
        name = "the embedded host"
    from comfy.ldm.modules import attention

    return f"{name} ({attention.optimized_attention.__name__})"


def build(name: str, device: torch.device, dtype: torch.dtype, compute: torch.dtype | None = None) -> Any:
    """A ModelPatcher of a UNet in this shape, random weights; `compute` is the type it computes in if in another."""
    import comfy.latent_formats
    import comfy.model_base
    import comfy.model_patcher
    import comfy.supported_models_base

    class Config(comfy.supported_models_base.BASE):
        unet_config: dict = {}  # noqa: RUF012 (ComfyUI's own form)
        unet_extra_config: dict = {}  # noqa: RUF012
        latent_format = comfy.latent_formats.SD15

    config = Config(dict(SHAPES[name]))
    config.set_inference_dtype(dtype, compute)
    model = comfy.model_base.BaseModel(config, comfy.model_base.ModelType.EPS, device=device)
    model.diffusion_model.requires_grad_(False)
    for parameter in model.diffusion_model.parameters():
        values = torch.ones(parameter.shape, device=parameter.device)  # in float32: nothing is drawn in fp8
        if parameter.ndim > 1:
            nn.init.normal_(values, std=parameter[0].numel() ** -0.5)
        parameter.copy_(values)
    model.to(device)
    return comfy.model_patcher.ModelPatcher(model, load_device=device, offload_device=device)


class Runner:
    """One model at one size: `seconds(options, train)` measures one forward or one training step of a LoRA."""

    def __init__(self, patcher: Any, name: str, size: int, device: torch.device, dtype: torch.dtype, timer: Timer):
        self.model, self.device, self.timer = patcher.model, device, timer
        self.lora: torch.optim.Optimizer | None = None
        side, shape = size // 8, SHAPES[name]
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(1, 4, side, side, generator=generator).to(device, dtype)
        self.sigma = torch.ones(1, device=device)
        self.conditions = {
            "c_crossattn": torch.randn(1, 77, shape["context_dim"], generator=generator).to(device, dtype)
        }
        if shape["adm_in_channels"]:
            self.conditions["y"] = torch.randn(1, shape["adm_in_channels"], generator=generator).to(device, dtype)

    def run(self, options: dict, train: bool) -> Tensor:
        options = {**options, "sigmas": self.sigma}
        if train:
            options["graft_training"] = {"step": 0, "total_steps": 1}
        return self.model.apply_model(self.x, self.sigma, transformer_options=options, **self.conditions)

    def seconds(self, options: dict, train: bool) -> float:
        return self.timer.seconds(functools.partial(self.work, options, train))

    def work(self, options: dict, train: bool) -> None:
        """One forward, or one training step."""
        if train:
            assert self.lora is not None
            self.run(options, True).float().square().mean().backward()
            self.lora.step()
            self.lora.zero_grad()
        else:
            with torch.inference_mode():
                self.run(options, False)


@contextlib.contextmanager
def lora(unet: nn.Module, checkpointing: bool, rank: int = 16) -> Iterator[torch.optim.Optimizer]:
    """For the block a LoRA is on every attention projection; its optimizer."""
    from graft_nodes.training.memory.checkpointing import checkpoint_blocks

    hooks, trained = [], []
    for name, module in unet.named_modules():
        if isinstance(module, nn.Linear) and (".attn1." in name or ".attn2." in name):
            down = nn.Parameter(
                torch.randn(rank, module.in_features, device=module.weight.device, dtype=module.weight.dtype) * 0.01
            )
            up = nn.Parameter(
                torch.zeros(module.out_features, rank, device=module.weight.device, dtype=module.weight.dtype)
            )

            def add(
                module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, down: Tensor = down, up: Tensor = up
            ) -> Tensor:
                return torch.addmm(output.flatten(0, 1), F.linear(inputs[0], down).flatten(0, 1), up.T).view_as(output)

            hooks.append(module.register_forward_hook(add))
            trained += [down, up]
    try:
        with checkpoint_blocks(unet) if checkpointing else contextlib.nullcontext():
            yield torch.optim.AdamW(trained, lr=1e-6)
    finally:
        for hook in hooks:
            hook.remove()


def graft(patcher: Any, factors: str) -> dict:
    """transformer_options of the model with Graft's ToDo."""
    from graft_nodes.host.token_downsampling import apply_todo
    from graft_nodes.patches.token_downsampling.tokens import ToDoSettings

    return apply_todo(patcher, ToDoSettings(depth_factors=factors))[0].model_options["transformer_options"]


def ways(patcher: Any, name: str, wanted: list[str]) -> dict[str, dict]:
    """{way: transformer_options} of the ways that are wanted; `off` is the plain model."""
    made: dict[str, Callable[[], dict]] = {"off": dict, "tomesd 0.5": lambda: todo_ways.tome(0.5, LEVELS[name])}
    peers = {"comfy-todo": todo_ways.comfy_todo, "kohya": todo_ways.kohya_todo, "ideal": todo_ways.ready_made}
    for key, factors in FACTORS.items():
        made[key] = functools.partial(graft, patcher, factors)
        for peer, way in peers.items():
            made[f"{key} {peer}"] = functools.partial(way, [float(word) for word in factors.split()], LEVELS[name])
    return {key: made[key]() for key in wanted}


# --- measuring --------------------------------------------------------------------------------------------------------


def compare(runner: Runner, options: dict[str, dict], train: bool, rounds: int) -> list[dict[str, float]]:
    """Seconds of every way, one dictionary a round; what is thinned gives the same result as the
    peers' thinning first.
    """
    check(runner, options)
    for key in options:
        if key.endswith("ideal"):
            runner.seconds(options[key], False)  # makes its context
        elif runner.device.type == "cuda":
            runner.seconds(options[key], train)
    results, keys = [], list(options)
    for number in range(rounds):
        first = (
            number * len(keys) // rounds
        )  # each round begins elsewhere: what ran before a way, and its memory, count too
        found = {key: runner.seconds(options[key], train) for key in keys[first:] + keys[:first]}
        results.append({key: found[key] for key in keys})
        print("  " + "  ".join(f"{key} {seconds:.3f}" for key, seconds in results[-1].items()), flush=True)
    return results


def check(runner: Runner, options: dict[str, dict]) -> None:
    """On grids that divide, Graft's result is the peers' to rounding; and it is not that of the plain model."""
    peers = [key for key in ("f2 kohya", "f2 comfy-todo") if key in options]
    if "off" not in options or "f2" not in options or not peers:
        return
    with torch.inference_mode():
        off, ours, peer = (runner.run(options[key], False) for key in ("off", "f2", peers[0]))
    allowed = (2e-2 if ours.dtype != torch.float32 else 1e-4) * float(off.abs().max())
    assert float((ours - peer).abs().max()) <= allowed, "ToDo differs from the peers' result"
    assert not torch.equal(ours, off), "ToDo did nothing"


def rows_of(prefix: str, results: list[dict[str, float]]) -> list[dict[str, Any]]:
    """One row a way: median seconds, and the median over rounds of how many times faster than `off` it is (None without
    `off`).
    """
    rows = []
    for key in results[0]:
        ratio = statistics.median(one["off"] / one[key] for one in results) if "off" in results[0] else None
        seconds = statistics.median(one[key] for one in results)
        rows.append({"name": f"{prefix}_{key.replace(' ', '_')}", "value": seconds, "unit": "s", "ratio": ratio})
    pairs = [(key, f"{key} {peer}") for key in FACTORS for peer in ("comfy-todo", "kohya", "ideal")] + [
        ("f2", "tomesd 0.5")
    ]
    for key, peer in pairs:
        if key in results[0] and peer in results[0]:
            ratio = statistics.median(one[key] / one[peer] for one in results)
            name = f"{prefix}_{key}_over_{peer.removeprefix(f'{key} ').replace(' ', '_')}"
            rows.append({"name": name, "value": ratio, "unit": "times its seconds", "ratio": ratio})
    return rows


def overhead(runner: Runner, patcher: Any, name: str, size: int, rounds: int) -> list[dict[str, Any]]:
    """Self-attention of the finest level through the patch, against the same attention fed with a ready-made thinned
    context.
    """
    from graft_nodes.patches.token_downsampling.tokens import target_grid, thin

    side = size // 8 // LEVELS[name][0]
    block = ("input", 4 if name == "sdxl" else 1)
    attention = patcher.model.diffusion_model.input_blocks[block[1]][1].transformer_blocks[0].attn1
    tokens = torch.randn(1, side * side, attention.to_q.in_features).to(runner.x)
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
            for number in range(2 + 20 * rounds):
                for kind, function in (
                    (("patched", patched), ("ideal", ideal)) if number % 2 else (("ideal", ideal), ("patched", patched))
                ):
                    taken = runner.timer.seconds(function)
                    if number >= 2:
                        times[kind].append(taken)
        ratio = statistics.median(one / two for one, two in zip(times["patched"], times["ideal"], strict=True))
        rows.append(
            {"name": f"overhead_vs_ideal_{name}_{size}_{key}", "value": ratio - 1, "unit": "share", "ratio": ratio}
        )
        seconds = {kind: statistics.median(values) for kind, values in times.items()}
        print(
            f"  {key}: patched {seconds['patched']:.4f} s, ideal {seconds['ideal']:.4f} s, ratio {ratio:.4f}",
            flush=True,
        )
    return rows


@contextlib.contextmanager
def timed(unet: nn.Module, runner: Runner) -> Iterator[dict[str, float]]:
    """For the block {part of the network: seconds} is added up: self-attention by depth, cross-attention, feed-forward,
    ResBlocks.
    """
    from graft_nodes.patches.token_downsampling.unet import attention_depths

    parts: dict[str, float] = defaultdict(float)
    hooks: list[Any] = []
    depths = {
        f"{kind}_blocks.{number}.": depth
        for (kind, number), depth in attention_depths(unet).items()
        if kind != "middle"
    }
    depths["middle_block."] = attention_depths(unet).get(("middle", 0), 0)

    def watch(module: nn.Module, part: str) -> None:
        starts: list[float] = []

        def before(*_: Any) -> None:
            wait(runner.device)
            starts.append(runner.timer.clock())

        def after(*_: Any) -> None:
            wait(runner.device)
            parts[part] += runner.timer.clock() - starts.pop()

        hooks.extend((module.register_forward_pre_hook(before), module.register_forward_hook(after)))

    for name, module in unet.named_modules():
        kind, leaf = type(module).__name__, name.rpartition(".")[2]
        if leaf in ("attn1", "attn2"):
            depth = next(depth for start, depth in depths.items() if name.startswith(start))
            watch(module, f"self-attention, depth {depth}" if leaf == "attn1" else "cross-attention")
        elif kind in ("FeedForward", "ResBlock"):
            watch(module, {"FeedForward": "feed-forward", "ResBlock": "ResBlocks"}[kind])
    try:
        yield parts
    finally:
        for hook in hooks:
            hook.remove()


def profile(runner: Runner, patcher: Any, name: str, size: int, rounds: int) -> tuple[list[dict[str, Any]], str]:
    """Where a forward spends its time, with and without ToDo; rows, and a table. `bound` is the time without what
    thinning may remove.
    """
    keys = ["off", "f2", "f44"]
    options = ways(patcher, name, keys)
    found: dict[str, list[dict[str, float]]] = {key: [] for key in keys}
    with timed(patcher.model.diffusion_model, runner) as parts:
        runner.seconds({}, False)
        for _ in range(rounds):
            for key in keys:
                parts.clear()
                total = runner.seconds(options[key], False)
                found[key].append({**parts, "everything else": total - sum(parts.values()), "whole": total})
    middle = {key: {part: statistics.median(one[part] for one in found[key]) for part in found[key][0]} for key in keys}
    prefix = f"profile_{size}" if name == "sd15" else f"profile_{name}_{size}"
    rows = [
        {"name": f"{prefix}_{key}: {part}", "value": seconds, "unit": "s", "ratio": seconds / middle[key]["whole"]}
        for key in keys
        for part, seconds in middle[key].items()
    ]
    whole, lines = middle["off"]["whole"], ["| part | off (s) | factor 2 (s) | factors 4 4 (s) |", "|---|---|---|---|"]
    for part in sorted(middle["off"], key=lambda part: (part == "whole", part == "everything else", part)):
        cells = [f"{middle[key][part]:.2f} ({100 * middle[key][part] / middle[key]['whole']:.0f}%)" for key in keys]
        lines.append(f"| {part} | " + " | ".join(cells) + " |")
    bounds = []
    for key, depths in (("f2", 1), ("f44", 2)):
        removable = sum(middle["off"][f"self-attention, depth {depth}"] for depth in range(1, depths + 1))
        bounds.append(whole / (whole - removable))
        rows.append({"name": f"{prefix}_{key}_bound", "value": whole - removable, "unit": "s", "ratio": bounds[-1]})
    lines.append(
        f"| times faster than off | 1 | {whole / middle['f2']['whole']:.2f} | {whole / middle['f44']['whole']:.2f} |"
    )
    lines.append(f"| were the thinned depths' self-attention free | | {bounds[0]:.2f} | {bounds[1]:.2f} |")
    return rows, f"{name}, forward, {size} px\n\n" + "\n".join(lines)


def free_bytes(device: torch.device) -> float:
    """Memory that is free for the measurement."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        import psutil
    except ImportError:
        return math.inf
    return float(psutil.virtual_memory().available)


def needed_bytes(name: str, size: int, way: str, train: bool, options: argparse.Namespace, whole: bool) -> float:
    """Memory that a way needs beside the weights; `whole`: the attention kernel keeps whole attention matrices."""
    pixels, width = (size // 8) ** 2, options.dtype.itemsize
    factors = [float(word) for word in FACTORS.get(way.split()[0], "").split()]
    matrices = []
    for depth, ((blocks, heads), level) in enumerate(zip(BLOCKS[name], LEVELS[name], strict=True)):
        tokens, factor = pixels / level**2, factors[depth] if depth < len(factors) else 1.0
        share = 0.25 if way.startswith("tomesd") and depth == 0 else 1 / factor**2
        matrices += [heads * tokens * tokens * share * width] * blocks if whole else []
    one = max(matrices, default=0)
    if not train:
        return 1.0e5 * pixels * width / 4 + 1.3 * one
    kept = KEPT[name] * pixels * width / 4
    return kept / 4 + 2 * one if options.checkpointing else kept + sum(matrices) + 0.5 * one


COLUMNS = {
    "off": "off (s)",
    "f2": "2",
    "f44": "4 4",
    "f42": "4 2",
    "f2_comfy-todo": "2, comfy-todo",
    "f44_comfy-todo": "4 4, comfy-todo",
    "f2_kohya": "2, kohya",
    "f44_kohya": "4 4, kohya",
    "tomesd_0.5": "ToMe 0.5",
    "f2_ideal": "2, ideal",
    "f44_ideal": "4 4, ideal",
}


def markdown(rows: list[dict[str, Any]], tables: list[str], where: str) -> str:
    """The tables: times faster than the plain model (seconds where that did not fit), and the profiles."""
    found = {row["name"]: row for row in rows}
    prefixes = list(
        dict.fromkeys(name.removesuffix("_f2") for name in found if name.endswith("_f2") and "overhead" not in name)
    )
    columns = [key for key in COLUMNS if any(f"{prefix}_{key}" in found for prefix in prefixes)]
    lines = (
        ["| | " + " | ".join(COLUMNS[key] for key in columns) + " |", "|---" * (len(columns) + 1) + "|"]
        if columns
        else []
    )
    for prefix in prefixes:
        cells = [_cell(key, found.get(f"{prefix}_{key}")) for key in columns]
        lines.append(f"| {prefix.replace('_', ' ')} px | " + " | ".join(cells) + " |")
    single = [row for row in rows if row["name"].startswith("overhead_vs_ideal_")]
    if single:
        parts = [
            f"{row['name'].removeprefix('overhead_vs_ideal_').replace('_', ' ')}: {100 * row['value']:+.1f}%"
            for row in single
        ]
        lines += ["", "Patch against ready-made context, one attention: " + "; ".join(parts)]
    return "\n".join([*lines, *(f"\n{table}" for table in tables), "", where])


def _cell(key: str, row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return (
        f"{row['value']:.2f}"
        if key == "off"
        else f"{row['value']:.2f} s"
        if row["ratio"] is None
        else f"{row['ratio']:.2f}x"
    )


def measure_(
    rows: list[dict[str, Any]],
    tables: list[str],
    name: str,
    options: argparse.Namespace,
    device: torch.device,
    whole: bool,
) -> Iterator[None]:
    """Adds one model's rows and tables, and yields after each part of them."""
    weights = WEIGHTS[name] * options.dtype.itemsize / 4
    if free_bytes(device) < weights:
        print(f"{name}: skipped, its weights need {weights / 1e9:.0f} GB and {free_bytes(device) / 1e9:.0f} are free")
        return
    patcher = build(name, device, options.dtype)
    for size in (size for size in SIZES[name] if size in options.sizes):
        runner = Runner(patcher, name, size, device, options.dtype, Timer(device, options.clock))
        if "profile" in options.what:
            found, table = profile(runner, patcher, name, size, options.rounds)
            print(table, flush=True)
            rows.extend(found)
            tables.append(table)
            yield
        if "overhead" in options.what:
            print(f"{name} {size} px, one attention:")
            rows.extend(overhead(runner, patcher, name, size, options.rounds))
            yield
        for what in (what for what in ("forward", "train") if what in options.what):
            free, chosen = free_bytes(device), []
            for way in options.ways:
                need = needed_bytes(name, size, way, what == "train", options, whole)
                if need <= free:
                    chosen.append(way)
                else:
                    print(
                        f"{name} {what} {size} px, {way}: skipped, it needs about {need / 1e9:.1f} GB and"
                        f" {free / 1e9:.1f} are free"
                    )
            if not chosen:
                continue
            print(f"{name} {what} {size} px:", flush=True)
            prefix = f"{what}_{size}" if name == "sd15" else f"{name}_{what}_{size}"
            unet = patcher.model.diffusion_model
            with lora(unet, options.checkpointing) if what == "train" else contextlib.nullcontext() as runner.lora:
                rows.extend(
                    rows_of(prefix, compare(runner, ways(patcher, name, chosen), what == "train", options.rounds))
                )
            yield


def write(rows: list[dict[str, Any]], tables: list[str], line: str, options: argparse.Namespace) -> str:
    """The tables as text; with what is known so far, the files that were asked for."""
    worst = [row for row in rows if row["name"].startswith("overhead_vs_ideal_")]
    every = [*rows, *([{**max(worst, key=lambda row: row["ratio"]), "name": "overhead_vs_ideal"}] if worst else [])]
    text = markdown(rows, tables, line)
    if options.json:
        options.json.write_text(json.dumps(every, indent=1) + "\n", encoding="utf-8")
    if options.markdown:
        options.markdown.write_text(text + "\n", encoding="utf-8")
    return text


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--models", default="sd15,sdxl", type=lambda text: text.split(","))
    parser.add_argument(
        "--sizes", default="128,512,768,1024", type=lambda text: [int(word) for word in text.split(",")]
    )
    parser.add_argument("--what", default="profile,overhead,forward,train", type=lambda text: text.split(","))
    parser.add_argument("--ways", default=list(WAYS), type=lambda text: text.split(","))
    parser.add_argument("--kernel", default="default", choices=KERNELS)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--clock", default="wall", choices=("wall", "cpu"))
    parser.add_argument("--rounds", default=3, type=int)
    parser.add_argument("--threads", default=2, type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.models, options.sizes, options.ways, options.rounds = ["sd15"], [512], list(QUICK), 1
    known = [*WAYS, *(f"f42 {peer}" for peer in ("comfy-todo", "kohya", "ideal"))]
    for given, allowed, name in ((options.ways, known, "ways"), (options.models, SIZES, "models")):
        if unknown := [word for word in given if word not in allowed]:
            parser.error(f"--{name}: {', '.join(unknown)} is none of {', '.join(allowed)}")
    if options.kernel != "default" and not os.environ.get("COMFYUI_PATH"):
        parser.error("--kernel is a setting of a real ComfyUI: set COMFYUI_PATH to a checkout")
    return options


def main() -> None:
    options = parsed()
    kind, options.clock = options.clock, {"wall": time.perf_counter, "cpu": time.process_time}[options.clock]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options.dtype = getattr(torch, options.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    torch.set_num_threads(options.threads)
    where = open_host(options.kernel, device.type == "cpu")
    here = f"{options.threads} threads of {os.cpu_count()} cores, {platform.machine()}"
    machine = torch.cuda.get_device_name() if device.type == "cuda" else here
    load = f", load average {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    number = str(options.dtype).removeprefix("torch.") + (", checkpointing" if options.checkpointing else "")
    line = (
        f"{where}, {machine}, {number}, torch {torch.__version__}, {kind} time, median of {options.rounds} rounds{load}"
    )
    print(line)
    rows: list[dict[str, Any]] = []
    tables: list[str] = []
    whole = "pytorch" not in where
    for name in options.models:
        for _ in measure_(rows, tables, name, options, device, whole):
            write(rows, tables, line, options)
    print(write(rows, tables, line, options))


if __name__ == "__main__":
    main()
