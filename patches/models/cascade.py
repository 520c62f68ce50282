"""Stable Cascade."""

from __future__ import annotations

from .family import Missing, ModelFamily
from .recognition import Recognition

FAMILY = ModelFamily(
    name="cascade",
    title="Stable Cascade",
    recognition=Recognition(names=("prior_unet",)),
    layer_names=Missing("its layers keep the names of the file: diffusers' own are not known here"),
    blocks=Missing("sd-webui-lora-block-weight has no lists for it"),
    token_layout=Missing("its levels mix attention and convolutions in classes that have no attention patch"),
    token_routing=Missing("its levels mix attention and convolutions"),
    training=Missing("its attention layers are called as in other families, which choose them"),
    examples=({"lora_prior_unet_down_blocks_0_1_attention_attn": (2048, 2048)},),
)
