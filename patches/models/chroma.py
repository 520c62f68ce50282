"""Chroma: Flux without guidance, modulated by one layer for all blocks."""

from __future__ import annotations

from . import flux
from .diffusers_names import LayerNames, rename_by_table
from .family import Missing, ModelFamily
from .recognition import Recognition
from .routed_blocks import RoutedClass, TokenRouting
from .token_layout import TokenLayout, TransformerClass, patch_size

_RENAMES = (
    (r"^(distilled_guidance_layer\.layers\.\d+)\.in_layer$", r"\1.linear_1"),
    (r"^(distilled_guidance_layer\.layers\.\d+)\.out_layer$", r"\1.linear_2"),
    *flux.RENAMES,
)
_CLASS = TransformerClass(flux.layout_without_references, patch_size, flux.BLOCK_LISTS)
_ROUTED = RoutedClass(flux.ROUTED, flux.layout_without_references)
FAMILY = ModelFamily(
    name="chroma",
    title="Chroma",
    recognition=Recognition(names=("distilled_guidance_layer",)),
    kohya=Missing("sd-scripts writes Flux' version for it, which it is not"),
    layer_names=LayerNames(
        rename=rename_by_table(_RENAMES),
        fused=flux.FUSED,
        swapped=flux.SWAPPED,
        model_sign=r"(^|\.)distilled_guidance_layer\.",
    ),
    blocks=flux.BLOCKS,
    token_layout=TokenLayout({"Chroma": _CLASS, "ChromaRadiance": _CLASS}),
    token_routing=TokenRouting({"Chroma": _ROUTED, "ChromaRadiance": _ROUTED}),
    training=flux.TARGETS,
    examples=(
        {
            "diffusion_model.double_blocks.0.img_attn.qkv": (9216, 3072),
            "diffusion_model.distilled_guidance_layer.layers.0.in_layer": (5120, 5120),
        },
    ),
)
