"""Stable Audio, which makes sounds and music."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .block_names import plain_blocks
from .diffusers_names import LayerNames, equal_kv, equal_qkv, rename_by_table
from .family import Missing, ModelFamily, TrainingTargets
from .recognition import Recognition
from .routed_blocks import RoutedBlocks, RoutedClass, TokenRouting
from .token_layout import Layout, Place, text_length

# From the beginning: MiniMax' music model holds layers of the same names one level below.
_LAYER = r"^(diffusion_model_|lora_unet_|model_model_)?(transformer_)?layers_\d+_"

_RENAMES = (
    (r"^transformer\.layers\.", "transformer_blocks."),
    (r"^(transformer_blocks\.\d+)\.self_attn\.to_out$", r"\1.attn1.to_out.0"),
    (r"^(transformer_blocks\.\d+)\.cross_attn\.to_out$", r"\1.attn2.to_out.0"),
    (r"^(transformer_blocks\.\d+)\.cross_attn\.to_q$", r"\1.attn2.to_q"),
    (r"^(transformer_blocks\.\d+)\.ff\.ff\.", r"\1.ff.net."),
    (r"^(transformer_blocks\.\d+)\.pre_norm$", r"\1.norm1"),
    (r"^(transformer_blocks\.\d+)\.cross_attend_norm$", r"\1.norm2"),
    (r"^(transformer_blocks\.\d+)\.ff_norm$", r"\1.norm3"),
    (r"^transformer\.project_(in|out)$", r"proj_\1"),
    (r"^to_timestep_embed\.", "timestep_proj."),
    (r"^to_global_embed\.", "global_proj."),
    (r"^to_cond_embed\.", "cross_attention_proj."),
)


def _layout(model: nn.Module, x: Tensor, context: Tensor | None, conditions: Mapping[str, Any]) -> Layout:
    """Memory, what stands in front, the noise level's token, moments of the sound."""
    transformer: Any = model.transformer
    before = getattr(transformer, "num_memory_tokens", 0) + text_length(conditions.get("prepend_cond"))
    if model.global_cond_type == "prepend":
        before += 1
    sound = x.shape[-1] // getattr(model, "patch_size", 1)
    return Layout(1, (1, sound), {before + sound: Place(before)})


_ROUTED = RoutedBlocks(
    "transformer.layers",
    "x",
    positions=("rotary_pos_emb",),
    shared=True,
    absent={"local_add_cond": "adds what it reads of every moment"},
)
FAMILY = ModelFamily(
    name="stable-audio",
    title="Stable Audio",
    recognition=Recognition(names=(rf"{_LAYER}(self_attn_to_(qkv|out)|cross_attn_to_(q|kv|out)|ff_ff_\d)[._]",)),
    layer_names=LayerNames(
        rename=rename_by_table(_RENAMES),
        fused=(
            equal_qkv(r"^transformer\.layers\.(\d+)\.self_attn\.to_qkv$", r"transformer_blocks.\1.attn1.to_{}"),
            equal_kv(r"^transformer\.layers\.(\d+)\.cross_attn\.to_kv$", r"transformer_blocks.\1.attn2.to_{}"),
        ),
        model_sign=r"(^|\.)transformer\.layers\.0\.cross_attn\.to_kv\.",
    ),
    blocks=plain_blocks("layers"),
    token_layout=Missing("its tokens are moments of a sound, not places of a picture"),
    token_routing=TokenRouting({"AudioDiffusionTransformer": RoutedClass((_ROUTED,), _layout, "sound")}),
    training=TrainingTargets(attention=("self_attn", "cross_attn"), feed_forward=("ff",)),
    examples=(
        {"diffusion_model.transformer.layers.0.self_attn.to_qkv": (4608, 1536)},
        {"lora_unet_transformer_layers_23_cross_attn_to_kv": (1536, 768)},
        {"model.model.transformer.layers.0.ff.ff.0.proj": (12288, 1536)},
        {"transformer.layers.0.self_attn.to_out": (1536, 1536)},
    ),
)
