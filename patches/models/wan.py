"""Wan 2.1 and 2.2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .block_names import plain_blocks
from .diffusers_names import LayerNames, equal_kv, rename_by_table
from .family import ModelFamily, ModelSpec, TrainingTargets
from .recognition import Recognition
from .routed_blocks import RoutedBlocks, RoutedClass, TokenRouting
from .token_layout import (
    Layout,
    Place,
    TokenLayout,
    TransformerClass,
    frame_count,
    patch_size,
    text_length,
    token_count,
    token_grid,
    whole_patches,
)

_FACES = (  # how Wan 2.2 Animate reads faces
    (r"^face_encoder\.(conv\d(?:_local)?)\.conv$", r"face_encoder.\1"),
    (r"^face_adapter\.fuser_blocks\.(\d+)\.linear1_q$", r"face_adapter.\1.to_q"),
    (r"^face_adapter\.fuser_blocks\.(\d+)\.linear2$", r"face_adapter.\1.to_out"),
    (r"^face_adapter\.fuser_blocks\.(\d+)\.([qk])_norm$", r"face_adapter.\1.norm_\2"),
    (r"^motion_encoder\.enc\.fc\.", "motion_encoder.motion_network."),
    (r"^motion_encoder\.enc\.net_app\.convs\.0\.0$", "motion_encoder.conv_in"),
    (r"^motion_encoder\.enc\.net_app\.convs\.8$", "motion_encoder.conv_out"),
    *(
        (rf"^motion_encoder\.enc\.net_app\.convs\.{number + 1}\.", f"motion_encoder.res_blocks.{number}.")
        for number in range(7)
    ),
    (r"^(motion_encoder\.res_blocks\.\d)\.conv1\.0$", r"\1.conv1"),
    (r"^(motion_encoder\.res_blocks\.\d)\.conv2\.1$", r"\1.conv2"),
    (r"^(motion_encoder\.res_blocks\.\d)\.skip\.1$", r"\1.conv_skip"),
)
_FACE_KEYS = equal_kv(r"^face_adapter\.fuser_blocks\.(\d+)\.linear1_kv$", r"face_adapter.\1.to_{}")
_RENAMES = (
    (r"self_attn\.", "attn1."),
    (r"cross_attn\.k_img", "attn2.add_k_proj"),
    (r"cross_attn\.v_img", "attn2.add_v_proj"),
    (r"cross_attn\.", "attn2."),
    (r"(attn\d\.)([qkv])$", r"\1to_\2"),
    (r"(attn\d\.)o$", r"\1to_out.0"),
    (r"ffn\.0$", "ffn.net.0.proj"),
    (r"ffn\.2$", "ffn.net.2"),
    (r"norm3$", "norm2"),
    (r"^head\.head$", "proj_out"),
    (r"(^|\.)(head\.)?modulation$", r"\1scale_shift_table"),
    (r"^time_embedding\.0$", "condition_embedder.time_embedder.linear_1"),
    (r"^time_embedding\.2$", "condition_embedder.time_embedder.linear_2"),
    (r"^time_projection\.1$", "condition_embedder.time_proj"),
    (r"^text_embedding\.0$", "condition_embedder.text_embedder.linear_1"),
    (r"^text_embedding\.2$", "condition_embedder.text_embedder.linear_2"),
    (r"^img_emb\.proj\.1$", "condition_embedder.image_embedder.ff.net.0.proj"),
    (r"^img_emb\.proj\.3$", "condition_embedder.image_embedder.ff.net.2"),
    (r"^vace_blocks\.(\d+)\.before_proj$", r"vace_blocks.\1.proj_in"),
    (r"^vace_blocks\.(\d+)\.after_proj$", r"vace_blocks.\1.proj_out"),
    *_FACES,
)


def _layout(model: nn.Module, x: Tensor, context: Tensor | None, conditions: Mapping[str, Any]) -> Layout:
    """A reference picture's tokens, the frames, in-context references; the text has its own cross-attention."""
    depth, patch = _depth(model), patch_size(model)
    frames, grid = _frames(x, depth, conditions), token_grid(x.shape, patch)
    before = 0
    reference = conditions.get("reference_latent")
    if getattr(model, "ref_conv", None) is not None and reference is not None:
        before = whole_patches(reference.shape, patch)
    after = 0
    for latent in conditions.get("context_latents") or ():
        after += frame_count(latent.shape[-3], depth) * token_count(latent.shape, patch)
    total = before + frames * grid[0] * grid[1] + after
    cross_attention = _text_lengths(model, context, conditions.get("clip_fea"))
    return Layout(frames, grid, {total: Place(before, period=1 + cross_attention.count(total))})


