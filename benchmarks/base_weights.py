"""What quantized base weights (Adapter Settings) gain and cost: a LoRA training step of a transformer in
Flux' layout, and the held-out loss of the demo's concept.

COMFYUI_PATH=… python benchmarks/base_weights.py [--what step|loss|kept] [--tiny] [--rounds 5] [--threads 1]
                                                 [--clock wall|cpu] [--steps 250] [--seeds 3] [--json FILE]

The transformer is that of tread.py: 12 blocks of width 512, 1,024 image tokens and 256 text tokens, a LoRA of rank 16
on every linear layer of the blocks. Each round measures float32, bf16 and every format once, one after the other, after
one round that does not count; ratios are taken within a round, and medians are printed. Beside quantized weights
everything else is float32. The loss is that of pictures of the concept that no run has seen, with the weights as
loaded, after training with them and with each format, the same seeds for all; it runs on the embedded host.

`kept` compares quantizing on a CPU with reading what was written before, on 12 bf16 weights of 3,072 by 12,288 (3 of
768 by 3,072 with --tiny). What is read is checked to be the same. It needs no host, and 1 GB of free disk.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from device_timer import Timer
from torch import Tensor


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def step_rows(tiny: bool, rounds: int, clock: Any) -> list[dict[str, Any]]:
    """Seconds of a training step, bytes of the weights and seconds to quantize them."""
    import tread
    from graft_nodes.host.denoiser import open_denoiser
    from graft_nodes.training.memory.quantized_base.base import chosen_layers, quantize_base
    from graft_nodes.training.memory.quantized_base.registry import FORMATS

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    timer, side = Timer(device, clock), 16 if tiny else 64
    conditions: dict[str, tuple[int, ...]] = {"c_crossattn": (1, 256, 256), "y": (1, 64)}
    patchers = {name: tread.build_flux(device, dtype) for name, dtype in DTYPES.items()}
    steps = {
        name: tread.Step(patcher, (1, 16, side, side), conditions, DTYPES[name]) for name, patcher in patchers.items()
    }
    options = {name: one.model_options.get("transformer_options", {}) for name, one in patchers.items()}
    network = patchers["float32"].model.diffusion_model
    loaded, own = _bytes(network.parameters()), _bytes([layer.weight for layer in chosen_layers(network).values()])
    count = own // 4
    found: list[dict[str, float]] = []
    sizes: dict[str, int] = {}
    seconds_to_quantize: dict[str, float] = {}
    with open_denoiser(patchers["float32"]):  # as in training: no kernels without a backward pass
        for number in range(rounds + 1):
            seconds = {name: timer.seconds(lambda name=name: steps[name].run(options[name])) for name in DTYPES}
            for weight_format in FORMATS:
                name, began = weight_format.name, clock()
                with quantize_base(network, weight_format, device):
                    seconds_to_quantize[name] = clock() - began
                    sizes[name] = (
                        loaded - own + _bytes(buffer for key, buffer in network.named_buffers() if "quantized_" in key)
                    )
                    seconds[name] = timer.seconds(lambda: steps["float32"].run(options["float32"]))
            if number:  # the first warms up
                found.append(seconds)
                print("  " + "  ".join(f"{name} {value:.3f}" for name, value in seconds.items()), flush=True)
    rows = []
    for name in found[0]:
        seconds_of = statistics.median(one[name] for one in found)
        ratio = statistics.median(one[name] / one["float32"] for one in found)
        rows.append({"name": f"base_weights_step_{name}", "value": seconds_of, "unit": "s", "ratio": ratio})
        print(f"step in {name}: {seconds_of:.3f} s, {ratio:.2f} of float32's", flush=True)
    for name, size in sizes.items():
        seconds_each = seconds_to_quantize[name] / count * 1e9
        rows.append({"name": f"base_weights_{name}", "value": size, "unit": "bytes", "ratio": size / loaded})
        rows.append({"name": f"base_weights_quantize_{name}", "value": seconds_each, "unit": "s/1e9", "ratio": None})
        print(
            f"{name}: weights {size / 2**20:.1f} MB of {loaded / 2**20:.1f} MB, {size / loaded:.3f}; a billion numbers"
            f" quantized in {seconds_each:.2f} s"
        )
    return rows


def kept_rows(tiny: bool, rounds: int, clock: Any) -> list[dict[str, Any]]:
    """Seconds for a billion numbers to be quantized, to be hashed, quantized and written, and to be hashed and read."""
    from graft_nodes.training.memory.quantized_base.base import quantize_base
    from graft_nodes.training.memory.quantized_base.kept_weights import KeptWeights
    from graft_nodes.training.memory.quantized_base.registry import FORMATS
    from torch import nn

    width, count = (768, 3) if tiny else (3072, 12)
    layers = [nn.Linear(width, 4 * width, dtype=torch.bfloat16) for _ in range(count)]
    network = nn.Sequential(*layers).requires_grad_(False)
    billions = count * 4 * width * width / 1e9

    def tried(weight_format: Any, folder: Path | None) -> tuple[float, list[Tensor]]:
        began = clock()
        kept = KeptWeights(folder) if folder is not None else None
        with quantize_base(network, weight_format, torch.device("cpu"), False, kept):
            seconds = clock() - began
            return seconds / billions, list(network.buffers())

    rows = []
    for weight_format in FORMATS:
        # every format is tried, those too that are not kept
        timed = type(weight_format.__name__, (weight_format,), {"is_kept": True})
        found: dict[str, list[float]] = {"quantized": [], "written": [], "read": []}
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                made = {}
                for way, place in (("quantized", None), ("written", Path(folder)), ("read", Path(folder))):
                    seconds, made[way] = tried(timed, place)
                    found[way].append(seconds)
                pairs = zip(made["quantized"], made["read"], strict=True)
                assert all(torch.equal(*pair) for pair in pairs), "what is read is another"
        quantizing = statistics.median(found["quantized"])
        for way, seconds_of in found.items():
            value = statistics.median(seconds_of)
            name = f"base_weights_{way}_{weight_format.name}"
            rows.append({"name": name, "value": value, "unit": "s/1e9", "ratio": value / quantizing})
            print(f"{weight_format.name}, {way}: {value:.2f} s a billion numbers", flush=True)
    return rows


DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


def _loss(demo: tuple[Any, Any, Any], base_weights: str, steps: int, seed: int, unseen: Any) -> float:
    """The held-out loss of a LoRA of the demo's concept."""
    import concept
    from graft_nodes import host
    from graft_nodes.training.averages.held_out_loss import held_out_loss
    from graft_nodes.training.run.loop import train

    model, clip, vae = demo
    begun, pictures = concept.begun(model, clip, vae, steps, seed)
    adapter = replace(begun.start.adapter, base_weights=base_weights)
    begun = replace(begun, start=replace(begun.start, adapter=adapter))
    with host.denoiser.open_denoiser(model) as denoiser:
        state = train(begun, denoiser, pictures, steps)
        found = held_out_loss(state, denoiser, unseen)
    assert found is not None
    return found


