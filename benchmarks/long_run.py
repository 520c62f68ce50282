"""A long run on the demo model: memory, time a step and the size of what a snapshot writes stay the same from step 100
to the end.

python benchmarks/long_run.py [--steps 3000] [--batch 2] [--json FILE]

TrainStep's own call with a store, a snapshot and a validation every 100 steps, the best state kept and an average. Rows
{name, value, unit, ratio}: the ratio is the end to step 100. Exits with 1 when memory grows by more than 2% or the
record of a snapshot with the steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from graft_nodes.headless import embedded


def tensor_bytes() -> int:
    """Bytes of all tensors that Python knows, each memory once."""
    gc.collect()
    held = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


def run(steps: int, batch: int) -> dict[str, list[float]]:
    """Columns measured at every 100th step: resident memory, tensors, seconds a step of the last hundred, and a
    state.json's bytes.
    """
    embedded.install()
    from graft_nodes import host
    from graft_nodes.demo import draw, host_model
    from graft_nodes.demo.encode_dataset import encode_dataset
    from graft_nodes.ema.decay import EMASettings
    from graft_nodes.nodes.demo import BASE
    from graft_nodes.training.optimizers.settings import OptimizerSettings
    from graft_nodes.training.run import call, out_of_memory
    from graft_nodes.training.run.loop import Callbacks
    from graft_nodes.training.state import Settings, Start, begin
    from graft_nodes.training.store.store import Store
    from graft_nodes.training.trainable.settings import AdapterSettings

    patcher, clip, vae = host_model.demo_model(str(BASE))
    data = encode_dataset(clip, vae, draw.concept(), held_out=(3, 8))
    settings = Settings(OptimizerSettings(learning_rate=1e-4, batch_size=batch, total_steps=steps))
    start = Start("demo", data.digest, AdapterSettings(rank=4), EMASettings("ramp"))
    columns: dict[str, list[float]] = {"memory": [], "tensors": [], "step": [], "record": []}
    spent: list[float] = []

    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder, "long")
        save = store.save_partial

        def saving(state: Any, target: str) -> Path:
            made = save(state, target)
            columns["record"].append((made / "state.json").stat().st_size)
            return made

        store.save_partial = saving  # type: ignore[method-assign]

        def stepped(step: int, moved: Any, validation: float | None) -> None:
            spent.append(moved.seconds)
            if step % 100 == 0:
                columns["memory"].append(out_of_memory.used_memory(torch.device("cpu")))
                columns["tensors"].append(tensor_bytes())
                columns["step"].append(statistics.median(spent[-100:]))
                print(
                    f"step {step}: {columns['memory'][-1] / 1e6:.1f} MB, {1000 * columns['step'][-1]:.1f} ms a step",
                    flush=True,
                )

        begun = time.perf_counter()
        state = begin(patcher.model.diffusion_model, start, settings, "long")
        callbacks = Callbacks(stepped, validate_every=100, snapshot_every=100)
        call.run(state, steps, lambda: host.denoiser.open_denoiser(patcher), data, store, callbacks, "best")
        print(f"{time.perf_counter() - begun:.0f} s in all")
    return columns


def main() -> int:
    """Run, print, and say whether it stayed flat."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    columns = run(options.steps, options.batch)
    units = {"memory": "bytes", "tensors": "bytes", "step": "s", "record": "bytes"}
    rows = [
        {"name": f"long_{name}", "value": of[-1], "unit": units[name], "ratio": of[-1] / of[0]}
        for name, of in columns.items()
    ]
    for row in rows:
        print(f"{row['name']}: {row['value']:.4g} {row['unit']}, {row['ratio']:.3f} of that at step 100")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    # A record holds the last steps, up to 1,000, and the names of the blocks before: compare where both hold as many.
    records = columns["record"]
    grown = [late - early for early, late in zip(records, records[10:], strict=False)]
    names = 500  # bytes of a name of a block, and of numbers that are written longer or shorter
    flat = (
        columns["memory"][-1] <= 1.02 * columns["memory"][0] and columns["tensors"][-1] <= 1.02 * columns["tensors"][0]
    )
    return 0 if flat and all(more <= 2 * names for more in grown) else 1


if __name__ == "__main__":
    sys.exit(main())
