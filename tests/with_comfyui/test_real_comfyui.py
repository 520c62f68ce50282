"""Runs the node tests and the checks against a real ComfyUI, in a process of its own, when one is there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from graft_nodes.dev import ONE_THREAD, cores, parallel

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# The embedded host's tests that hold for a real ComfyUI too.
SHARED = (
    "execution",
    "expansion",
    "caching",
    "growing_inputs",
    "schema",
    "comfy_api",
    "folder_paths",
    "nodes",
    "unet",
    "model_patcher",
    "sampling",
    "lora",
    "loading",
)
HOW = (
    "set COMFYUI_PATH to a ComfyUI checkout whose requirements are installed, and run: python -m pytest"
    " tests/with_comfyui"
)


def checkout() -> str | None:
    """The checkout that COMFYUI_PATH or ~/ComfyUI names; a COMFYUI_PATH that is none is an error, not a
    reason to skip.
    """
    named = os.environ.get("COMFYUI_PATH")
    path = os.path.expanduser(named or "~/ComfyUI")
    if os.path.isfile(os.path.join(path, "comfy", "model_patcher.py")):
        return os.path.abspath(path)
    if named:
        pytest.fail(f"COMFYUI_PATH={named} is not a ComfyUI checkout; {HOW}")
    return None


def run(path: str, *arguments: str) -> None:
    """Run tests on a checkout; fail with what they printed."""
    child = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, "-q", *parallel(cores())],
        cwd=ROOT,
        env={**os.environ, "GRAFT_TEST_COMFYUI": path, "PYTHONPATH": os.path.dirname(__file__), **ONE_THREAD},
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    print(f"{path}:\n{child.stdout[-6000:]}\n{child.stderr[-2000:]}")
    assert child.returncode == 0, f"the tests failed on {path}; its output is printed above"


def test_real_comfyui() -> None:
    path = checkout()
    if path is None:
        pytest.skip(f"no ComfyUI found; {HOW}")
    run(path, "tests/nodes", "tests/faults/test_nodes.py", "tests/with_comfyui/checks")


def test_the_embedded_hosts_tests_on_a_real_comfyui() -> None:
    path = checkout()
    if path is None:
        pytest.skip(f"no ComfyUI found; {HOW}")
    shared = [f"comfyui_api_stubs/tests/test_{name}.py" for name in SHARED]
    run(path, "-p", "opened_comfyui", "comfyui_api_stubs/tests/real", *shared)
