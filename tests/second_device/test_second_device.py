"""Runs the checks of the second device, and node tests on it, in a process of its own: torch never forgets a device."""

import os
import subprocess
import sys
from pathlib import Path

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
        (
            f"{CHECKS}/test_device.py",
            f"{CHECKS}/test_host_memory.py",
            f"{CHECKS}/test_activations.py",
            f"{CHECKS}/test_layer_ring.py",
        ),
        (f"{CHECKS}/test_synchronizations.py", "-k", "waits_once and lora"),
    ],
)
def test_checks(arguments):
    """`python dev.py second-device` runs all of them, and the node tests."""
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    environment = {**os.environ, "GRAFT_TEST_DEVICE": "second"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_dynamic_vram():
    """Training on models that ComfyUI pages; `python dev.py second-device` runs the node tests that way too."""
    folders = os.environ.get("COMFYUI_PATH", os.path.expanduser("~/ComfyUI")).split(os.pathsep)
    found = [folder for folder in folders if _has_dynamic_vram(Path(folder).expanduser())]
    if not found:
        pytest.skip("no ComfyUI with dynamic VRAM found; set COMFYUI_PATH to a checkout of 0.33 or later")
    command = [sys.executable, "-m", "pytest", "-q", "tests/second_device/dynamic"]
    chosen = {"GRAFT_TEST_DEVICE": "second", "GRAFT_TEST_DYNAMIC": "1", "GRAFT_TEST_COMFYUI": found[0]}
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **chosen}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def _has_dynamic_vram(folder: Path) -> bool:
    patcher = folder / "comfy" / "model_patcher.py"
    return patcher.is_file() and "ModelPatcherDynamic" in patcher.read_text(encoding="utf-8")
