"""Graft as any node pack: the embedded host's pytest plugin loads it and finds nothing wrong with its nodes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from graft_nodes.nodes import NODES

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_graft_loads_and_its_nodes_are_valid(tmp_path):
    words = ["-p", "graft_nodes.comfyui_api_stubs.pytest_plugin", f"--comfy-pack={ROOT}", "-k", "not workflow"]
    command = [sys.executable, "-m", "pytest", "--rootdir", str(tmp_path), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0 and passed and int(passed[1]) == 1 + len(NODES), done.stdout + done.stderr
