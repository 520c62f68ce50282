"""ComfyUI's generic names: the model's own, as in its state dict. Trained LORA_MODELs use them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import diffusers
from .key_format import GENERIC_PREFIX, Groups, KeyFormat, KeyWriter
from .layer_tensors import layer_tensors

if TYPE_CHECKING:
    from ...models.family import ModelFamily


class ComfyUIWriter(KeyWriter):
    """Writes ComfyUI's generic names.

    A layer with a diffusers UNet or text encoder name gets kohya's name, which ComfyUI reads.
    """

    def write(self, groups: Groups, dtype: torch.dtype, family: ModelFamily | None) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for base, group in groups.items():
            tensors.update(layer_tensors(diffusers.kohya_name_from_diffusers(base, groups), group, dtype))
        return tensors


FORMAT = KeyFormat(
    name="comfyui",
    title="ComfyUI's generic names",
    examples={"diffusion_model.blocks.0.self_attn.q.lora_up.weight": "diffusion_model.blocks.0.self_attn.q.weight"},
    prefixes=(f"model.{GENERIC_PREFIX}", GENERIC_PREFIX, "model."),
    text_encoder_prefixes=("cond_stage_model.", "clip_"),
    writer=ComfyUIWriter(),
    holds_every_kind=True,
)
