"""What loading Graft adds to ComfyUI's start: importing the pack beside a host that is already loaded.

python benchmarks/startup.py [--json FILE]    COMFYUI_PATH names real ComfyUIs, several as PATH does; otherwise the
embedded host is measured. Bytecode is written once before and read afterwards, as on every start but the first. The
exit status is 1 if a host's median on the clock is above 0.3 s: processor time says whether other work was to blame.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 0.3  # seconds on the clock
STARTS = 5
CHILD = """
import asyncio, os, sys, time
sys.path.insert(0, os.path.join({root!r}, "tests", "with_comfyui"))
checkout = os.environ.get("COMFYUI_PATH")
if checkout:
    import open_comfyui
    open_comfyui.open_checkout(checkout)
else:
    from graft_nodes.headless import embedded
    embedded.install()
import torch, comfy.sd, comfy.samplers, comfy_api.latest, execution, server, nodes
if checkout:
    import comfy_config.config_parser  # with ComfyUI's own extra nodes, which are loaded before any pack
clock, processor = time.perf_counter(), time.process_time()
loaded = asyncio.new_event_loop().run_until_complete(nodes.load_custom_node({root!r}))
clock, processor = time.perf_counter() - clock, time.process_time() - processor
assert loaded and "TrainStep" in nodes.NODE_CLASS_MAPPINGS, "the pack did not load"
print("SECONDS", clock, processor)
"""


class Start(NamedTuple):
    """Seconds of one start: on the clock, and of the processor."""

    clock: float
    processor: float


def measure(checkout: str) -> Start:
    """One start in a fresh process; "" is the embedded host."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    child = subprocess.run(
        [sys.executable, "-c", CHILD.format(root=str(ROOT))],
        env={**environment, "COMFYUI_PATH": checkout},
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode:
        raise SystemExit(f"{checkout or 'embedded host'}: the child failed\n{child.stderr}")
    clock, processor = next(line.split()[1:] for line in child.stdout.splitlines() if line.startswith("SECONDS"))
    return Start(float(clock), float(processor))


def rows_of(checkout: str) -> list[dict[str, object]]:
    """Starts one host, prints what it took, and returns the medians of both clocks."""
    measure(checkout)
    starts = [measure(checkout) for _ in range(STARTS)]
    name = Path(checkout).name or "embedded host"
    rows, said = list[dict[str, object]](), list[str]()
    for what, times in zip(("clock", "processor"), zip(*starts, strict=True), strict=True):
        median = statistics.median(times)
        said.append(f"{what} {median:.3f} s ({min(times):.3f} to {max(times):.3f})")
        rows.append({"name": f"startup_{name}_{what}", "value": median, "unit": "s", "ratio": None})
    print(f"{name}: {', '.join(said)}; {platform.machine()}, {os.cpu_count()} cores")
    return rows


def main() -> int:
    """Measure every host; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    file = parser.parse_args().json
    checkouts = [part for part in os.environ.get("COMFYUI_PATH", "").split(os.pathsep) if part]
    rows = [row for checkout in checkouts or [""] for row in rows_of(checkout)]
    if file:
        Path(file).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    slow = [row["name"] for row in rows if str(row["name"]).endswith("_clock") and float(str(row["value"])) > LIMIT]
    if slow:
        print(f"above {LIMIT} s: {', '.join(map(str, slow))}")
    return int(bool(slow))


if __name__ == "__main__":
    sys.exit(main())
