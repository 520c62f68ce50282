"""HunyuanVideo: Flux' blocks after a text refiner; 1.5 has the double blocks alone, and narrower ones."""

from __future__ import annotations

import re
from dataclasses import replace

from torch import nn

from . import flux
from .family import Missing, ModelFamily, ModelSpec
from .layer_names import LayerNames, by_table, square_qkv
from .recognition import LoraShapes, Recognition, SharedNames

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


def _is_narrow(file: LoraShapes) -> bool:
    """Whether layers have HunyuanVideo's names and the width of 1.5."""
    return any(_WIDTH_15 in shape and _BLOCKS_15.search(layer) for layer, shape in file.layers.items())


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
    kohya=Missing("musubi writes no ss_base_model_version for it that others read"),
    layer_names=LayerNames(
        prefix="transformer.",
        rename=by_table(_RENAMES_15),
        fused=_FUSED,
        swapped=flux.SWAPPED,
        model_sign=r"(^|\.)vision_in\.",
    ),
    blocks=flux.BLOCKS,
    token_layout=Missing("nobody has tried token downsampling with it"),
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
    recognition=Recognition(names=("img_attn_qkv_loras", "token_refiner")),
    modelspec=ModelSpec("hunyuan-video", "https://github.com/Tencent/HunyuanVideo"),
    kohya=Missing("musubi writes no ss_base_model_version for it that others read"),
    layer_names=LayerNames(
        prefix="transformer.",
        rename=by_table(_RENAMES),
        fused=_FUSED,
        swapped=flux.SWAPPED,
        model_sign=r"individual_token_refiner\.",
    ),
    blocks=flux.BLOCKS,
    token_layout=Missing("nobody has tried token downsampling with it"),
    training=_TARGETS,
    examples=(
        {"diffusion_model.txt_in.individual_token_refiner.blocks.0.mlp.0": (12288, 3072)},
        {"lora_unet_double_blocks_0_img_attn_qkv_loras_0": (9216, 3072)},
    ),
    masked_text_alone=("HunyuanVideo",),  # ComfyUI makes one mask for a whole batch
)
