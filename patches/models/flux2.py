"""Flux 2."""

from __future__ import annotations

import re

from . import flux
from .diffusers_names import LayerNames, rename_by_table
from .family import ModelFamily
from .recognition import LoraShapes, Recognition, SharedNames

_RENAMES = (
    (r"^double_blocks\.(\d+)\.img_mlp\.0$", r"transformer_blocks.\1.ff.linear_in"),
    (r"^double_blocks\.(\d+)\.img_mlp\.2$", r"transformer_blocks.\1.ff.linear_out"),
    (r"^double_blocks\.(\d+)\.txt_mlp\.0$", r"transformer_blocks.\1.ff_context.linear_in"),
    (r"^double_blocks\.(\d+)\.txt_mlp\.2$", r"transformer_blocks.\1.ff_context.linear_out"),
    (r"^single_blocks\.(\d+)\.linear1$", r"single_transformer_blocks.\1.attn.to_qkv_mlp_proj"),
    (r"^single_blocks\.(\d+)\.linear2$", r"single_transformer_blocks.\1.attn.to_out"),
    (r"^((?:double|single)_stream_modulation(?:_img|_txt)?)\.lin$", r"\1.linear"),
    (r"^time_in\.in_layer$", "time_guidance_embed.timestep_embedder.linear_1"),
    (r"^time_in\.out_layer$", "time_guidance_embed.timestep_embedder.linear_2"),
    (r"^guidance_in\.in_layer$", "time_guidance_embed.guidance_embedder.linear_1"),
    (r"^guidance_in\.out_layer$", "time_guidance_embed.guidance_embedder.linear_2"),
    *flux.RENAMES,
)
_GATED = (  # (Flux' layer, rows a column where its feed-forward is gated)
    (re.compile(r"single_blocks[._]\d+[._]linear1$"), 9),
    (re.compile(r"(img|txt)_mlp[._]0$"), 6),
)
_SINGLE_OUT = re.compile(r"single_blocks[._]\d+[._]linear2$")
_COLUMNS_A_ROW = 4  # of _SINGLE_OUT; Flux has 5, as its feed-forward is wider
_ATTENTION = re.compile(r"double_blocks[._]\d+[._](img|txt)_attn[._](qkv|proj)$")
_WIDTHS = (6144, 4096)  # of Flux 2 and of Klein 9B; Klein 4B has Flux' own 3072


def _has_shapes_of_its_own(file: LoraShapes) -> bool:
    """Whether layers have Flux' names and Flux 2's shapes."""
    if not file.has(r"(double|single)_blocks_\d+_"):
        return False
    return any(_is_of_flux_2(layer, rows, columns) for layer, (rows, columns) in file.layers.items())


def _is_of_flux_2(layer: str, rows: int, columns: int) -> bool:
    for pattern, times in _GATED:
        if rows == times * columns and pattern.search(layer):
            return True
    if _SINGLE_OUT.search(layer):
        return columns == _COLUMNS_A_ROW * rows
    return columns in _WIDTHS and _ATTENTION.search(layer) is not None


FAMILY = ModelFamily(
    name="flux2",
    title="Flux 2",
    recognition=Recognition(
        names=(
            r"(double|single)_stream_modulation",
            "attn_to_qkv_mlp_proj",
            r"single_transformer_blocks_\d+_attn_to_out_(?!0)",  # AuraFlow has a to_out.0
            r"blocks_\d+_ff_(context_)?linear_in",
        ),
        shapes=_has_shapes_of_its_own,
        shared_names=SharedNames(r"transformer_blocks_\d+_attn_(add_)?(to_)?[qkv]", _WIDTHS),
    ),
    layer_names=LayerNames(
        rename=rename_by_table(_RENAMES),
        fused=flux.FUSED_IN_DOUBLE_BLOCKS,  # diffusers has linear1 of the single blocks in one, too
        swapped=flux.SWAPPED,
        model_sign=r"(^|\.)double_stream_modulation_img\.",
    ),
    blocks=flux.BLOCKS,
    token_layout=flux.TOKENS,  # ComfyUI has one class for both
    token_routing=flux.ROUTING,
    training=flux.TARGETS,
    examples=(
        {"diffusion_model.single_blocks.0.linear1": (55296, 6144)},
        {"diffusion_model.double_blocks.0.img_mlp.0": (36864, 6144)},
        {"transformer.single_transformer_blocks.0.attn.to_qkv_mlp_proj": (55296, 6144)},
        {"transformer.transformer_blocks.0.ff.linear_in": (36864, 6144)},
        {"diffusion_model.double_stream_modulation_img.lin": (36864, 6144)},
        {"lora_unet_double_blocks_0_img_attn_qkv": (18432, 6144)},
        {"diffusion_model.double_blocks.0.txt_attn.proj": (4096, 4096)},
        {"diffusion_model.single_blocks.0.linear2": (3072, 12288)},
        {"transformer.single_transformer_blocks.0.attn.to_out": (6144, 24576)},
        {"transformer.transformer_blocks.0.attn.to_q": (6144, 6144)},
        {"transformer.transformer_blocks.0.attn.add_k_proj": (4096, 4096)},
    ),
)
