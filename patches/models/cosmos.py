"""Cosmos, Cosmos-Predict 2 and Anima, which is a Cosmos-Predict 2 with an adapter for its text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .block_names import plain_blocks
from .diffusers_names import LayerNames, rename_by_table
from .family import Kohya, Missing, ModelFamily, ModelSpec, TrainingTargets
from .recognition import LoraShapes, Recognition
from .routed_blocks import RoutedBlocks, RoutedClass, TokenRouting
from .token_layout import Layout, Place, TokenLayout, TransformerClass, frame_count, text_length, token_grid

_RENAMES_1 = (  # of Cosmos 1.0
    (r"^blocks\.block(\d+)\.blocks\.0\.block\.attn\.", r"transformer_blocks.\1.attn1."),
    (r"^blocks\.block(\d+)\.blocks\.1\.block\.attn\.", r"transformer_blocks.\1.attn2."),
    (r"\.(attn\d)\.to_([qkv])\.0$", r".\1.to_\2"),
    (r"\.(attn\d)\.to_([qk])\.1$", r".\1.norm_\2"),
    (r"^blocks\.block(\d+)\.blocks\.2\.block\.layer1$", r"transformer_blocks.\1.ff.net.0.proj"),
    (r"^blocks\.block(\d+)\.blocks\.2\.block\.layer2$", r"transformer_blocks.\1.ff.net.2"),
    (r"^blocks\.block(\d+)\.blocks\.0\.adaLN_modulation\.([12])$", r"transformer_blocks.\1.norm1.linear_\2"),
    (r"^blocks\.block(\d+)\.blocks\.1\.adaLN_modulation\.([12])$", r"transformer_blocks.\1.norm2.linear_\2"),
    (r"^blocks\.block(\d+)\.blocks\.2\.adaLN_modulation\.([12])$", r"transformer_blocks.\1.norm3.linear_\2"),
    (r"^final_layer\.adaLN_modulation\.([12])$", r"norm_out.linear_\1"),
    (r"^final_layer\.linear$", "proj_out"),
    (r"^t_embedder\.1\.", "time_embed.t_embedder."),
    (r"^affline_norm$", "time_embed.norm"),
    (r"^x_embedder\.proj\.1$", "patch_embed.proj"),
)
_ANIMA_TEXT = 512  # tokens that Anima makes of a shorter text
_TEXT_WIDTH = 1024  # LTX-Video and PixArt, whose layers have the same names in diffusers, read wider text
_RENAMES = (
    (r"^blocks\.", "transformer_blocks."),
    (r"^llm_adapter\.", "text_conditioner."),
    (r"^(transformer_blocks\.\d+\.)self_attn\.", r"\1attn1."),
    (r"^(transformer_blocks\.\d+\.)cross_attn\.", r"\1attn2."),
    (r"\.(attn\d)\.([qkv])_proj$", r".\1.to_\2"),
    (r"\.(attn\d)\.output_proj$", r".\1.to_out.0"),
    (r"\.(attn\d)\.([qk])_norm$", r".\1.norm_\2"),
    (r"\.mlp\.layer1$", ".ff.net.0.proj"),
    (r"\.mlp\.layer2$", ".ff.net.2"),
    (r"\.adaln_modulation_self_attn\.([12])$", r".norm1.linear_\1"),
    (r"\.adaln_modulation_cross_attn\.([12])$", r".norm2.linear_\1"),
    (r"\.adaln_modulation_mlp\.([12])$", r".norm3.linear_\1"),
    (r"^final_layer\.adaln_modulation\.([12])$", r"norm_out.linear_\1"),
    (r"^final_layer\.linear$", "proj_out"),
    (r"^t_embedder\.1\.", "time_embed.t_embedder."),
    (r"^t_embedding_norm$", "time_embed.norm"),
    (r"^x_embedder\.proj\.1$", "patch_embed.proj"),
)


def _layout(model: nn.Module, x: Tensor, context: Tensor | None, conditions: Mapping[str, Any]) -> Layout:
    """The frames; the text has its own cross-attention."""
    frames = frame_count(x.shape[2], int(model.patch_temporal))  # type: ignore[arg-type]
    grid = token_grid(x.shape, _patch(model))
    total = frames * grid[0] * grid[1]
    t5_ids, text = conditions.get("t5xxl_ids"), text_length(context)
    if t5_ids is not None:
        text = max(_ANIMA_TEXT, t5_ids.shape[-1])
    period = 2 if text == total else 1
    return Layout(frames, grid, {total: Place(0, period=period)})


def _patch(model: nn.Module) -> int:
    return int(model.patch_spatial)  # type: ignore[arg-type]


def _reads_narrow_text(file: LoraShapes) -> bool:
    """Whether layers have diffusers' names and the text's width."""
    return _TEXT_WIDTH in file.widths(r"transformer_blocks_\d+_attn2_to_[kv]_")


_CLASS = TransformerClass(_layout, _patch, ("blocks",))
_ROUTED = RoutedBlocks(
    "blocks",
    "x_B_T_H_W_D",
    grid=True,
    positions=("rope_emb_L_1_1_D",),
    absent={"extra_per_block_pos_emb": "adds positions of the whole grid"},
    one_step={"emb_B_T_D": 3},
)
_ROUTING = TokenRouting({"MiniTrainDIT": RoutedClass((_ROUTED,)), "Anima": RoutedClass((_ROUTED,))})
_LAYER_NAMES = LayerNames(rename=rename_by_table(_RENAMES), model_sign=r"(^|\.)blocks\.0\.cross_attn\.q_proj\.")
_BLOCKS = plain_blocks("blocks")
_TARGETS = TrainingTargets(
    attention=("self_attn", "cross_attn"),
    feed_forward=("mlp",),
    on_request=("llm_adapter",),  # Anima's own text encoder, which reads every caption
)
FAMILY = ModelFamily(
    name="cosmos",
    title="Cosmos or Anima",
    recognition=Recognition(
        names=(
            r"blocks_\d+_(self|cross)_attn_([qkv]|output)_proj",
            r"adaln_modulation_(self_attn|cross_attn|mlp|\d)_",  # Ideogram 4 has one with nothing behind it
        ),
        shapes=_reads_narrow_text,
    ),
    layer_names=_LAYER_NAMES,
    blocks=_BLOCKS,
    token_layout=TokenLayout({"GeneralDIT": _CLASS, "MiniTrainDIT": _CLASS, "Anima": _CLASS}),
    token_routing=_ROUTING,
    training=_TARGETS,
    other_names=(
        LayerNames(
            rename=rename_by_table(_RENAMES_1),
            model_sign=r"(^|\.)blocks\.block0\.blocks\.0\.block\.",
        ),
    ),
    examples=(
        {"diffusion_model.blocks.0.self_attn.q_proj": (2048, 2048)},
        {"diffusion_model.blocks.0.adaln_modulation_self_attn.1": (256, 2048)},
        {"lora_unet_blocks_0_cross_attn_output_proj": (2048, 2048)},
        {"diffusion_model.final_layer.adaln_modulation.1": (256, 2048)},
        {"transformer.transformer_blocks.0.attn2.to_k": (2048, 1024)},
    ),
)
ANIMA = ModelFamily(
    name="anima",
    title="Anima",
    recognition=Recognition(names=("llm_adapter_", "text_conditioner_")),  # without these it may be either
    modelspec=ModelSpec("anima-preview", "https://huggingface.co/circlestone-labs/Anima"),
    kohya=Kohya("anima", one_text_encoder=True),
    layer_names=_LAYER_NAMES,
    blocks=_BLOCKS,
    token_layout=Missing("its class is listed with Cosmos'"),
    token_routing=_ROUTING,
    training=_TARGETS,
    examples=(
        {
            "lora_unet_blocks_0_self_attn_q_proj": (2048, 2048),
            "lora_unet_llm_adapter_blocks_0_self_attn_q_proj": (1024, 1024),
        },
        {
            "diffusion_model.blocks.27.mlp.layer1": (8192, 2048),
            "diffusion_model.llm_adapter.blocks.5.mlp.0": (4096, 1024),
        },
        {
            "transformer.transformer_blocks.0.attn2.to_k": (2048, 1024),
            "text_conditioner.blocks.0.cross_attn.q_proj": (1024, 1024),
        },
    ),
)
