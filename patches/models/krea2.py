"""Krea 2."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .block_names import plain_blocks
from .diffusers_names import LayerNames, rename_by_table
from .family import ModelFamily, ModelSpec, TrainingTargets
from .recognition import LoraShapes, Recognition
from .routed_blocks import REFERENCES, RoutedBlocks, RoutedClass, TokenRouting
from .token_layout import Layout, Place, reference_tokens, text_length, token_grid

_RENAMES = (
    (r"^txtfusion\.", "text_fusion."),
    (r"^blocks\.", "transformer_blocks."),
    (r"\.mlp\.(gate|up|down)$", r".ff.\1"),
    (r"\.attn\.gate$", ".attn.to_gate"),
    (r"\.attn\.w([qkv])$", r".attn.to_\1"),
    (r"\.attn\.wo$", ".attn.to_out.0"),
    (r"^first$", "img_in"),
    (r"^last\.linear$", "final_layer.linear"),
    (r"^tmlp\.0$", "time_embed.linear_1"),
    (r"^tmlp\.2$", "time_embed.linear_2"),
    (r"^tproj\.1$", "time_mod_proj"),
    (r"^txtmlp\.1$", "txt_in.linear_1"),
    (r"^txtmlp\.3$", "txt_in.linear_2"),
)
_KEYS_AND_VALUES = re.compile(r"transformer_blocks[._]\d+[._]attn[._]to_[kv]$")
_SHAPE = (1536, 6144)  # 12 heads for keys and values, 48 for queries; Flux 2, as wide, has as many of each


def _has_fewer_keys(file: LoraShapes) -> bool:
    """Whether layers have diffusers' names, which Flux 2 has too, and Krea 2's shapes."""
    return any(shape == _SHAPE and _KEYS_AND_VALUES.search(layer) for layer, shape in file.layers.items())


def _layout(model: nn.Module, x: Tensor, context: Tensor | None, conditions: Mapping[str, Any]) -> Layout:
    """Text, image, reference images if a method for them is known."""
    patch: Any = model.patch
    text, grid = text_length(context), token_grid(x.shape, patch)
    references = 0
    if conditions.get("ref_latents_method", model.default_ref_method) is not None:
        references = reference_tokens(conditions.get("ref_latents"), patch)
    return Layout(1, grid, {text + grid[0] * grid[1] + references: Place(text)})


_ROUTED = RoutedBlocks("blocks", "x", positions=("freqs",), masks=("mask",), absent={"timestep_zero_index": REFERENCES})
FAMILY = ModelFamily(
    name="krea2",
    title="Krea 2",
    recognition=Recognition(
        names=(
            r"(?<!transformer_)blocks_\d+_attn_(w[qkvo]|gate)_",
            r"blocks_\d+_(mlp|ff)_(gate|up|down)_(?!proj)",  # text encoders have a gate_proj
            r"transformer_blocks_\d+_attn_to_gate_",
            r"(txtfusion|text_fusion)_",
        ),
        shapes=_has_fewer_keys,
    ),
    modelspec=ModelSpec("Krea-2", "https://github.com/krea-ai/krea-2"),
    layer_names=LayerNames(rename=rename_by_table(_RENAMES), model_sign=r"(^|\.)txtfusion\.projector\."),
    blocks=plain_blocks("blocks", "transformer_blocks"),
    token_routing=TokenRouting({"SingleStreamDiT": RoutedClass((_ROUTED,), _layout)}),
    training=TrainingTargets(
        attention=("attn",),
        feed_forward=("mlp",),
        only_in_all=("txtfusion",),  # which its authors leave out of long runs
    ),
    examples=(
        {"lora_unet_blocks_0_attn_wq": (6144, 6144), "lora_unet_blocks_0_mlp_down": (6144, 16384)},
        {"diffusion_model.blocks.27.mlp.up": (16384, 6144)},
        {"base_model.model.txtfusion.refiner_blocks.0.attn.wv": (2560, 2560)},
        {
            "transformer.transformer_blocks.0.attn.to_q": (6144, 6144),
            "transformer.transformer_blocks.0.attn.to_k": (1536, 6144),
        },
        {"transformer.transformer_blocks.0.attn.to_gate": (6144, 6144)},
        {"transformer.transformer_blocks.3.ff.down": (6144, 16384)},
    ),
)
