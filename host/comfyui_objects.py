"""ComfyUI's objects that go through Graft. It has no types of its own for most of them, so these names say which is
meant; Graft uses of each what its comment lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Model: TypeAlias = Any  # MODEL: a ModelPatcher. model, load_device, model_options, patches, clone(), get_model_object()
BaseModel: TypeAlias = Any  # what it patches: diffusion_model, latent_format, model_sampling, apply_model()
Sampling: TypeAlias = Any  # a model's model_sampling: sigmas, noise_scaling(), percent_to_sigma()
Clip: TypeAlias = Any  # CLIP: patcher, tokenizer, cond_stage_model, tokenize(), encode_from_tokens_scheduled()
Tokenizer: TypeAlias = Any  # of a CLIP, or of one of its text encoders: embedding_key, tokenize_with_weights()
Vae: TypeAlias = Any  # VAE: patcher, first_stage_model, encode(), decode()
Conditioning: TypeAlias = Sequence[Any]  # CONDITIONING: (context, options) of each part
Latent: TypeAlias = Mapping[str, Any]  # LATENT: "samples", and "noise_mask", "type", downscale ratios where it has them
Latents: TypeAlias = Any  # its samples: a tensor, or ComfyUI's NestedTensor of video and sound
Request: TypeAlias = Any  # aiohttp's web.Request: query, headers, content, match_info
