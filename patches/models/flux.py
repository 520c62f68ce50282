"""Flux: its layers, blocks and tokens, partly shared with Chroma, Flux 2 and HunyuanVideo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .block_names import REST, TEXT, BlockNames, DiffusersBlocks, numbered
from .diffusers_names import JoinedLayer, LayerNames, SwappedHalves, WeightPart, rename_by_table, square_qkv
from .family import Kohya, ModelFamily, ModelSpec, TrainingTargets
from .recognition import Recognition, SharedNames
from .routed_blocks import REFERENCES, RoutedBlocks, RoutedClass, TokenRouting
from .token_layout import (
    Layout,
    Place,
    TokenLayout,
    TransformerClass,
    patch_size,
    reference_tokens,
    text_length,
    token_grid,
)

RENAMES = (
    (r"^double_blocks\.(\d+)\.img_attn\.proj$", r"transformer_blocks.\1.attn.to_out.0"),
    (r"^double_blocks\.(\d+)\.txt_attn\.proj$", r"transformer_blocks.\1.attn.to_add_out"),
    (r"^double_blocks\.(\d+)\.img_mlp\.0$", r"transformer_blocks.\1.ff.net.0.proj"),
    (r"^double_blocks\.(\d+)\.img_mlp\.2$", r"transformer_blocks.\1.ff.net.2"),
    (r"^double_blocks\.(\d+)\.txt_mlp\.0$", r"transformer_blocks.\1.ff_context.net.0.proj"),
    (r"^double_blocks\.(\d+)\.txt_mlp\.2$", r"transformer_blocks.\1.ff_context.net.2"),
    (r"^double_blocks\.(\d+)\.img_mod\.lin$", r"transformer_blocks.\1.norm1.linear"),
    (r"^double_blocks\.(\d+)\.txt_mod\.lin$", r"transformer_blocks.\1.norm1_context.linear"),
    (r"^single_blocks\.(\d+)\.linear2$", r"single_transformer_blocks.\1.proj_out"),
    (r"^single_blocks\.(\d+)\.modulation\.lin$", r"single_transformer_blocks.\1.norm.linear"),
    (r"^img_in$", "x_embedder"),
    (r"^txt_in$", "context_embedder"),
    (r"^final_layer\.linear$", "proj_out"),
    (r"^final_layer\.adaLN_modulation\.1$", "norm_out.linear"),
    (r"^time_in\.in_layer$", "time_text_embed.timestep_embedder.linear_1"),
    (r"^time_in\.out_layer$", "time_text_embed.timestep_embedder.linear_2"),
    (r"^vector_in\.in_layer$", "time_text_embed.text_embedder.linear_1"),
    (r"^vector_in\.out_layer$", "time_text_embed.text_embedder.linear_2"),
    (r"^guidance_in\.in_layer$", "time_text_embed.guidance_embedder.linear_1"),
    (r"^guidance_in\.out_layer$", "time_text_embed.guidance_embedder.linear_2"),
)
FUSED_IN_DOUBLE_BLOCKS = (
    square_qkv(r"^double_blocks\.(\d+)\.img_attn\.qkv$", r"transformer_blocks.\1.attn.to_{}"),
    square_qkv(r"^double_blocks\.(\d+)\.txt_attn\.qkv$", r"transformer_blocks.\1.attn.add_{}_proj"),
)
FUSED = (
    *FUSED_IN_DOUBLE_BLOCKS,
    square_qkv(
        r"^single_blocks\.(\d+)\.linear1$",
        r"single_transformer_blocks.\1.attn.to_{}",
        r"single_transformer_blocks.\1.proj_mlp",
    ),
)
SWAPPED = (SwappedHalves(r"^final_layer\.adaLN_modulation\.1$"),)
_SIGN = r"(^|\.)double_blocks\.0\.img_attn\.qkv\."
LAYER_NAMES = LayerNames(rename=rename_by_table(RENAMES), fused=FUSED, swapped=SWAPPED, model_sign=_SIGN)
_LONGCAT = LayerNames(  # LongCat-Image is Flux' class in ComfyUI
    rename=rename_by_table(
        (
            (r"^time_in\.in_layer$", "time_embed.timestep_embedder.linear_1"),
            (r"^time_in\.out_layer$", "time_embed.timestep_embedder.linear_2"),
        )
    ),
    model_sign=_SIGN,
)
_OVIS = LayerNames(  # so is Ovis-Image, whose feed-forward is gated
    rename=rename_by_table(
        (
            (r"^time_in\.in_layer$", "timestep_embedder.linear_1"),
            (r"^time_in\.out_layer$", "timestep_embedder.linear_2"),
            (r"^double_blocks\.(\d+)\.img_mlp\.down_proj$", r"transformer_blocks.\1.ff.net.2"),
            (r"^double_blocks\.(\d+)\.txt_mlp\.down_proj$", r"transformer_blocks.\1.ff_context.net.2"),
        )
    ),
    joined=(
        JoinedLayer(
            r"^double_blocks\.(\d+)\.img_mlp\.up_proj$",
            r"double_blocks.\1.img_mlp.gate_proj",
            r"transformer_blocks.\1.ff.net.0.proj",
        ),
        JoinedLayer(
            r"^double_blocks\.(\d+)\.txt_mlp\.up_proj$",
            r"double_blocks.\1.txt_mlp.gate_proj",
            r"transformer_blocks.\1.ff_context.net.0.proj",
        ),
    ),
    model_sign=r"(^|\.)double_blocks\.0\.img_mlp\.gate_proj\.",
)

_57 = (*numbered("D", range(19)), *numbered("S", range(38)))
BLOCKS = BlockNames(
    kinds=("IN", "D", "S", "OUT"),
    lists={"double_blocks": "D", "single_blocks": "S"},
    first=("img_in", "txt_in", "time_in", "vector_in", "guidance_in"),
    last=("final_layer",),
    weight_lists={
        57: ("Flux", _57),
        58: ("Flux with BASE", (REST, *_57)),
        61: ("Flux with text encoders, first and last layers", (*TEXT, "IN", *_57, "OUT")),
    },
    diffusers=DiffusersBlocks(
        sign="single_transformer_blocks",
        lists={"transformer_blocks": "D", "single_transformer_blocks": "S"},
        first=("x_embedder", "context_embedder", "time_text_embed"),
        last=("norm_out", "proj_out"),
        t5=("te2", "text_encoder_2"),
    ),
)
TARGETS = TrainingTargets(
    attention=("img_attn", "txt_attn", r"single_blocks\.\d+\.linear[12]"),  # those fuse attention and feed-forward
    feed_forward=("img_mlp", "txt_mlp"),
)


def layout_without_references(
    model: nn.Module, x: Tensor, context: Tensor | None, conditions: Mapping[str, Any]
) -> Layout:
    """Text, image: joint attention in double and in single blocks."""
    text, grid = text_length(context), token_grid(x.shape, patch_size(model))
    return Layout(1, grid, {text + grid[0] * grid[1]: Place(text)})


def _layout(model: nn.Module, x: Tensor, context: Tensor | None, conditions: Mapping[str, Any]) -> Layout:
    """Text, image, reference images."""
    patch, text = patch_size(model), text_length(context)
    grid = token_grid(x.shape, patch)
    references = reference_tokens(conditions.get("ref_latents"), patch)
    return Layout(1, grid, {text + grid[0] * grid[1] + references: Place(text)})


BLOCK_LISTS = ("double_blocks", "single_blocks")
ROUTED = (
    RoutedBlocks(
        "double_blocks",
        "img",
        joint=False,
        positions=("pe",),
        masks=("attn_mask",),
        returned=0,
        absent={"modulation_dims_img": REFERENCES},
    ),
    RoutedBlocks("single_blocks", "x", positions=("pe",), masks=("attn_mask",), absent={"modulation_dims": REFERENCES}),
)
TOKENS = TokenLayout({"Flux": TransformerClass(_layout, patch_size, BLOCK_LISTS)})
ROUTING = TokenRouting({"Flux": RoutedClass(ROUTED, _layout)})
FAMILY = ModelFamily(
    name="flux",
    title="Flux",
    recognition=Recognition(
        names=(r"(double|single)_blocks_\d+_", r"single_transformer_blocks_\d"),
        shared_names=SharedNames(r"transformer_blocks_\d+_attn_(add_)?(to_)?[qkv]", (3072,)),
    ),
    modelspec=ModelSpec("flux-1-dev", "https://github.com/black-forest-labs/flux"),
    kohya=Kohya("flux1"),
    layer_names=LAYER_NAMES,
    blocks=BLOCKS,
    token_layout=TOKENS,
    token_routing=ROUTING,
    training=TARGETS,
    examples=(
        {"lora_unet_double_blocks_0_img_attn_qkv": (9216, 3072)},
        {"transformer.single_transformer_blocks.0.attn.to_q": (3072, 3072)},
        {"transformer.transformer_blocks.0.attn.to_q": (3072, 3072)},
    ),
    weight_parts=(
        WeightPart(r"single_blocks\.\d+\.linear1$", "linear1_qkv", sibling="linear2", per_row=3),  # XLabs' Q, K and V
    ),
    other_names=(_LONGCAT, _OVIS),
)
