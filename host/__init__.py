"""The only code that talks to ComfyUI (comfy.*, folder_paths, server). It decides nothing by itself."""

from . import (
    autograd_inplace,
    base_weights,
    denoiser,
    encoding,
    events,
    fingerprint,
    folders,
    latents,
    lora,
    lora_injection,
    model_difference,
    model_sampling,
    previews,
    routes,
    token_downsampling,
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
    "lora",
    "lora_injection",
    "model_difference",
    "model_sampling",
    "previews",
    "routes",
    "token_downsampling",
]