def _text_lengths(model: nn.Module, context: Tensor | None, vision: Tensor | None) -> list[int]:
    """Keys in the cross-attentions of one block: the text's, and a reference picture's vision features."""
    text = text_length(context)
    if vision is None:
        return [text]
    if getattr(model, "img_emb", None) is None:
        text -= vision.shape[-2]
    return [text, vision.shape[-2]]


def _humo(model: nn.Module, x: Tensor, context: Tensor | None, conditions: Mapping[str, Any]) -> Layout:
    """The frames, then a reference picture; text and audio have their own cross-attentions (audio frame by frame)."""
    depth, patch = _depth(model), patch_size(model)
    frames, grid = _frames(x, depth, conditions), token_grid(x.shape, patch)
    reference, after = conditions.get("reference_latent"), 0
    if reference is not None:
        after = (reference.shape[-3] // depth) * whole_patches(reference.shape, patch)
    total = frames * grid[0] * grid[1] + after
    period = 2 if text_length(context) == total else 1
    return Layout(frames, grid, {total: Place(0, period=period)})


def _depth(model: nn.Module) -> int:
    return int(model.patch_size[0])  # type: ignore[index]


def _frames(x: Tensor, depth: int, conditions: Mapping[str, Any]) -> int:
    """Frames of tokens, including those appended to the latent's."""
    frames = frame_count(x.shape[2], depth)
    added = conditions.get("time_dim_concat")
    if added is not None:
        frames += frame_count(added.shape[2], depth)
    return frames


def _unread(model: nn.Module) -> tuple[str, ...]:
    """What reads pictures of CLIP vision, which training does not give."""
    return () if getattr(model, "img_emb", None) is None else ("img_emb.",)


def _boundary(model: nn.Module) -> float | None:
    """Where Wan 2.2's sampler goes from the high-noise model to the low-noise one: of text to video, which Wan 2.1 has
    the layers of, and of image to video. None for others, as the 5B, which is one model.
    """
    if type(model).__name__ != "WanModel" or getattr(model, "img_emb", None) is not None:
        return None
    channels: Any = model.patch_embedding
    return {16: 0.875, 36: 0.9}.get(channels.in_channels)


_CLASS = TransformerClass(_layout, patch_size, ("blocks",))
_ROUTED = RoutedBlocks("blocks", "x", positions=("freqs",), one_step={"e": 4})
FAMILY = ModelFamily(
    name="wan",
    title="Wan",
    recognition=Recognition(
        names=(
            r"blocks_\d+_(self|cross)_attn_([qkvo](?!v?_linear)|norm|[kv]_img)",
            r"(?<!transformer_)blocks_\d+_attn[12]_.*",
            "condition_embedder",
        )
    ),
    modelspec=ModelSpec("wan2.1", "https://github.com/Wan-Video/Wan2.1"),
    layer_names=LayerNames(
        rename=rename_by_table(_RENAMES),
        fused=(_FACE_KEYS,),
        model_sign=r"(^|\.)blocks\.0\.cross_attn\.q\.",
    ),
    blocks=plain_blocks("blocks"),
    token_layout=TokenLayout(
        {
            "WanModel": _CLASS,
            "VaceWanModel": TransformerClass(_layout, patch_size, ("blocks", "vace_blocks")),
            "CameraWanModel": _CLASS,
            "AnimateWanModel": _CLASS,
            "HumoWanModel": TransformerClass(_humo, patch_size, ("blocks",)),
        }
    ),
    token_routing=TokenRouting({"WanModel": RoutedClass((_ROUTED,), _layout)}),
    training=TrainingTargets(attention=("self_attn", "cross_attn"), feed_forward=("ffn",), unread=_unread),
    expert_boundary=_boundary,
    examples=(
        {"diffusion_model.blocks.0.self_attn.q": (1536, 1536)},
        {"transformer.blocks.0.attn2.to_k": (5120, 5120)},
        {"lora_unet_blocks_0_cross_attn_k_img": (5120, 5120)},
    ),
)
