"""The only code that talks to ComfyUI (comfy.*, folder_paths, server). It decides nothing by itself.

Each module is imported when `host.<its name>` is first used: ComfyUI starts without those that only a running node
needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import (
        autograd_inplace,
        base_weights,
        denoiser,
        encoding,
        events,
        fingerprint,
        folders,
        latents,
        lora_injection,
        lora_stacks,
        model_difference,
        model_sampling,
        previews,
        routes,
        token_downsampling,
        webhook,
        whole_models,
    )

__all__ = [
    "autograd_inplace",
    "base_weights",
    "denoiser",
    "encoding",
    "events",
    "fingerprint",
    "folders",
    "latents",
    "lora_injection",
    "lora_stacks",
    "model_difference",
    "model_sampling",
    "previews",
    "routes",
    "token_downsampling",
    "webhook",
    "whole_models",
]


def __getattr__(name: str) -> Any:
    """A module of the wall, imported when it is asked for the first time."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f".{name}", __name__)