def loss_rows(steps: int, seeds: int) -> list[dict[str, Any]]:
    """Held-out losses with the weights as loaded and in every format."""
    from graft_nodes.demo import draw, host_model, score
    from graft_nodes.demo.encode_dataset import encode_dataset
    from graft_nodes.training.trainable.settings import AS_LOADED, BASE_WEIGHTS

    demo = host_model.demo_model(str(score.BASE))
    unseen = encode_dataset(demo[1], demo[2], draw.concept(seed=1))
    unseen = replace(unseen, held_out=unseen.images)
    rows = []
    for seed in range(seeds):
        losses = {kind: _loss(demo, kind, steps, seed, unseen) for kind in BASE_WEIGHTS}
        for kind, loss in losses.items():
            ratio = loss / losses[AS_LOADED]
            rows.append({"name": f"base_weights_loss_{kind}_{seed}", "value": loss, "unit": "loss", "ratio": ratio})
            print(f"seed {seed}, {kind}: {loss:.5f}, {ratio - 1:+.2%}", flush=True)
    return rows


def main() -> None:
    """Measure, print, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=("step", "loss", "kept"), default="step", help="one host in a process")
    parser.add_argument("--tiny", action="store_true", help="to try this script: its figures say nothing")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    print(f"torch {torch.__version__}, {hardware}, {arguments.threads} threads of {os.cpu_count()}", flush=True)
    if arguments.what == "step":
        import todo

        clock = time.process_time if arguments.clock == "cpu" else time.perf_counter
        print(todo.open_host("pytorch", cpu=not torch.cuda.is_available()), flush=True)
        rows = step_rows(arguments.tiny, arguments.rounds, clock)
    elif arguments.what == "kept":
        rows = kept_rows(arguments.tiny, arguments.rounds, time.perf_counter)
    else:
        from graft_nodes.headless import embedded

        embedded.install()
        rows = loss_rows(arguments.steps, arguments.seeds)
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
