"""What loading Graft adds to ComfyUI's start: seconds to import the pack beside the host that is already loaded.

python benchmarks/startup.py [--json FILE]    COMFYUI_PATH names a real ComfyUI; otherwise the embedded host is
measured.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHILD = """
import asyncio, os, sys, time
sys.path.insert(0, os.path.join({root!r}, "tests", "with_comfyui"))
checkout = os.environ.get("COMFYUI_PATH")
if checkout:
    import open_comfyui
    open_comfyui.open_checkout(checkout)
else:
    from graft_nodes import comfyui_api_stubs
    comfyui_api_stubs.install()
import torch, comfy.sd, comfy.samplers, comfy_api.latest, execution, server, nodes
start = time.perf_counter()
loaded = asyncio.new_event_loop().run_until_complete(nodes.load_custom_node({root!r}))
seconds = time.perf_counter() - start
assert loaded and "TrainStep" in nodes.NODE_CLASS_MAPPINGS, "the pack did not load"
print("SECONDS", seconds)
"""


def measure() -> float:
    """Seconds that loading the pack took in one fresh process."""
    out = subprocess.run(
        [sys.executable, "-c", CHILD.format(root=str(ROOT))], check=True, capture_output=True, text=True
    ).stdout
    return float(next(line.split()[1] for line in out.splitlines() if line.startswith("SECONDS")))


def main() -> None:
    """Measure five fresh processes and print the median."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    file = parser.parse_args().json
    times = [measure() for _ in range(5)]
    host = os.environ.get("COMFYUI_PATH", "embedded host")
    spread = f"({min(times):.3f} to {max(times):.3f})"
    print(f"{Path(host).name}: {statistics.median(times):.3f} s {spread}, {platform.machine()}, {os.cpu_count()} cores")
    if file:
        rows = [{"name": "startup", "value": statistics.median(times), "unit": "s", "ratio": None}]
        Path(file).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
