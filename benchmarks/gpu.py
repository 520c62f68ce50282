"""Everything that a GPU can check and measure, in one command of less than 9 minutes.

python dev.py gpu [PART …] [--device cuda] [--minutes 8.6] [--comfyui DIR] [--out build/gpu] [--tiny]

Parts: step, paged, stack, ring, flux, training, interruptions, optimizers, precision, todo, lane, ema, resume, nccl,
compile, nodes; all of them without a name, in this order, what decides most first. Each runs in a process of its own,
for its share of the time. gpu.json and gpu.md in the folder of --out say what came out; NAME.log there is what a part
printed. What a device cannot do is named with the reason, and so is what was cut because its time was over. Each row
has a bound: a case with a row beyond it, or with an error, fails and is named, the others go on, and the exit status is
1. Where sizes are tiny or the device is not a GPU, bounds on seconds and memory are shown, and fail nothing.

It runs in the Python that starts it and installs nothing. That Python needs torch, numpy, safetensors, Pillow and
PyYAML; pytest, hypothesis, psutil, peft, diffusers and ema-pytorch for some cases. ComfyUI is the checkout of
--comfyui, of COMFYUI_PATH or ~/ComfyUI, else the embedded host. `--device cpu --tiny` tries the whole command without
a GPU, `--device second --tiny` on the device of the tests, which refuses what a GPU refuses; their numbers say nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_parts.processes import FAILED, Options, PartResult, ask_about, limits, run_part
from gpu_parts.registry import PARTS, Part, by_name
from gpu_parts.report import as_json, counts, markdown

ROOT = Path(__file__).resolve().parents[1]


def main(arguments: Sequence[str]) -> int:
    """Run the parts and write what came out; returns the exit status."""
    begun = time.monotonic()
    given = parsed(arguments)
    folder = given.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    options = Options(given.device, given.tiny, checkout(given.comfyui), folder)
    facts = ask_about(options)
    if "reason" in facts:
        print(f"dev.py gpu: {facts['reason']}. `--device cpu --tiny` tries the command without a GPU.", file=sys.stderr)
        return 2
    facts = {**facts, "host": options.comfyui or "the embedded host (no ComfyUI checkout)"}
    if given.tiny:
        facts["sizes"] = "tiny, to try the command: the numbers say nothing"
    print(f"dev.py gpu: {facts['device']}, torch {facts['torch']}, {facts['python']}, {facts['host']}", flush=True)
    results: list[PartResult] = []
    total = given.minutes * 60 - (time.monotonic() - begun)
    for part, limit in zip(given.parts, limits([part.share for part in given.parts], total), strict=True):
        results.append(run_part(part, options, limit))
        say(results[-1])
        write(folder, facts, results, given.parts, time.monotonic() - begun)
    print(f"dev.py gpu: {folder / 'gpu.md'} and gpu.json")
    return int(any(result.status == FAILED for result in results))


def say(result: PartResult) -> None:
    """Print how a part ended, and each case that is not done."""
    print(f"{result.name}: {counts(result)}, {result.seconds:.0f} s", flush=True)
    for case in result.cases:
        if case.reason:
            print(f"  {case.status}: {case.name}: {case.reason}", flush=True)


def write(
    folder: Path, facts: dict[str, Any], results: Sequence[PartResult], parts: Sequence[Part], seconds: float
) -> None:
    """Write both files; after each part, so that a stop of the whole loses nothing."""
    waiting = [part.name for part in parts[len(results) :]]
    if waiting:
        facts = {**facts, "not run yet": ", ".join(waiting)}
    (folder / "gpu.json").write_text(json.dumps(as_json(facts, results, seconds), indent=1) + "\n", encoding="utf-8")
    (folder / "gpu.md").write_text(markdown(facts, results, seconds), encoding="utf-8")


def checkout(given: str) -> str:
    """The ComfyUI checkout: the one that is asked for, COMFYUI_PATH, ~/ComfyUI, or "" for the embedded host."""
    for folder in (given, os.environ.get("COMFYUI_PATH", ""), "~/ComfyUI"):
        path = Path(folder).expanduser()
        if folder and (path / "comfy" / "model_patcher.py").exists():
            return str(path.resolve())
        if folder and folder == given:
            sys.exit(f"dev.py gpu: --comfyui {given} is not a ComfyUI checkout: it has no comfy/model_patcher.py")
    return ""


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="dev.py gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(part.name for part in PARTS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=8.6)
    parser.add_argument("--comfyui", default="")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--tiny", action="store_true")
    found = parser.parse_args(arguments)
    try:
        found.parts = by_name(found.parts)
    except ValueError as error:
        parser.error(str(error))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
