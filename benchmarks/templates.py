"""How long each template that runs on the demo model takes: seconds by the clock and of the processor, a fresh process
and empty folders for each.

python benchmarks/templates.py [TITLE …] [--threads 2] [--json FILE] [--markdown]

Each run is `python -m graft_nodes run FILE --cpu` as a user starts it, with the host's start and everything that the
template draws in it. COMFYUI_PATH names a real ComfyUI; otherwise the embedded host is measured. The goal is less than
three minutes by the clock on two cores that do nothing else. Where other work runs beside it the clock says little;
processor seconds, of all threads together, are then the figure to go by: with two threads the clock needs at least half
of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TEMPLATES = ROOT / "example_workflows"
GOAL = 180.0  # seconds


def titles() -> list[str]:
    """The templates that run on the demo model: those with its node, alone or inside a subgraph."""
    found = []
    for path in sorted(TEMPLATES.glob("*.json")):
        if '"GraftDemo"' in path.read_text(encoding="utf-8"):
            found.append(path.stem)
    return found


def measure(title: str, threads: int) -> dict[str, Any]:
    """The row of one template."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for name in ("input", "output"):
            (place / name).mkdir()
        command = [sys.executable, "-m", "graft_nodes", "run", str(TEMPLATES / f"{title}.json"), "--cpu"]
        command += ["--input", str(place / "input"), "--output", str(place / "output")]
        if not os.environ.get("COMFYUI_PATH"):
            command.append("--embedded")
        before, start = _processor(), time.perf_counter()
        ran = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
        wall, processor = time.perf_counter() - start, _processor() - before
        pictures = len(list((place / "output").rglob("*.png")))
    if ran.returncode:
        raise SystemExit(f"{title} failed:\n{(ran.stdout + ran.stderr)[-4000:]}")
    return {
        "name": title,
        "value": wall,
        "unit": "s",
        "ratio": GOAL / wall,
        "processor": processor,
        "pictures": pictures,
        "host": os.environ.get("COMFYUI_PATH") or "embedded host",
        "threads": threads,
    }


def _processor() -> float:
    """Processor seconds of the processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Measure the named templates, or all, and print a line or a row of a table for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("titles", nargs="*")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", action="store_true", help="print rows of docs/benchmarks.md's table")
    options = parser.parse_args()
    known = titles()
    unknown = [title for title in options.titles if title not in known]
    if unknown:
        raise SystemExit(f"no template on the demo model: {', '.join(unknown)}; there are {', '.join(known)}")
    host = Path(os.environ.get("COMFYUI_PATH") or "embedded host").name
    print(f"{host}, {options.threads} threads, {platform.machine()}, {os.cpu_count()} cores", flush=True)
    rows = []
    for title in options.titles or known:
        row = measure(title, options.threads)
        rows.append(row)
        wall, processor = row["value"], row["processor"]
        if options.markdown:
            print(f"| {title} | {wall:.0f} s | {processor:.0f} s |", flush=True)
        else:
            print(f"{title}: {wall:.1f} s by the clock, {processor:.1f} s of the processor", flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
