"""How much memory a dataset of clips takes: while it is encoded, opened again from the cache, and trained on.

python benchmarks/dataset_memory.py [--clips 500,5000] [--captions 250] [--steps 400] [--samples] [--json FILE]

Each row is a process of its own. It reads that many small clips as Dataset does, with as many different captions as
`--captions` says. In place of a model's VAE and text encoder, functions give latents as Wan's VAE does for
17 frames at 832x480 (2 MB a clip), and conditionings as its text encoder does (8 MB a caption). Then it draws the
batches of the steps. What counts is the largest growth of the memory that is not a file's (RssAnon, Linux), which is
sampled all the time. The latents that were drawn are compared with those that the clips have. Each clip needs 2.1 MB of
disk, and each caption 8.4 MB. `--samples` makes as many samples of the graph instead, one after the other: what the
graph itself holds does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

LATENT = (16, 5, 60, 104)
CONTEXT = (1, 512, 4096)
BATCH = 2


class Watch(threading.Thread):
    """Samples the memory of this process that is not a file's, until it is stopped; `most` is in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.stopped = threading.Event()
        self.begin = self.most = anonymous_bytes()

    def run(self) -> None:
        while not self.stopped.wait(0.02):
            self.most = max(self.most, anonymous_bytes())

    def growth(self) -> int:
        """The largest growth until now."""
        self.most = max(self.most, anonymous_bytes())
        return self.most - self.begin


def anonymous_bytes() -> int:
    """RssAnon of this process."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this system does not say how much memory is anonymous: run it on Linux")


def write_clips(folder: Path, count: int, captions: int) -> None:
    """Clips of 5 frames, each of one gray that tells its number."""
    folder.mkdir()
    for number in range(count):
        frames = [Image.fromarray(np.full((32, 48, 3), shade, dtype=np.uint8)) for shade in shades(number)]
        frames[0].save(
            folder / f"{number:05}.webp", save_all=True, append_images=frames[1:], duration=125, lossless=True
        )
        (folder / f"{number:05}.txt").write_text(f"caption {number % captions}", encoding="utf-8")


def shades(number: int) -> list[int]:
    """The grays of a clip's frames: its number in base 200, and the place of the frame."""
    return [number % 200, number // 200, 10, 20, 30]


def encode_clip(frames: Tensor) -> Tensor:
    """A latent that has the clip's number in every place."""
    low, high = (round(float(frame.mean()) * 255) for frame in frames[:2])
    return torch.full((1, *LATENT), float(low + 200 * high))


def encode_captions(texts: Any) -> dict[str, Any]:
    """Conditionings of a text encoder's size."""
    from graft_nodes.training.data.dataset import Conditioning

    found = {}
    for text in texts:
        number = int((text.split() or ["0", "-1"])[1])
        found[text] = Conditioning(torch.full(CONTEXT, float(number)))
    return found


def open_dataset(place: Path, captions: int, samples: int) -> Any:
    """The dataset of the clips at a place, or of that many samples."""
    from graft_nodes.training.data import encoding
    from graft_nodes.training.data.cache import Cache
    from graft_nodes.training.data.folder_reader import read_folder
    from graft_nodes.training.data.folder_settings import FolderSettings, SampleSettings
    from graft_nodes.training.data.sample_store import SampleStore
    from graft_nodes.training.data.samples import make_dataset

    cache = Cache(place / "cache", 200)
    if samples:
        settings = SampleSettings(validation=0.0)
        return make_dataset(made_samples(samples, captions), settings, store=SampleStore(cache))
    settings = FolderSettings(resolution=64, bucket_step=16, validation=0.0, frames="5", frame_step=4)
    listing = read_folder(place / "clips", settings)
    return encoding.encode(listing, encode_clip, encode_captions, ("vae", "clip"), cache)[0]


def made_samples(count: int, captions: int) -> Iterator[Any]:
    """Samples with the latents and conditionings of the clips."""
    from graft_nodes.training.data.dataset import Conditioning
    from graft_nodes.training.data.samples import Sample

    for number in range(count):
        conditioning = Conditioning(torch.full(CONTEXT, float(number % captions)))
        yield Sample(torch.full(LATENT, float(number)), conditioning, f"caption {number % captions}")


def measure(place: Path, captions: int, steps: int, samples: int) -> dict[str, float]:
    """Bytes and seconds of opening the dataset at a place, and of drawing the batches of the steps."""
    from graft_nodes.training.data.batches import make_batches

    watch = Watch()
    watch.start()
    start = time.perf_counter()
    dataset = open_dataset(place, captions, samples)
    seconds = time.perf_counter() - start
    for step in range(steps):
        for batch in make_batches(dataset, BATCH, 0.0, 0, step, step, "part 0"):
            check(batch, captions)
    return {"bytes": watch.growth(), "seconds": seconds}


def check(batch: Any, captions: int) -> None:
    """Raises SystemExit where a latent and its caption are not of one clip."""
    for latent, conditioning in zip(batch.latents, batch.conditionings, strict=True):
        number = int(latent.flatten()[0])
        if not (latent == number).all() or conditioning.context[0, 0, 0] != number % captions:
            raise SystemExit("a batch has the latent of one clip and the caption of another")


def main() -> None:
    """Measure each number of clips: encoded, then opened again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clips", default="500,5000")
    parser.add_argument("--captions", type=int, default=250)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--samples", action="store_true")
    parser.add_argument("--count", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if options.place:
        print(json.dumps(measure(Path(options.place), options.captions, options.steps, options.count)))
        return
    rows = []
    what = "samples" if options.samples else "clips"
    for count in options.clips.split(","):
        with tempfile.TemporaryDirectory() as place:
            if not options.samples:
                write_clips(Path(place) / "clips", int(count), options.captions)
            for name in ("encoded", "opened again"):
                found = measured_alone(place, options, int(count))
                size = found["bytes"] / 2**20
                print(f"{count} {what}, {name}: {size:,.0f} MB more memory, {found['seconds']:.0f} s to the first step")
                row = {"name": f"{count}_{what}_{name.replace(' ', '_')}", "value": size, "unit": "MB", "ratio": None}
                rows.append(row)
    print(f"{platform.machine()}, {os.cpu_count()} cores")
    for few, many in zip(rows, rows[2:], strict=False):
        many["ratio"] = many["value"] / few["value"]
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def measured_alone(place: str, options: argparse.Namespace, count: int) -> dict[str, float]:
    """What `measure` gives in a process of its own."""
    words = ["--place", place, "--captions", str(options.captions), "--steps", str(options.steps)]
    if options.samples:
        words += ["--count", str(count)]
    child = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(child.stdout)


if __name__ == "__main__":
    main()
