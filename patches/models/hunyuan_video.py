"""HunyuanVideo: Flux' blocks after a text refiner; 1.5 has the double blocks alone, and narrower ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from . import flux
from .diffusers_names import LayerNames, rename_by_table, square_qkv
from .family import ModelFamily, ModelSpec
from .recognition import LoraShapes, Recognition, SharedNames
from .routed_blocks import RoutedClass, TokenRouting
from .token_layout import Layout, Place, frame_count, text_length, token_count, token_grid

_REFINER = r"^txt_in\.individual_token_refiner\.blocks\.(\d+)\."
_REFINERS = r"context_embedder.token_refiner.refiner_blocks.\1."
_RENAMES = (
    (_REFINER + r"self_attn\.proj$", _REFINERS + "attn.to_out.0"),
    (_REFINER + r"mlp\.0$", _REFINERS + "ff.net.0.proj"),
    (_REFINER + r"mlp\.2$", _REFINERS + "ff.net.2"),
    (_REFINER + r"adaLN_modulation\.1$", _REFINERS + "norm_out.linear"),
    (r"^txt_in\.input_embedder$", "context_embedder.proj_in"),
    (r"^img_in\.proj$", "x_embedder.proj"),
    (r"^txt_in\.t_embedder\.in_layer$", "context_embedder.time_text_embed.timestep_embedder.linear_1"),
    (r"^txt_in\.t_embedder\.out_layer$", "context_embedder.time_text_embed.timestep_embedder.linear_2"),
    (r"^txt_in\.c_embedder\.in_layer$", "context_embedder.time_text_embed.text_embedder.linear_1"),
    (r"^txt_in\.c_embedder\.out_layer$", "context_embedder.time_text_embed.text_embedder.linear_2"),
    *flux.RENAMES,
)
_FUSED = (square_qkv(_REFINER + r"self_attn\.qkv$", _REFINERS + "attn.to_{}"), *flux.FUSED)
_WIDTH_15 = 2048  # Flux and HunyuanVideo have 3072
_BLOCKS_15 = re.compile(r"double_blocks[._]\d+[._]|token_refiner[._]")
_RENAMES_IMAGE = (  # of HunyuanImage, which is the same class in ComfyUI
    (r"^time_in\.in_layer$", "time_guidance_embed.timestep_embedder.linear_1"),
    (r"^time_in\.out_layer$", "time_guidance_embed.timestep_embedder.linear_2"),
    (r"^time_r_in\.in_layer$", "time_guidance_embed.timestep_embedder_r.linear_1"),
    (r"^time_r_in\.out_layer$", "time_guidance_embed.timestep_embedder_r.linear_2"),
    (r"^guidance_in\.in_layer$", "time_guidance_embed.guidance_embedder.linear_1"),
    (r"^guidance_in\.out_layer$", "time_guidance_embed.guidance_embedder.linear_2"),
    (r"^byt5_in\.fc(\d)$", r"context_embedder_2.linear_\1"),
    *_RENAMES,
)
_ORIGINAL = (  # Tencent's own names, which musubi-tuner keeps
    (r"^((?:double|single)_blocks\..*mod(?:ulation)?)\.lin$", r"\1.linear"),
    (r"^(double_blocks\..*_mlp)\.0$", r"\1.fc1"),
    (r"^(double_blocks\..*_mlp)\.2$", r"\1.fc2"),
    (_REFINER + r"mlp\.0$", r"txt_in.individual_token_refiner.blocks.\1.mlp.fc1"),
    (_REFINER + r"mlp\.2$", r"txt_in.individual_token_refiner.blocks.\1.mlp.fc2"),
    (r"^((?:time|time_r|guidance)_in|txt_in\.t_embedder)\.in_layer$", r"\1.mlp.0"),
    (r"^((?:time|time_r|guidance)_in|txt_in\.t_embedder)\.out_layer$", r"\1.mlp.2"),
    (r"^txt_in\.c_embedder\.in_layer$", "txt_in.c_embedder.linear_1"),
    (r"^txt_in\.c_embedder\.out_layer$", "txt_in.c_embedder.linear_2"),
)
_ORIGINAL_FUSED = (  # Q, K and V of HunyuanVideo 1.5 and of HunyuanImage are apart there
    square_qkv(r"^double_blocks\.(\d+)\.(img|txt)_attn\.qkv$", r"double_blocks.\1.\2_attn_{}"),
    square_qkv(_REFINER + r"self_attn\.qkv$", r"txt_in.individual_token_refiner.blocks.\1.self_attn_{}"),
)
_SIGN = r"individual_token_refiner\."
_OTHER_NAMES = (
    LayerNames(
        rename=rename_by_table(_RENAMES_IMAGE),
        fused=_FUSED,
        swapped=flux.SWAPPED,
        model_sign=_SIGN,
    ),
    LayerNames(prefix="", rename=rename_by_table(_ORIGINAL), fused=_ORIGINAL_FUSED, model_sign=_SIGN),
)
_RENAMES_15 = (
    (r"^time_in\.in_layer$", "time_embed.timestep_embedder.linear_1"),
    (r"^time_in\.out_layer$", "time_embed.timestep_embedder.linear_2"),
    (r"^byt5_in\.fc(\d)$", r"context_embedder_2.linear_\1"),
    (r"^vision_in\.proj\.1$", "image_embedder.linear_1"),
    (r"^vision_in\.proj\.3$", "image_embedder.linear_2"),
    (r"^cond_type_embedding$", "cond_type_embed"),
    *_RENAMES,
)


def _unread(model: nn.Module) -> tuple[str, ...]:
    """What reads pictures of CLIP vision, which training does not give, and the text half of the last block of a model
    without single blocks: only the image half is used after it.
    """
    doubles, singles = getattr(model, "double_blocks", None), getattr(model, "single_blocks", None)
    if not isinstance(doubles, nn.ModuleList) or not isinstance(singles, nn.ModuleList) or len(singles):
        return ("vision_in.",)
    last = f"double_blocks.{len(doubles) - 1}."
    return "vision_in.", f"{last}txt_attn.proj", f"{last}txt_mlp"


def _layout(model: nn.Module, x: Tensor, context: Tensor | None, conditions: Mapping[str, Any]) -> Layout:
    """Vision features, the text's characters, text; then a reference picture and the frames. Older ComfyUIs have these
    two in front of the text.
    """
    text = text_length(context)
    if getattr(model, "byt5_in", None) is not None:
        text += text_length(conditions.get("txt_byt5"))
    text += text_length(conditions.get("clip_fea"))
    patch: Any = model.patch_size
    depth = patch[0] if len(patch) == 3 else 1
    reference = 0
    if conditions.get("ref_latent") is not None:
        reference = _tokens(conditions["ref_latent"], depth, patch[-1])
    grid, image = token_grid(x.shape, patch[-1]), _tokens(x, depth, patch[-1])
    doubles: Any = model.double_blocks
    total, before = text + reference + image, text
    if getattr(doubles[0], "flipped_img_txt", False):
        before = 0
    stream = before, before + reference + image
    return Layout(image // (grid[0] * grid[1]), grid, {total: Place(before + reference, stream=stream)})


def _tokens(latents: Tensor, depth: int, patch: int) -> int:
    frames = frame_count(latents.shape[2], depth) if latents.ndim == 5 else 1
    return frames * token_count(latents.shape, patch)


def _is_narrow(file: LoraShapes) -> bool:
    """Whether layers have HunyuanVideo's names and the width of 1.5."""
    return any(_WIDTH_15 in shape and _BLOCKS_15.search(layer) for layer, shape in file.layers.items())


