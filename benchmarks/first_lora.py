"""What the template "Train your first LoRA" takes: the whole run of a new user, from the start of Python to the last
image, without the editor.

python benchmarks/first_lora.py [--json FILE]

It is `python -m graft_nodes run` on the embedded host, in an empty folder and on the CPU. The figures are the time on
the clock, the processor time, and the most memory that the process had. The exit status is 1 if it took more than
fifteen minutes or saved no LoRA.
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

TEMPLATE = Path(__file__).resolve().parents[1] / "example_workflows" / "Train your first LoRA.json"
GOAL = 15 * 60.0  # seconds on the clock
MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KB elsewhere


def main() -> int:
    """Run the template once; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    file = parser.parse_args().json
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        command = [sys.executable, "-m", "graft_nodes", "run", str(TEMPLATE), "--embedded", "--cpu"]
        subprocess.run(command, cwd=folder, check=True)
        clock = time.perf_counter() - start
        saved = list(Path(folder).glob("output/loras/*.safetensors"))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures = {
        "clock": (clock, "s"),
        "processor": (used.ru_utime + used.ru_stime, "s"),
        "memory": (used.ru_maxrss * MAXRSS_UNIT / 2**20, "MB"),
    }
    said = ", ".join(f"{name} {value:,.0f} {unit}" for name, (value, unit) in figures.items())
    print(f"first LoRA: {said}; {platform.machine()}, {os.cpu_count()} cores")
    if file:
        rows = [
            {"name": f"first_lora_{name}", "value": value, "unit": unit, "ratio": None}
            for name, (value, unit) in figures.items()
        ]
        Path(file).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if not saved:
        print("no LoRA was saved")
    return int(clock > GOAL or not saved)


if __name__ == "__main__":
    sys.exit(main())
