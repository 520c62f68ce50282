"""How long a dataset takes to open again when all of it is in the cache, and how many files the cache has for it.

python benchmarks/dataset_opening.py [--pictures 5000] [--rounds 3] [--json FILE]

It reads that many small pictures, each with a caption of its own, as Dataset does. In place of a model's VAE and text
encoder, functions give latents and conditionings of SD 1.5's sizes at 512x512. Each round is a process of its own that
opens the folder with an empty memory; the time is that of reading the folder, encoding and the report, without imports.
Then batches are drawn, and every latent is compared with its caption's. The cache needs 0.3 MB of disk a picture. The
seconds of work (CPU time) say what a machine takes that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

LATENT = (4, 64, 64)
CONTEXT = (1, 77, 768)
GOAL = 2.0  # seconds to open 5,000 pictures again
SETTLED = 3.0  # seconds after which the hash of a new file may be kept
BATCH, STEPS = 4, 50


def write_pictures(folder: Path, count: int) -> None:
    """Pictures of one gray each, whose first pixels tell their number."""
    folder.mkdir()
    for number in range(count):
        pixels = np.full((64, 64, 3), 128, dtype=np.uint8)
        pixels[:32, :, 0], pixels[32:, :, 0] = number % 200, number // 200
        Image.fromarray(pixels).save(folder / f"{number:05}.png")
        (folder / f"{number:05}.txt").write_text(f"picture {number}", encoding="utf-8")


def encode_pixels(pixels: Tensor) -> Tensor:
    """A latent that has the picture's number in every place."""
    low, high = (round(float(pixels[0, row, 0, 0]) * 255) for row in (0, 63))
    return torch.full((1, *LATENT), float(low + 200 * high))


def encode_captions(texts: Any) -> dict[str, Any]:
    """Conditionings that have the caption's number in every place."""
    from graft_nodes.training.data.dataset import Conditioning

    found = {}
    for text in texts:
        number = float((text.split() or ["0", "-1"])[1])
        found[text] = Conditioning(torch.full(CONTEXT, number), {"pooled_output": torch.full((1, 768), number)})
    return found


def measure(place: Path) -> dict[str, float]:
    """Seconds, and seconds of work, of opening the pictures at a place."""
    from graft_nodes.training.data import encoding, folder_report
    from graft_nodes.training.data.cache import Cache
    from graft_nodes.training.data.folder_reader import read_folder
    from graft_nodes.training.data.folder_settings import FolderSettings

    torch.set_num_threads(1)  # small copies are slower with more on a machine that works
    start, work = time.perf_counter(), time.process_time()
    cache = Cache(place / "cache")
    listing = read_folder(place / "pictures", FolderSettings(resolution=64, bucket_step=16, validation=0.1), cache)
    dataset, _ = encoding.encode(listing, encode_pixels, encode_captions, ("vae", "clip"), cache)
    folder_report.memory(dataset)
    cache.report()
    seconds, work = time.perf_counter() - start, time.process_time() - work
    check(dataset)
    files = sum(path.is_file() for path in (place / "cache").rglob("*"))
    return {"seconds": seconds, "work": work, "files": files, "encoded": cache.write_counts["latents"]}


def check(dataset: Any) -> None:
    """Raises SystemExit where a latent and its caption are not of one picture."""
    from graft_nodes.training.data.batches import make_batches

    for step in range(STEPS):
        for batch in make_batches(dataset, BATCH, 0.0, 0, step, step, "part 0"):
            for latent, conditioning in zip(batch.latents, batch.conditionings, strict=True):
                if not (latent == conditioning.context[0, 0, 0]).all():
                    raise SystemExit("a batch has the latent of one picture and the caption of another")


def measured_alone(place: str) -> dict[str, float]:
    """What `measure` gives in a process of its own."""
    child = subprocess.run([sys.executable, __file__, "--place", place], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(child.stdout)


def main() -> None:
    """Encode once, open again so many times, and check the goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if options.place:
        print(json.dumps(measure(Path(options.place))))
        return
    with tempfile.TemporaryDirectory() as place:
        write_pictures(Path(place) / "pictures", options.pictures)
        time.sleep(SETTLED)
        first = measured_alone(place)
        again = [measured_alone(place) for _ in range(options.rounds)]
    if any(one["encoded"] for one in again):
        raise SystemExit("pictures that are in the cache were encoded again")
    seconds = statistics.median(one["seconds"] for one in again)
    work = statistics.median(one["work"] for one in again)
    spread = f"{min(one['seconds'] for one in again):.2f} to {max(one['seconds'] for one in again):.2f}"
    files = again[-1]["files"] / options.pictures
    print(f"{options.pictures} pictures: encoded and written in {first['seconds']:.0f} s, {files:.2f} files a picture")
    print(f"opened again: {seconds:.2f} s ({spread}), {work:.2f} s of work")
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    rows = [
        {"name": "dataset_opened_again", "value": seconds, "unit": "s", "ratio": GOAL / seconds},
        {"name": "dataset_opened_again_work", "value": work, "unit": "s", "ratio": GOAL / work},
        {"name": "dataset_files_a_picture", "value": files, "unit": "files", "ratio": None},
    ]
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if seconds < GOAL else 1)


if __name__ == "__main__":
    main()
