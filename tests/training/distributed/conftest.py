"""Runs scenarios of ranks.py, each in a process of its own and once for all tests that look at it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


@pytest.fixture(scope="session")
def found(tmp_path_factory):
    """What a scenario says: found(name)."""
    known = {}

    def ask(scenario):
        if scenario not in known:
            command = [sys.executable, str(HERE / "ranks.py"), str(tmp_path_factory.mktemp(scenario)), scenario]
            done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=ENVIRONMENT)
            assert done.returncode == 0, done.stderr
            known[scenario] = json.loads(done.stdout.splitlines()[-1])
        return known[scenario]

    return ask
