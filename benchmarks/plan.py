"""What a planned training step says it takes, and what it took: the peak of PyTorch's CPU allocator.

python benchmarks/plan.py [--comfyui DIR] [--size sd15|66M] [--side 32] [--row NAME]… [--json FILE]

A UNet in Stable Diffusion's layout, batch 2, in a real ComfyUI or in the embedded host, which loads models whole and so
cannot leave layers in host memory. Each row trains two steps in a process of its own, with every allocation recorded by
PyTorch's profiler, and is planned in another. A row that is more than a tenth off is an error. On a CPU there is
nowhere to move anything, so rows with offload run on the tests' second device, which lies in the CPU's memory and
counts its own (tests/second_device/).
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROWS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "LoRA, checkpointing": {"checkpointing": True},
    "LoRA, ToDo": {"todo": True},
    "LoRA, average": {"average": "same"},
    "LoRA, bf16 model": {"bf16": True},
    "LoRA, bf16 model, checkpointing": {"bf16": True, "checkpointing": True},
    "full": {"full": True},
    "full, checkpointing, average": {"full": True, "checkpointing": True, "average": "same"},
    "full, adafactor, fused backward": {"full": True, "optimizer": "adafactor", "fused_backward": True},
    "full, bf16 model": {"full": True, "bf16": True},
    "full, full-bf16": {"full": True, "bf16": True, "precision": "full-bf16"},
    "LoRA, offload activations": {"offload": "activations"},
    "LoRA, offload layers": {"offload": "layers"},
    "LoRA, bf16 model, offload layers": {"bf16": True, "offload": "layers"},
    "LoRA, average on host": {"average": "host"},
    "full, offload optimizer, average on host": {"full": True, "offload": "optimizer", "average": "host"},
}
TOLERANCE = 0.1
BATCH, TOKENS, RANK = 2, 77, 16
CPU = torch.device("cpu")


def is_on_the_second_device(name: str) -> bool:
    """Whether a row moves something to host memory, which a CPU cannot do."""
    return "offload" in ROWS[name] or ROWS[name].get("average") == "host"


def run(name: str, size: str, side: int, device: torch.device = CPU) -> tuple[Any, Any, Any]:
    """Model, state and dataset of a row."""
    from graft_nodes.ema.decay import EMASettings
    from graft_nodes.training.data.dataset import Conditioning, Dataset
    from graft_nodes.training.optimizers.settings import OptimizerSettings
    from graft_nodes.training.state import Settings, Start, begin
    from graft_nodes.training.trainable.settings import AdapterSettings

    import training

    row = dict(ROWS[name])
    todo, average, full, half = (row.pop(key, False) for key in ("todo", "average", "full", "bf16"))
    patcher = training.unet(size, device)
    if half:
        patcher.model.diffusion_model.to(torch.bfloat16)
        patcher.model.diffusion_model.dtype = torch.bfloat16
        patcher.model.model_config.unet_config["dtype"] = torch.bfloat16
    if todo:
        from graft_nodes.host.token_downsampling import apply_todo
        from graft_nodes.patches.token_downsampling.tokens import ToDoSettings

        patcher, *_ = apply_todo(patcher, ToDoSettings())
    draws = torch.Generator().manual_seed(0)
    width = training.SHAPES[size]["context"]
    conditionings = {key: Conditioning(torch.randn(1, TOKENS, width, generator=draws)) for key in ("a", "")}
    latents = [torch.randn(4, side, side, generator=draws) for _ in range(BATCH)]
    data = Dataset.from_latents(latents, ["a"] * BATCH, conditionings)
    adapter = AdapterSettings("lora", rank=RANK, targets="all")
    if full:
        adapter = AdapterSettings("full", targets="all")
    clip_norm = 0.0 if row.get("fused_backward") else 1.0
    optimizer = OptimizerSettings(**{"precision": "float32", "batch_size": BATCH, "clip_norm": clip_norm, **row})
    ema = None
    if average:
        ema = EMASettings(device=average)
    start = Start("random", data.digest, adapter, ema)
    module = patcher.model.diffusion_model
    return patcher, begin(module, start, Settings(optimizer)), data


def planned(name: str, size: str, side: int) -> dict[str, float]:
    """The parts of a row's plan in MB."""
    from graft_nodes.host import memory_planning

    found = memory_planning.plan(*run(name, size, side), on_a_card=is_on_the_second_device(name))
    return {part: size / 1e6 for part, size in found.parts.items()}


def measured(name: str, size: str, side: int) -> float:
    """The most that a device's allocator held at once in two steps, in MB, with the model and without the saved state
    on the host.
    """
    from graft_nodes.tests.allocated import most_held, recorded

    if is_on_the_second_device(name):
        return measured_on_the_second_device(name, size, side)
    patcher, state, data = run(name, size, side)
    module = patcher.model.diffusion_model
    weights = sum(part.numel() * part.element_size() for part in (*module.parameters(), *module.buffers()))
    with recorded() as record:
        two_steps(patcher, state, data)
    return (most_held(record) + weights) / 1e6


def measured_on_the_second_device(name: str, size: str, side: int) -> float:
    """The same, of the memory that the tests' second device counts."""
    from graft_nodes.tests.second_device.comfyui import put_models_on
    from graft_nodes.tests.second_device.device import DEVICE, meter

    put_models_on(DEVICE)
    patcher, state, data = run(name, size, side)
    patcher.load_device = DEVICE
    if ROWS[name].get("offload") != "layers":
        patcher.model.to(DEVICE)
    two_steps(patcher, state, data, meter.clear)  # loading takes more than the first step of a ring of layers
    return meter.peak / 1e6


def two_steps(patcher: Any, state: Any, data: Any, between: Callable[[], None] = lambda: None) -> None:
    """Train, with something between the steps."""
    from graft_nodes import host
    from graft_nodes.training.run.step import advance_
    from graft_nodes.training.run.workspace import Workspace

    waiting = state.settings.optimizer.offload == "layers"
    with host.denoiser.open_denoiser(patcher, layers=waiting) as denoiser, torch.inference_mode(False):
        work = Workspace(state, denoiser, data)
        work.loader.until = 2
        with work.install():
            advance_(work)
            between()
            advance_(work)


def child(*arguments: Any) -> Any:
    """The result of a part in a process of its own."""
    command = [sys.executable, __file__, "--child", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", default="", metavar="DIR")
    parser.add_argument("--size", default="66M")
    parser.add_argument("--side", type=int, default=32, help="of the latents, an eighth of the pixels")
    parser.add_argument("--row", action="append", help="only this row; may be given again")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2, metavar=("PART", "ROW"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        import training

        training.open_host(arguments.comfyui, CPU)
        gc.disable()
        part, name = arguments.child
        print(json.dumps({"planned": planned, "measured": measured}[part](name, arguments.size, arguments.side)))
        return
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {arguments.size}", flush=True)
    rows, wrong = {}, []
    for name in arguments.row or ROWS:
        size = ("--comfyui", arguments.comfyui, "--size", arguments.size, "--side", arguments.side)
        parts = child("planned", name, *size)
        took, said = child("measured", name, *size), sum(parts.values())
        rows[name] = {"planned": said, "measured": took, "parts": parts}
        off = said / took - 1
        detail = ", ".join(f"{part} {mb:.0f}" for part, mb in parts.items())
        print(f"{name}: planned {said:.0f} MB, took {took:.0f} MB ({off:+.1%}); {detail}", flush=True)
        if abs(off) > TOLERANCE:
            wrong.append(name)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if wrong:
        raise SystemExit(f"more than {TOLERANCE:.0%} off: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
