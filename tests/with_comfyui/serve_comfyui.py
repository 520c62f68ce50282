"""Runs a ComfyUI checkout's own server on the CPU with Graft as a custom node: `python serve_comfyui.py CHECKOUT PLACE
PORT [FRONT_END]`.

PLACE is the folder that it works in (input, output, models … are below it). FRONT_END is a front end's folder, if the
installed package is not the one that the checkout wants.
"""

from __future__ import annotations

import os
import runpy
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import open_comfyui

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def main(checkout: str, place: str, port: str, front_end: str = "") -> None:
    """Serve until the process ends."""
    open_comfyui.stand_in_for_missing()
    for folder in ("input", "output", "temp", "user", "models/loras", "custom_nodes"):
        os.makedirs(os.path.join(place, folder), exist_ok=True)
    link = os.path.join(place, "custom_nodes", "graft")
    if not os.path.exists(link):
        os.symlink(ROOT, link)
    os.chdir(checkout)
    sys.path.insert(0, checkout)
    sys.argv = ["main.py", "--cpu", "--port", port, "--base-directory", place, "--disable-api-nodes"]
    sys.argv += ["--database-url", "sqlite:///:memory:"]
    if front_end:
        sys.argv += ["--front-end-root", front_end]
    runpy.run_path("main.py", run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
