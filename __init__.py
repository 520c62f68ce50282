"""Graft: patch, average and train diffusion models in a graph. A ComfyUI node pack (V3 schema)."""

from __future__ import annotations

import os
import sys


def _loaded_copy() -> str:
    """The folder of another copy of Graft that ComfyUI has loaded before this one, or nothing."""
    node = getattr(sys.modules.get("nodes"), "NODE_CLASS_MAPPINGS", {}).get("TrainStep")
    return os.path.dirname(os.path.dirname(str(sys.modules[node.__module__].__file__))) if node else ""


_LOADED_COPY = _loaded_copy()
WEB_DIRECTORY = None if _LOADED_COPY else "./web"


async def comfy_entrypoint():
    """What ComfyUI calls to load the pack: returns the extension that lists every node. A second copy of Graft stands
    back, and ComfyUI logs why.
    """
    if _LOADED_COPY:
        here = os.path.dirname(os.path.abspath(__file__))
        raise RuntimeError(f"Graft is there twice: {_LOADED_COPY} is used, {here} is not. Remove one, and restart.")
    from .nodes import extension

    return extension()
