"""How long the Dataset panel waits with 20,000 pictures: for the list of folders, and for the first look at one.

python benchmarks/dataset.py [--pictures 20000] [--rounds 20] [--json FILE]

It starts `python -m graft_nodes editor` in a temporary folder with that many small PNG files and captions in one folder
below `input`, and asks its routes as the panel does. Each answer is timed whole, from the request to the last byte; the
first one of each is not counted. A file comes into the folder before each list, so that it has to be counted again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "editor"))
GOAL = 0.3  # seconds for the list of folders
FOLDER = "many"


def fill(folder: Path, count: int) -> None:
    """That many pictures of 64x48 with captions."""
    import serving

    folder.mkdir(parents=True)
    content = serving.picture(64, 48)
    for number in range(count):
        (folder / f"{number:06}.png").write_bytes(content)
        (folder / f"{number:06}.txt").write_text(f"picture {number}", encoding="utf-8")


def timed(ask: Callable[[], Any], rounds: int, before: Callable[[int], Any]) -> list[float]:
    """Seconds of each round but the first, sorted; `before` is called with its number ahead of each."""
    times: list[float] = []
    for number in range(rounds + 1):
        before(number)
        start = time.perf_counter()
        ask()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])


def measure(count: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of the answers to each question."""
    import serving

    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        fill(place / "input" / FOLDER, count)
        server = serving.Server(place, "--front-end-root", str(serving.front_end(place / "front")))
        try:

            def folders() -> None:
                found = server.ask("/graft/dataset/folders").json
                assert found["folders"] == [{"name": FOLDER, "pictures": count}] and not found["cut"]

            def glance() -> None:
                found = server.ask("/graft/dataset/glance", "POST", {"folder": FOLDER}).json
                assert found["found"] == count and found["seen"] > 0

            def change(number: int) -> None:
                (place / "input" / FOLDER / f"new {number}.txt").write_bytes(b"")

            return {
                "dataset_folders": timed(folders, rounds, change),
                "dataset_glance": timed(glance, max(1, rounds // 5), lambda _: None),
            }
        finally:
            server.stop()


def main() -> None:
    """Measure, say what each takes, and check the goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    rows = []
    for name, times in measure(options.pictures, options.rounds).items():
        median = statistics.median(times)
        spread = f"{times[0]:.3f} to {times[-1]:.3f}"
        print(f"{name}, {options.pictures} pictures: {median:.3f} s ({spread}), {machine}")
        rows.append({"name": name, "value": median, "unit": "s", "ratio": None})
    rows[0]["ratio"] = GOAL / rows[0]["value"]
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if rows[0]["value"] < GOAL else 1)


if __name__ == "__main__":
    main()
