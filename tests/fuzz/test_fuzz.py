"""500 cases of every target of the fuzzing, of one seed; `python dev.py fuzz` has a night's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TARGETS = ("loras", "states", "widgets", "api", "editor", "datasets", "configs", "arguments", "routes")
CASES = 500

if "GRAFT_TEST_COMFYUI" in os.environ:
    pytest.skip("fuzzes what Graft reads on its own host", allow_module_level=True)
pytest.importorskip("aiohttp")


@pytest.fixture(scope="module")
def reports():
    """What one process found, target by target."""
    command = [sys.executable, "-m", "graft_nodes.tests.fuzz", *TARGETS, "--cases", str(CASES), "--seed", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert done.stdout.strip(), done.stderr[-3000:]
    return {report["target"]: report for report in json.loads(done.stdout.splitlines()[-1])}


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
def test_nothing_but_use_and_refusals(reports, target):
    report = reports[target]
    assert not report["failures"], "\n\n".join(report["failures"])
    assert report["ran"] == CASES == report["used"] + report["refused"]
    assert report["used"] >= 10 and report["refused"] >= 50, "the cases do not reach far enough"