_LAST_BLOCKS = re.compile(
    r"double_blocks[._]19[._]|single_blocks[._]3[89][._]"
)  # Flux has 19 and 38, Flux 2 fewer double
_WIDTHS = (3072, 3584)  # of HunyuanVideo and HunyuanImage; Flux 2, as deep in its single blocks, has others


def _is_deep(file: LoraShapes) -> bool:
    """Whether layers have Flux' names, and are of blocks that Flux does not have."""
    return any({*shape} & {*_WIDTHS} and _LAST_BLOCKS.search(layer) for layer, shape in file.layers.items())


_ROUTING = TokenRouting({"HunyuanVideo": RoutedClass(flux.ROUTED, _layout)})
_TARGETS = replace(flux.TARGETS, only_in_all=("txt_in",))  # the text refiner, which musubi-tuner leaves out
HUNYUAN_VIDEO_15 = ModelFamily(
    name="hunyuan15",
    title="HunyuanVideo 1.5",
    recognition=Recognition(
        names=("cond_type_embed",),
        shapes=_is_narrow,
        shared_names=SharedNames(r"transformer_blocks_\d+_attn_(add_)?(to_)?[qkv]", (_WIDTH_15,)),
    ),
    modelspec=ModelSpec("hunyuan-video-1.5", "https://github.com/Tencent-Hunyuan/HunyuanVideo-1.5"),
    layer_names=LayerNames(
        rename=rename_by_table(_RENAMES_15),
        fused=_FUSED,
        swapped=flux.SWAPPED,
        model_sign=r"(^|\.)vision_in\.",
    ),
    blocks=flux.BLOCKS,
    token_routing=_ROUTING,
    training=replace(_TARGETS, unread=_unread),
    examples=(
        {"diffusion_model.double_blocks.0.img_attn.qkv": (6144, 2048)},
        {"lora_unet_double_blocks_53_img_attn_q": (2048, 2048), "lora_unet_double_blocks_53_img_mlp_fc2": (2048, 8192)},
        {"diffusion_model.txt_in.individual_token_refiner.blocks.0.mlp.0": (8192, 2048)},
        {"transformer.transformer_blocks.0.attn.to_q": (2048, 2048)},
        {"transformer.context_embedder.token_refiner.refiner_blocks.0.attn.to_q": (2048, 2048)},
    ),
)
FAMILY = ModelFamily(
    name="hunyuan",
    title="HunyuanVideo",
    recognition=Recognition(
        names=(
            "img_attn_qkv_loras",
            "token_refiner",
            "^Hunyuan_video_",
            r"double_blocks_\d+_(img|txt)_(mlp_fc[12]|mod_linear)_",
            r"single_blocks_\d+_modulation_linear_",
        ),
        shapes=_is_deep,
    ),
    modelspec=ModelSpec("hunyuan-video", "https://github.com/Tencent/HunyuanVideo"),
    layer_names=LayerNames(
        rename=rename_by_table(_RENAMES),
        fused=_FUSED,
        swapped=flux.SWAPPED,
        model_sign=_SIGN,
    ),
    blocks=flux.BLOCKS,
    token_routing=_ROUTING,
    training=_TARGETS,
    examples=(
        {"diffusion_model.txt_in.individual_token_refiner.blocks.0.mlp.0": (12288, 3072)},
        {"lora_unet_double_blocks_0_img_attn_qkv_loras_0": (9216, 3072)},
        {"Hunyuan_video_I2V_lora_double_blocks_0_img_attn_qkv": (9216, 3072)},
        {"lora_unet_double_blocks_0_img_mlp_fc1": (12288, 3072)},
        {"lora_unet_double_blocks_0_img_attn_qkv": (9216, 3072), "lora_unet_single_blocks_39_linear2": (3072, 15360)},
    ),
    other_names=_OTHER_NAMES,
    masked_text_alone=("HunyuanVideo",),  # ComfyUI makes one mask for a whole batch
)
