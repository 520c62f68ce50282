"""Flux 2."""

from __future__ import annotations

import re

from . import flux
from .family import Missing, ModelFamily
from .recognition import LoraShapes, Recognition

_GATED = (  # (Flux' layer, rows a column where its feed-forward is gated)
    (re.compile(r"single_blocks[._]\d+[._]linear1$"), 9),
    (re.compile(r"(img|txt)_mlp[._]0$"), 6),
)


def _has_gated_feed_forward(file: LoraShapes) -> bool:
    """Whether layers have Flux' names and Flux 2's shapes."""
    if not file.has(r"(double|single)_blocks_\d+_"):
        return False
    for layer, (rows, columns) in file.layers.items():
        for pattern, times in _GATED:
            if rows == times * columns and pattern.search(layer):
                return True
    return False


FAMILY = ModelFamily(
    name="flux2",
    title="Flux 2",
    recognition=Recognition(
        names=(
            r"(double|single)_stream_modulation",
            "attn_to_qkv_mlp_proj",
            r"blocks_\d+_ff_(context_)?linear_in",
        ),
        shapes=_has_gated_feed_forward,
    ),
    modelspec=Missing("modelspec names no Flux 2 yet"),
    kohya=Missing("sd-scripts has no name for it yet"),
    layer_names=Missing("its layers keep ComfyUI's names: diffusers fuses them otherwise than Flux'"),
    blocks=flux.BLOCKS,
    token_layout=flux.TOKENS,  # ComfyUI has one class for both
    training=flux.TARGETS,
    examples=(
        {"diffusion_model.single_blocks.0.linear1": (55296, 6144)},
        {"diffusion_model.double_blocks.0.img_mlp.0": (36864, 6144)},
        {"transformer.single_transformer_blocks.0.attn.to_qkv_mlp_proj": (55296, 6144)},
        {"transformer.transformer_blocks.0.ff.linear_in": (36864, 6144)},
        {"diffusion_model.double_stream_modulation_img.lin": (36864, 6144)},
    ),
)
