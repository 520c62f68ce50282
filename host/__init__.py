"""The wall to ComfyUI: models, folders, progress and events (comfy.*, folder_paths, server). It translates and holds no
policy.
"""

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
    text_encoder_gradients,
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
    "text_encoder_gradients",
    "token_downsampling",
]
