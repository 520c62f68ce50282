"""The wall to ComfyUI: models, folders, progress and events (comfy.*, folder_paths, server). It translates and holds no
policy.
"""

from . import (
    base,
    demo,
    denoiser,
    encoding,
    events,
    fingerprint,
    folders,
    inplace,
    latents,
    lora,
    previews,
    routes,
    todo,
)

__all__ = [
    "base",
    "demo",
    "denoiser",
    "encoding",
    "events",
    "fingerprint",
    "folders",
    "inplace",
    "latents",
    "lora",
    "previews",
    "routes",
    "todo",
]
