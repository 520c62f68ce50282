"""What a training step costs: TrainStep's loop beside ComfyUI's own TrainLoraNode, diffusers + PEFT in a plain loop,
and the bare loop.

python benchmarks/training.py [--comfyui DIR]… [--rounds 2] [--steps 8] [--threads 2] [--small] [--json FILE]

One work for all: a UNet with 66M parameters in Stable Diffusion's layout, frozen, in float32; latents of 32x32, batch
2, LoRA of rank 16 on every Linear and Conv2d, AdamW. Each contestant trains in a process of its own, in turn, `rounds`
times; the fastest round of each counts, so that other work on the machine falls on all alike. Memory is how much the
process's peak grew from before training. The bare loop (forward and backward of the same frozen UNet with the same
adapters and PyTorch's attention, fused AdamW, one fixed batch) runs in Graft's own process, a few steps of each in
turn. `--comfyui` names real ComfyUI checkouts to measure core's trainer in (each of its modes), the first is Graft's
host too; without one Graft runs in its embedded host and core is left out. `--small` is a UNet of 1M, to see that
everything runs. Needs diffusers and peft (extra `test`).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from device_timer import MB, peak_mb, reset_peak, wait
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
MULT, HEADS, SIDE, BATCH, RANK, PICTURES, TOKENS = (1, 2, 4), 8, 32, 2, 16, 8, 16
SHAPES: dict[str, dict[str, Any]] = {  # channels and context width; unless given, each depth has attention
    "66M": {"channels": 128, "context": 128},
    "small": {"channels": 32, "context": 32},
    "400M": {"channels": 320, "context": 768},  # for a GPU, which 66M would leave idle
    "sd15": {"channels": 320, "context": 768, "mult": (1, 2, 4, 4), "attention": (1, 1, 1, 0), "blocks": 2},
    "sdxl": {  # at 1,024 pixels
        "channels": 320,
        "context": 2048,
        "attention": (0, 2, 10),
        "blocks": 2,
        "head_channels": 64,
        "adm": 2816,
        "side": 128,
        "batch": 1,
        "tokens": 77,
    },
}
SHAPES["tiny"] = {  # SDXL's in small, to try what measures that one
    **SHAPES["sdxl"],
    "channels": 32,
    "context": 32,
    "mult": (1, 2),
    "attention": (0, 1),
    "blocks": 1,
    "head_channels": 16,
    "side": 8,
    "tokens": 4,
}
POOLED = 1280  # what SDXL's shape gets of its text beside the context
CPU = torch.device("cpu")


@functools.cache
def open_host(checkout: str, device: torch.device) -> str:
    """Open a ComfyUI checkout, or the embedded host when there is none; says which."""
    if not checkout:
        from graft_nodes.headless import embedded

        embedded.install()
        return "the embedded host"
    sys.path.insert(0, str(ROOT / "tests" / "with_comfyui"))
    import open_comfyui

    open_comfyui.open_checkout(checkout, cpu=device.type != "cuda")
    import comfyui_version

    return f"ComfyUI {comfyui_version.__version__}"


@dataclass(frozen=True)
class Sizes:
    """Of latents and conditions: a side, pictures in a batch, tokens of text, and the width of the vector beside it."""

    side: int
    batch: int
    tokens: int
    context: int
    adm: int | None

    @classmethod
    def of(cls, size: str) -> Sizes:
        """Those of a shape."""
        chosen = SHAPES[size]
        sizes = chosen.get("side", SIDE), chosen.get("batch", BATCH), chosen.get("tokens", TOKENS)
        return cls(*sizes, chosen["context"], chosen.get("adm"))


def unet(size: str, device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    """A ModelPatcher, loaded on the device, around a UNet with random weights, of the open host's own classes."""
    import comfy.latent_formats
    import comfy.model_base
    import comfy.model_patcher
    import comfy.supported_models_base

    chosen = SHAPES[size]
    mult, blocks = chosen.get("mult", MULT), chosen.get("blocks", 1)
    attention = chosen.get("attention", (1,) * len(mult))
    shape = {
        "image_size": 32,
        "in_channels": 4,
        "out_channels": 4,
        "model_channels": chosen["channels"],
        "num_res_blocks": [blocks] * len(mult),
        "channel_mult": list(mult),
        "transformer_depth": [depth for depth in attention for _ in range(blocks)],
        "transformer_depth_output": [depth for depth in attention for _ in range(blocks + 1)],
        "transformer_depth_middle": attention[-1] or 1,
        "context_dim": chosen["context"],
        "num_heads": -1 if "head_channels" in chosen else HEADS,
        "num_head_channels": chosen.get("head_channels", -1),
        "use_spatial_transformer": True,
        "use_linear_in_transformer": "head_channels" in chosen,
        "adm_in_channels": chosen.get("adm"),
        "use_temporal_attention": False,
        "legacy": False,
    }

    class Config(comfy.supported_models_base.BASE):
        unet_config: dict = {}  # noqa: RUF012 (ComfyUI's own form)
        unet_extra_config: dict = {}  # noqa: RUF012
        latent_format = comfy.latent_formats.SD15

    kind = comfy.model_base.BaseModel
    if "adm" in chosen:
        shape["num_classes"], kind = "sequential", comfy.model_base.SDXL
    config = Config(shape)
    config.unet_config = {**shape, "dtype": dtype}
    config.manual_cast_dtype = None
    model = kind(config, comfy.model_base.ModelType.EPS, device=device)
    draws = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, p in model.diffusion_model.named_parameters():
            if p.ndim > 1:
                p.copy_(torch.randn(p.shape, generator=draws, device=device) * p[0].numel() ** -0.5)
            else:
                p.fill_(1.0 if name.endswith("weight") else 0.0)
    patcher = comfy.model_patcher.ModelPatcher(model.to(device), load_device=device, offload_device=device)
    if hasattr(patcher, "cached_patcher_init"):
        patcher.cached_patcher_init = (lambda size, **_: unet(size, device, dtype), (size,))
    return patcher


