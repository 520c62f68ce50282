"""How long a step waits for its batch when the dataset does not fit into memory: read by the step, and read ahead.

python benchmarks/dataset_cache.py [--clips 120] [--steps 60] [--step-seconds 0.2] [--json FILE]

The clips have latents as Wan's VAE makes them of 17 frames at 832x480 (2 MB each), and captions of their own as its
text encoder makes them (8 MB each); functions stand for both models. Nothing is kept in memory, as in a dataset far
beyond 1 GB of each. A step is a wait of `--step-seconds`, as a GPU computes it beside an idle processor. Both sides
take the same steps in turn, each from files that the system was told to forget, and every tensor is compared. It needs
10 MB of disk a clip.
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

import dataset_memory
import torch

BATCH = 2
ROUNDS = 3


def open_dataset(place: Path, captions: int) -> Any:
    """The dataset of the clips at a place, all of it on disk."""
    from graft_nodes.training.data import conditionings, encoding

    encoding.KEPT_BYTES = conditionings.KEPT_BYTES = 0
    conditionings.RECENT_BYTES = 0
    return dataset_memory.open_dataset(place, captions, 0)


def forget(folder: Path) -> None:
    """Tell the system to drop what it holds of the files of a folder."""
    for path in folder.rglob("*.safetensors"):
        with open(path, "rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def waits(dataset: Any, workers: int, steps: int, step_seconds: float) -> tuple[list[float], list[Any]]:
    """(seconds that each step but the first waits for its batches, the batches)."""
    from graft_nodes.training.run.batch_loader import BatchLoader, BatchSchedule

    loader = BatchLoader(BatchSchedule(dataset, BATCH, 1, 0.0, 0), workers, until=steps)
    seconds, taken = [], []
    for step in range(steps):
        start = time.perf_counter()
        batches = loader.take(step, 0)
        seconds.append(time.perf_counter() - start)
        taken.append([[batch.latents[:, 0, 0, 0, 0], _marks(batch)] for batch in batches])
        check(batches)
        time.sleep(step_seconds)
    loader.close()
    return seconds[1:], taken


def _marks(batch: Any) -> torch.Tensor:
    return torch.stack([one.context.flatten()[0] for one in batch.conditionings])


def check(batches: Any) -> None:
    """Raises SystemExit where a tensor is not of one clip throughout."""
    for batch in batches:
        for tensor in (*batch.latents, *(one.context for one in batch.conditionings)):
            if tensor.min() != tensor.max():
                raise SystemExit("a batch has a tensor of more than one clip")


def measure(clips: int, steps: int, step_seconds: float) -> dict[str, float]:
    """Milliseconds that a step waits, the median of all rounds: read by the step, and read ahead."""
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {"by_the_step": [], "ahead": []}
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        dataset_memory.write_clips(place / "clips", clips, clips)
        dataset = open_dataset(place, clips)
        if dataset.workers != 1:
            raise SystemExit(f"the dataset is read by {dataset.workers} threads, expected 1")
        alone = replace(dataset, workers=0)
        for _ in range(ROUNDS):
            forget(place / "cache")
            by_the_step, expected = waits(alone, alone.workers, steps, step_seconds)
            forget(place / "cache")
            ahead, taken = waits(dataset, dataset.workers, steps, step_seconds)
            if str(taken) != str(expected):
                raise SystemExit("what is read ahead is not what the step reads")
            found["by_the_step"] += by_the_step
            found["ahead"] += ahead
    return {name: 1000 * statistics.median(seconds) for name, seconds in found.items()}


def main() -> None:
    """Measure both, and say what each takes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clips", type=int, default=120)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--step-seconds", type=float, default=0.2)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    found = measure(options.clips, options.steps, options.step_seconds)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"a step of {1000 * options.step_seconds:.0f} ms waits for its batch of {BATCH} clips, {machine}:")
    print(f"read by the step {found['by_the_step']:.1f} ms, read ahead {found['ahead']:.1f} ms")
    ratio = found["by_the_step"] / found["ahead"]
    rows = [
        {"name": "dataset_wait_by_the_step", "value": found["by_the_step"], "unit": "ms", "ratio": None},
        {"name": "dataset_wait_read_ahead", "value": found["ahead"], "unit": "ms", "ratio": ratio},
    ]
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
