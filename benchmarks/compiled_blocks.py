"""What compiled blocks (compile of Optimizer Settings) gain: a LoRA training step of a transformer in Flux' layout.

COMFYUI_PATH=… python benchmarks/compiled_blocks.py [--tiny] [--rounds 5] [--threads 1] [--clock wall|cpu] [--json FILE]

The transformer is that of tread.py: 12 blocks of width 512, 1,024 image tokens and 256 text tokens, a LoRA of rank 16
on every linear layer of the blocks, float32 on a CPU and bf16 on a GPU. The first compiled step compiles and is given
by itself. Then each round measures a step as it is and a compiled one; ratios are taken within a round, and medians are
printed. The gradients of both are compared. A profile says which share of the step is matrix products and attention,
which the compiled blocks call as they are: more than 1 / share is not to be had.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from device_timer import Timer
from torch import Tensor

AS_THEY_ARE = ("mm", "addmm", "bmm", "baddbmm", "scaled_dot_product", "convolution")  # what compiling does not speed up


def _gradients(step: Any, options: dict[str, Any]) -> Tensor:
    """The gradients of a step, as one vector."""
    step.predict(options).float().square().mean().backward()
    parameters = [one for group in step.optimizer.param_groups for one in group["params"]]
    found = torch.cat([one.grad.flatten().double() for one in parameters])
    step.optimizer.zero_grad()
    return found


def share_as_it_is(step: Any, options: dict[str, Any]) -> float:
    """The share of a step's time that is spent in matrix products, attention and convolutions."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        step.run(options)
    whole = fixed = 0.0
    for operation in recorded.key_averages():
        seconds = operation.self_cpu_time_total
        whole += seconds
        name = operation.key.removeprefix("aten::").removeprefix("_")
        fixed += seconds * name.startswith(AS_THEY_ARE)
    return fixed / whole


def measured(tiny: bool, rounds: int, clock: Any) -> list[dict[str, Any]]:
    """Seconds of a step as it is and compiled, and of compiling; how far the gradients are apart."""
    import tread
    from graft_nodes.host.denoiser import open_denoiser
    from graft_nodes.training.run.compiled_blocks import BlockCompiler

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    timer, side = Timer(device, clock), 16 if tiny else 64
    patcher = tread.build_flux(device, dtype)
    conditions: dict[str, tuple[int, ...]] = {"c_crossattn": (1, 256, 256), "y": (1, 64)}
    step = tread.Step(patcher, (1, 16, side, side), conditions, dtype)
    options = patcher.model_options.get("transformer_options", {})
    network, compiler = patcher.model.diffusion_model, BlockCompiler(dynamic=False)
    found: list[dict[str, float]] = []
    with open_denoiser(patcher):  # as in training: no kernels without a backward pass
        plain = _gradients(step, options)
        with compiler.install(network):
            began = clock()
            compiled = _gradients(step, options)
            compiling = clock() - began
        for number in range(rounds + 1):
            seconds = {"eager": timer.seconds(lambda: step.run(options))}
            with compiler.install(network):
                seconds["compiled"] = timer.seconds(lambda: step.run(options))
            if number:  # the first warms up
                found.append(seconds)
                print("  " + "  ".join(f"{name} {value:.3f}" for name, value in seconds.items()), flush=True)
        share = share_as_it_is(step, options)
    rows = []
    for name in ("eager", "compiled"):
        seconds_of = statistics.median(one[name] for one in found)
        faster = statistics.median(one["eager"] / one[name] for one in found)
        rows.append({"name": f"compiled_blocks_{name}", "value": seconds_of, "unit": "s", "ratio": faster})
        print(f"{name}: {seconds_of:.3f} s, {faster:.2f} times as fast", flush=True)
    rows.append({"name": "compiled_blocks_bound", "value": share, "unit": "share", "ratio": 1 / share})
    print(f"{share:.1%} of the step are matrix products and attention: at most {1 / share:.2f} times as fast")
    apart = float((plain - compiled).norm() / plain.norm())
    rows.append({"name": "compiled_blocks_compiling", "value": compiling, "unit": "s", "ratio": None})
    rows.append({"name": "compiled_blocks_gradients", "value": apart, "unit": "relative", "ratio": None})
    print(f"{compiler.graphs} compilations in {compiling:.1f} s; gradients {apart:.1e} apart", flush=True)
    return rows


def main() -> None:
    """Measure, print, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="to try this script: its figures say nothing")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    print(f"torch {torch.__version__}, {hardware}, {arguments.threads} threads of {os.cpu_count()}", flush=True)
    import todo

    clock = time.process_time if arguments.clock == "cpu" else time.perf_counter
    print(todo.open_host("pytorch", cpu=not torch.cuda.is_available()), flush=True)
    rows = measured(arguments.tiny, arguments.rounds, clock)
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
