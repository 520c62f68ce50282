"""Runs a ComfyUI checkout's own server on the CPU with all its own nodes and no custom ones: `python serve.py CHECKOUT
PLACE PORT FRONT_END`.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "with_comfyui"))
import open_comfyui


def main(checkout: str, place: str, port: str, front_end: str) -> None:
    """Serve until the process ends."""
    open_comfyui.stand_in_for_missing()
    open_comfyui.stand_in("spandrel")
    open_comfyui.stand_in("torchvision.models.optical_flow")
    for folder in ("input", "output", "temp", "user", "models", "custom_nodes"):
        os.makedirs(os.path.join(place, folder), exist_ok=True)
    os.chdir(checkout)
    sys.path.insert(0, checkout)
    sys.argv = ["main.py", "--cpu", "--port", port, "--base-directory", place, "--disable-all-custom-nodes"]
    sys.argv += ["--database-url", "sqlite:///:memory:", "--front-end-root", front_end]
    runpy.run_path("main.py", run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