def memory_before(device: torch.device) -> float:
    """The memory in MB that the peak is compared with."""
    reset_peak(device)
    return peak_mb(device)


@contextmanager
def stopwatch(into: list[float]) -> Iterator[None]:
    """Seconds of the block."""
    begun = time.perf_counter()
    yield
    into.append(time.perf_counter() - begun)


def mark(marks: list[float], device: torch.device, *_: Any) -> None:
    """After a step: note the time when the device has done it."""
    wait(device)
    marks.append(time.perf_counter())


def dataset(size: str) -> Any:
    """Random latents with one caption."""
    from graft_nodes.training.data.dataset import Conditioning, Dataset

    draws, sizes = torch.Generator().manual_seed(0), Sizes.of(size)
    extras = {}
    if sizes.adm is not None:
        extras["pooled_output"] = torch.randn(1, POOLED, generator=draws)
    context = torch.randn(1, sizes.tokens, sizes.context, generator=draws)
    conditionings = {name: Conditioning(context, extras) for name in ("a", "")}
    latents = [torch.randn(4, sizes.side, sizes.side, generator=draws) for _ in range(PICTURES)]
    return Dataset.from_latents(latents, ["a"] * PICTURES, conditionings)


def begun(module: nn.Module, data: Any, size: str, precision: str = "float32", average: Any = None, **more: Any) -> Any:
    """The state before the first step of LoRA on every Linear and Conv2d; `more` are Optimizer Settings."""
    from graft_nodes.training.optimizers.settings import OptimizerSettings
    from graft_nodes.training.state import Settings, Start, begin
    from graft_nodes.training.trainable.settings import AdapterSettings

    given = {"learning_rate": 1e-4, "batch_size": Sizes.of(size).batch, "precision": precision, **more}
    adapter = AdapterSettings("locon", rank=RANK, targets="all")
    return begin(module, Start("random", data.digest, adapter, average), Settings(OptimizerSettings(**given)))


def seconds_of_steps(state: Any, denoiser: Any, data: Any, count: int = 3) -> tuple[Any, list[float]]:
    """Train some steps; the state after them, and the seconds of all but the first."""
    from graft_nodes.training.run.loop import Callbacks, train

    marks: list[float] = []
    state = train(state, denoiser, data, count, Callbacks(functools.partial(mark, marks, denoiser.device)))
    return state, [later - earlier for earlier, later in pairwise(marks)]


