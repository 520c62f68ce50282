"""Runs the checks of the second device, and node tests on it, in a process of its own: torch never forgets a device."""

import os
import subprocess
import sys

import pytest
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

pytestmark = pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch cannot make a device in Python",
)


CHECKS = "tests/second_device/checks"


@pytest.mark.parametrize(
    "arguments",
    [
        (f"{CHECKS}/test_device.py", f"{CHECKS}/test_activations.py", f"{CHECKS}/test_layer_ring.py"),
        (f"{CHECKS}/test_synchronisations.py", "-k", "waits_once and lora"),
    ],
)
def test_checks(arguments):
    """`python dev.py second-device` runs all of them, and the node tests."""
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    environment = {**os.environ, "GRAFT_TEST_DEVICE": "second"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
