"""The benchmarks of README's claims run through, on a tiny shape, and write the rows that they promise."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
LORA = (
    "vs_core_1",
    "vs_core_4",
    "vs_core_8",
    "growth_1_to_8",
    "strength_change_vs_core",
    "restore_vs_copy",
    "bypass_overhead",
    "merged_overhead",
    "error_vs_core_1",
    "error_vs_core_8",
    "memory_over_touched",
)
TODO = (
    *(
        f"tiny_{what}_128_{way}"
        for what in ("forward", "train")
        for way in ("off", "f2", "f44", "f42", "f2_kohya", "f44_ideal")
    ),
    "profile_tiny_128_f2_bound",
    "overhead_vs_ideal_tiny_128_f2",
    "overhead_vs_ideal",
)


@pytest.mark.parametrize(
    ("script", "options", "promised"),
    [
        pytest.param("lora.py", ("--counts", "1,4,8", "--ranks", "4", "--no-libraries"), LORA, marks=pytest.mark.long),
        ("todo.py", ("--sizes", "128", "--threads", "1"), TODO),
    ],
)
def test_a_benchmark_writes_its_rows(tmp_path, script, options, promised):
    file = tmp_path / "rows.json"
    command = [
        sys.executable,
        str(BENCHMARKS / script),
        "--models",
        "tiny",
        *options,
        "--rounds",
        "1",
        "--json",
        str(file),
    ]
    child = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "COMFYUI_PATH": ""}, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr[-2000:]
    rows = json.loads(file.read_text(encoding="utf-8"))
    assert all(set(row) >= {"name", "value", "unit", "ratio"} and math.isfinite(row["value"]) for row in rows)
    assert set(promised) <= {row["name"] for row in rows}, child.stdout[-2000:]