class BareLoop:
    """Forward and backward of the same frozen UNet with the same adapters and PyTorch's attention, fused AdamW, one
    fixed batch, weights and products in `dtype`.
    """

    def __init__(self, module: nn.Module, state: Any, size: str, dtype: torch.dtype, device: torch.device) -> None:
        from comfy.ldm.modules.attention import attention_pytorch
        from graft_nodes.patches.models.attention_kernels import TrainingKernel
        from graft_nodes.patches.token_downsampling.attention_override import OVERRIDE

        draws, sizes = torch.Generator().manual_seed(0), Sizes.of(size)
        self.module, self.adapter, self.dtype, self.device = module, state.start.adapter, dtype, device
        self.trained = {name: tensor.to(device, copy=True).requires_grad_() for name, tensor in state.trained.items()}
        self.optimizer = torch.optim.AdamW(self.trained.values(), lr=1e-4, fused=True)
        latents = (sizes.batch, 4, sizes.side, sizes.side)
        x, self.noise = (torch.randn(latents, generator=draws).to(device) for _ in range(2))
        context = torch.randn(sizes.batch, sizes.tokens, sizes.context, generator=draws)
        self.given = {"x": x.to(dtype), "context": context.to(device, dtype)}
        if sizes.adm is not None:
            self.given["y"] = torch.randn(sizes.batch, sizes.adm, generator=draws).to(device, dtype)
        self.level = torch.full((sizes.batch,), 300.0, device=device)
        self.options = {OVERRIDE: TrainingKernel(attention_pytorch)}

    def seconds(self, count: int = 2) -> list[float]:
        """Seconds of some steps, after one that is not measured."""
        from graft_nodes.training.memory.cast_weights import cast_weights
        from graft_nodes.training.trainable import install

        spent: list[float] = []
        with contextlib.ExitStack() as stack:
            if self.dtype != torch.float32:
                stack.enter_context(cast_weights(self.module, self.dtype))
            stack.enter_context(install.attach(self.module, self.adapter, self.trained, lambda: (0, 0, "")))
            stack.enter_context(torch.enable_grad())
            for _ in range(count + 1):
                with stopwatch(spent):
                    self._step()
        return spent[1:]

    def _step(self) -> None:
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            out = self.module(timesteps=self.level, transformer_options=self.options, **self.given)
        nn.functional.mse_loss(out.float(), self.noise).backward()
        torch.nn.utils.clip_grad_norm_(self.trained.values(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        wait(self.device)


def graft(
    size: str,
    steps: int,
    checkout: str,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    precision: str = "float32",
) -> dict[str, Any]:
    """Seconds a step of TrainStep's loop and of the bare loop, in turn in one process, and the memory that the first
    few steps took; `planned` is what a plan says that a step takes, with the model.
    """
    where = open_host(checkout, device)
    from graft_nodes.host import denoiser as host
    from graft_nodes.host import memory_planning

    patcher, data = unet(size, device, dtype), dataset(size)
    module = patcher.model.diffusion_model
    before = memory_before(device)
    state = begun(module, data, size, precision)
    ours: list[float] = []
    bare: list[float] = []
    planned = memory_planning.plan(patcher, state, data).peak
    products = {"float32": torch.float32, "bf16": torch.bfloat16}[precision]
    with host.open_denoiser(patcher) as denoiser, torch.inference_mode(False):
        state, _ = seconds_of_steps(state, denoiser, data, 2)  # warm-up
        peak = peak_mb(device)
        loop = BareLoop(module, state, size, products, device)
        for turn in range(max(1, steps // 2) + 1):
            state, found = seconds_of_steps(state, denoiser, data)
            if turn:
                ours += found
            bare += loop.seconds()
    return {
        "seconds": ours,
        "bare": bare,
        "memory": peak - before,
        "peak": peak,
        "planned": planned / MB,
        "where": where,
        "parameters": sum(p.numel() for p in module.parameters()),
    }


def core(
    size: str, steps: int, checkout: str, mode: str, device: torch.device = CPU, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Seconds a step of core's TrainLoraNode: of a longer call less a call of two steps, so that what it does once is
    not counted.
    """
    where = open_host(checkout, device)
    import comfy_extras.nodes_train as nodes

    patcher, draws, sizes = unet(size, device, dtype), torch.Generator().manual_seed(0), Sizes.of(size)
    latents = {"samples": torch.randn(PICTURES, 4, sizes.side, sizes.side, generator=draws)}
    extras = {} if sizes.adm is None else {"pooled_output": torch.randn(1, POOLED, generator=draws)}
    positive = [[torch.randn(1, sizes.tokens, sizes.context, generator=draws), dict(extras)] for _ in range(PICTURES)]
    given: dict[str, Any] = {
        "batch_size": sizes.batch,
        "grad_accumulation_steps": 1,
        "learning_rate": 1e-4,
        "rank": RANK,
        "optimizer": "AdamW",
        "loss_function": "MSE",
        "seed": 0,
        "training_dtype": {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype],
        "lora_dtype": "fp32",
        "algorithm": "LoRA",
        "gradient_checkpointing": False,
        "existing_lora": "[None]",
    }

    def call(count: int) -> float:
        begun = time.perf_counter()
        if hasattr(nodes.TrainLoraNode, "execute"):
            more = {"quantized_backward": False, "checkpoint_depth": 1, "offloading": False, "bucket_mode": False}
            more["bypass_mode"] = mode == "bypass"
            names = inspect.signature(nodes.TrainLoraNode.execute).parameters
            listed = {key: [value] for key, value in {**given, **more, "steps": count}.items() if key in names}
            nodes.TrainLoraNode.execute(model=[patcher], latents=[latents], positive=[positive], **listed)
        else:
            nodes.TrainLoraNode().train(model=patcher, latents=latents, positive=positive, steps=count, **given)
        return time.perf_counter() - begun

    before = memory_before(device)
    short = call(2)
    took = peak_mb(device) - before
    short = min(short, call(2))
    return {"seconds": [max(1e-9, (call(2 + steps) - short) / steps)], "memory": took, "where": where}


def peft(size: str, steps: int, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Seconds a step of a plain loop over diffusers' UNet of the same shape with PEFT's LoRA on every Linear and
    Conv2d.
    """
    import diffusers
    import peft as library
    import torch.nn.functional as F

    chosen, sizes = SHAPES[size], Sizes.of(size)
    mult, attention = chosen.get("mult", MULT), chosen.get("attention", (1,) * len(chosen.get("mult", MULT)))
    given: dict[str, Any] = {}
    heads: Any = HEADS
    if sizes.adm is not None:
        given = {
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": sizes.adm,
            "transformer_layers_per_block": [max(1, depth) for depth in attention],
            "use_linear_projection": True,
        }
        heads = [chosen["channels"] * m // chosen["head_channels"] for m in mult]
    torch.manual_seed(0)
    with torch.device(device):
        model = diffusers.UNet2DConditionModel(
            sample_size=sizes.side,
            block_out_channels=tuple(chosen["channels"] * m for m in mult),
            layers_per_block=chosen.get("blocks", 1),
            cross_attention_dim=sizes.context,
            attention_head_dim=heads,
            down_block_types=tuple("CrossAttnDownBlock2D" if depth else "DownBlock2D" for depth in attention),
            up_block_types=tuple("CrossAttnUpBlock2D" if depth else "UpBlock2D" for depth in reversed(attention)),
            **given,
        )
    model.to(device, dtype).requires_grad_(False)
    count = sum(p.numel() for p in model.parameters())
    names = [name for name, part in model.named_modules() if isinstance(part, nn.Linear | nn.Conv2d)]
    before = memory_before(device)
    model.add_adapter(library.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=names))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    scheduler = diffusers.DDPMScheduler()
    latents = torch.randn(PICTURES, 4, sizes.side, sizes.side).to(device)
    context = torch.randn(sizes.batch, sizes.tokens, sizes.context).to(device)
    more = {}
    if sizes.adm is not None:
        ids = torch.full((sizes.batch, 6), 8.0 * sizes.side)
        more = {
            "added_cond_kwargs": {
                "text_embeds": torch.randn(sizes.batch, POOLED).to(device),
                "time_ids": ids.to(device),
            }
        }
    spent: list[float] = []
    took = 0.0
    for step in range(steps + 2):
        with stopwatch(spent):
            clean = latents[torch.randint(PICTURES, (sizes.batch,)).to(device)]
            noise, level = torch.randn_like(clean), torch.randint(1000, (sizes.batch,)).to(device)
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                out = model(scheduler.add_noise(clean, noise, level), level, context, **more).sample
            loss = F.mse_loss(out.float(), noise)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            float(loss.detach())
        took = peak_mb(device) - before if step == 1 else took
    where = f"diffusers {diffusers.__version__}, PEFT {library.__version__}"
    return {"seconds": spent[2:], "memory": took, "where": where, "parameters": count}


def child(arguments: list[str]) -> dict[str, Any]:
    """Measure one contestant in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def contestants(checkouts: list[str]) -> dict[str, list[str]]:
    """Name and arguments of everything that is measured."""
    out = {"Graft": ["graft", checkouts[0] if checkouts else ""]}
    for checkout in checkouts:
        nodes = (Path(checkout) / "comfy_extras" / "nodes_train.py").read_text(encoding="utf-8")
        modes = ("weight", "bypass") if "bypass_mode" in nodes else ("weight",)
        out |= {f"core, {mode}, {Path(checkout).name}": ["core", checkout, mode] for mode in modes}
    return {**out, "diffusers + PEFT": ["peft"]}


def rows_of(found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for the speed and one for the memory of each contestant, and the ratios that count."""
    seconds = {name: min(statistics.median(run["seconds"]) for run in runs) for name, runs in found.items()}
    memory = {name: min(run["memory"] for run in runs) for name, runs in found.items()}
    rows = []
    for name in found:
        label = f"{name} ({found[name][0]['where']})"
        rows.append(
            {"name": label, "value": 1 / seconds[name], "unit": "it/s", "ratio": seconds[name] / seconds["Graft"]}
        )
        rows.append(
            {
                "name": f"{label}, memory",
                "value": memory[name],
                "unit": "MB",
                "ratio": memory["Graft"] / max(memory[name], 1e-9),
            }
        )
    cores = [name for name in found if name.startswith("core")]
    ours = {"value": 1 / seconds["Graft"], "unit": "it/s"}
    if cores:  # against the best of core's versions and modes
        rows.append({"name": "vs_core_speed", **ours, "ratio": min(seconds[name] for name in cores) / seconds["Graft"]})
        smallest = min(memory[name] for name in cores)
        rows.append(
            {
                "name": "vs_core_memory",
                "value": memory["Graft"],
                "unit": "MB",
                "ratio": memory["Graft"] / max(smallest, 1e-9),
            }
        )
    rows.append({"name": "vs_peft_speed", **ours, "ratio": seconds["diffusers + PEFT"] / seconds["Graft"]})
    # Both loops in one process: the ratio of each run's medians, and of those the middle one.
    over = statistics.median(
        statistics.median(run["seconds"]) / statistics.median(run["bare"]) for run in found["Graft"]
    )
    rows.append({"name": "vs_bare_loop", "value": over, "unit": "times its time", "ratio": over})
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", action="append", default=[], metavar="DIR")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        size, steps, threads, kind, *rest = options.child
        torch.set_num_threads(int(threads))
        print(json.dumps({"graft": graft, "core": core, "peft": peft}[kind](size, int(steps), *rest)))
        return
    checkouts = [str(Path(folder).expanduser().resolve()) for folder in options.comfyui]
    size = "small" if options.small else "66M"
    wanted = contestants(checkouts)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in wanted}
    for _ in range(options.rounds):
        for name, (kind, *rest) in wanted.items():
            run = child([size, str(options.steps), str(options.threads), kind, *rest])
            if not all(map(math.isfinite, run["seconds"])):
                raise SystemExit(f"{name}: {run}")
            found[name].append(run)
            print(f"{name}: {1 / statistics.median(run['seconds']):.3g} it/s, +{run['memory']:.0f} MB", flush=True)
    rows = rows_of(found)
    machine = (
        f"{platform.machine()}, {os.cpu_count()} cores, {options.threads} threads, torch {torch.__version__}, {size}"
        " UNet"
    )
    print(f"\n{machine}, the best of {options.rounds} rounds\n\n| | value | Graft, in comparison |\n|---|---:|---:|")
    for row in rows:
        print(f"| {row['name']} | {row['value']:.4g} {row['unit']} | {row['ratio']:.3g}x |")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
