"""HunyuanVideo: Flux' blocks after a text refiner."""

from __future__ import annotations

from . import flux
from .family import Missing, ModelFamily, ModelSpec
from .layer_names import LayerNames, by_table, square_qkv
from .recognition import Recognition

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
FAMILY = ModelFamily(
    name="hunyuan",
    title="HunyuanVideo",
    recognition=Recognition(names=("img_attn_qkv_loras", "token_refiner")),
    modelspec=ModelSpec("hunyuan-video", "https://github.com/Tencent/HunyuanVideo"),
    kohya=Missing("musubi writes no ss_base_model_version for it that others read"),
    layer_names=LayerNames(
        prefix="transformer.",
        rename=by_table(_RENAMES),
        fused=(square_qkv(_REFINER + r"self_attn\.qkv$", _REFINERS + "attn.to_{}"), *flux.FUSED),
        swapped=flux.SWAPPED,
        model_sign=r"individual_token_refiner\.",
    ),
    blocks=flux.BLOCKS,
    token_layout=Missing("nobody has tried token downsampling with it"),
    training=flux.TARGETS,
    examples=(
        {"diffusion_model.txt_in.individual_token_refiner.blocks.0.mlp.0": (12288, 3072)},
        {"lora_unet_double_blocks_0_img_attn_qkv_loras_0": (9216, 3072)},
    ),
)
