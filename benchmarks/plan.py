"""What a planned training step says it takes, and what it took: the peak of PyTorch's CPU allocator.

python benchmarks/plan.py [--size 66M] [--side 32] [--json FILE]

A UNet in Stable Diffusion's layout, batch 2, in the embedded host. Each row trains two steps in a process of its own,
with every allocation recorded by PyTorch's profiler, and is planned in another. A row that is more than a tenth off is
an error. Offload is left out: on a CPU there is nowhere to move anything.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROWS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "LoRA, checkpointing": {"checkpointing": True},
    "LoRA, ToDo": {"todo": True},
    "LoRA, average": {"average": True},
    "LoRA, bf16 model": {"bf16": True},
    "LoRA, bf16 model, checkpointing": {"bf16": True, "checkpointing": True},
    "full": {"full": True},
    "full, checkpointing, average": {"full": True, "checkpointing": True, "average": True},
    "full, adafactor, fused backward": {"full": True, "optimizer": "adafactor", "fused_backward": True},
    "full, bf16 model": {"full": True, "bf16": True},
    "full, full-bf16": {"full": True, "bf16": True, "precision": "full-bf16"},
}
TOLERANCE = 0.1
BATCH, TOKENS, RANK = 2, 77, 16
CPU = torch.device("cpu")


def run(name: str, size: str, side: int) -> tuple[Any, Any, Any]:
    """Model, state and dataset of a row."""
    from graft_nodes.ema.decay import EMASettings
    from graft_nodes.training.data.dataset import Conditioning, Dataset
    from graft_nodes.training.optimizers.settings import OptimizerSettings
    from graft_nodes.training.state import Settings, Start, begin
    from graft_nodes.training.trainable.settings import AdapterSettings

    import training

    row = dict(ROWS[name])
    todo, average, full, half = (row.pop(key, False) for key in ("todo", "average", "full", "bf16"))
    patcher = training.unet(size, CPU)
    if half:
        patcher.model.diffusion_model.to(torch.bfloat16)
        patcher.model.diffusion_model.dtype = torch.bfloat16
        patcher.model.model_config.unet_config["dtype"] = torch.bfloat16
    if todo:
        from graft_nodes.host.token_downsampling import apply_todo
        from graft_nodes.patches.token_downsampling.tokens import ToDoSettings

        patcher, *_ = apply_todo(patcher, ToDoSettings.parse())
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
    start = Start("random", data.digest, adapter, EMASettings() if average else None)
    module = patcher.model.diffusion_model
    return patcher, begin(module, start, Settings(optimizer)), data


def planned(name: str, size: str, side: int) -> dict[str, float]:
    """The parts of a row's plan in MB."""
    from graft_nodes.host import planning

    found = planning.plan(*run(name, size, side))
    return {part: size / 1e6 for part, size in found.parts.items()}


def measured(name: str, size: str, side: int) -> float:
    """The most that PyTorch's allocator held at once in two steps, in MB, with the model and without the saved state on
    the host.
    """
    from graft_nodes import host
    from graft_nodes.training.run.step import advance_
    from graft_nodes.training.run.workspace import Workspace

    patcher, state, data = run(name, size, side)
    module = patcher.model.diffusion_model
    weights = sum(part.numel() * part.element_size() for part in (*module.parameters(), *module.buffers()))
    recorded = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with recorded as record, host.denoiser.denoiser(patcher) as denoiser, torch.inference_mode(False):
        work = Workspace(state, denoiser, data)
        work.loader.until = 2
        with work.installed():
            advance_(work)
            advance_(work)
    return (peak(record) + weights) / 1e6


def peak(record: Any) -> int:
    """The largest sum of the allocations so far."""
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def child(*arguments: Any) -> Any:
    """The result of a part in a process of its own."""
    command = [sys.executable, __file__, "--child", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="66M")
    parser.add_argument("--side", type=int, default=32, help="of the latents, an eighth of the pixels")
    parser.add_argument("--row", action="append", help="only this row; may be given again")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2, metavar=("PART", "ROW"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        import training

        training.open_host("", CPU)
        gc.disable()
        part, name = arguments.child
        print(json.dumps({"planned": planned, "measured": measured}[part](name, arguments.size, arguments.side)))
        return
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {arguments.size}", flush=True)
    rows, wrong = {}, []
    for name in arguments.row or ROWS:
        size = ("--size", arguments.size, "--side", arguments.side)
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
