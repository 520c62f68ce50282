"""LTX-Video and PixArt, whose LoRA files use the same names, and LTX-2, which has the same for its video part."""

from __future__ import annotations

from torch import nn

from .block_names import plain_blocks
from .diffusers_names import LayerNames, rename_by_table
from .family import Missing, ModelFamily, TrainingTargets
from .recognition import Recognition, SharedNames
from .routed_blocks import RoutedBlocks, RoutedClass, TokenRouting

_RENAMES = (
    (r"^patchify_proj$", "proj_in"),
    (r"^audio_patchify_proj$", "audio_proj_in"),
    (r"^(audio_)?adaln_single\.", r"\1time_embed."),
    (r"^(audio_)?prompt_adaln_single\.", r"\1prompt_adaln."),
    (r"^av_ca_(video|audio)_scale_shift_adaln_single\.", r"av_cross_attn_\1_scale_shift."),
    (r"^av_ca_a2v_gate_adaln_single\.", "av_cross_attn_video_a2v_gate."),
    (r"^av_ca_v2a_gate_adaln_single\.", "av_cross_attn_audio_v2a_gate."),
    (r"\.scale_shift_table_a2v_ca_(video|audio)$", r".\1_a2v_cross_attn_scale_shift_table"),
    (r"\.([qk])_norm$", r".norm_\1"),
    (r"^(audio|video)_embeddings_connector\.transformer_1d_blocks\.", r"\1_connector.transformer_blocks."),
    (r"^(audio|video)_embeddings_connector\.", r"\1_connector."),
)


def _sound(model: nn.Module) -> tuple[str, ...]:
    """LTX-2's layers for sound: pictures and silent clips leave them out."""
    blocks = getattr(model, "transformer_blocks", None)
    if not hasattr(model, "audio_patchify_proj") or not isinstance(blocks, nn.ModuleList):
        return ()
    paths = ["audio_", "av_ca_"]
    for number in range(len(blocks)):
        block = f"transformer_blocks.{number}."
        paths += [f"{block}audio_", f"{block}video_to_audio_attn"]
    return tuple(paths)


# Of the text; for diffusers and the trainers they are a part of another model.
_CONNECTORS = ("video_embeddings_connector", "audio_embeddings_connector")
_GUIDED = {"self_attention_mask": "attends to pictures that guide the video with strengths of their own"}
_ROUTED_LTX = RoutedBlocks("transformer_blocks", "x", positions=("pe",), absent=_GUIDED, one_step={"timestep": 3})
_ROUTED_LTX_2 = RoutedBlocks(
    "transformer_blocks",
    ("x", 0),  # of video and sound
    positions=("v_pe", "v_cross_pe"),
    returned=0,
    absent=_GUIDED,
    one_step={"v_timestep": 3, "v_cross_scale_shift_timestep": 3, "v_cross_gate_timestep": 3},
)
_ROUTED_PIXART = RoutedBlocks("blocks", "x")
LTX_2 = ModelFamily(
    name="ltx2",
    title="LTX-2",
    recognition=Recognition(
        names=(
            r"transformer_blocks_\d+_(audio_(attn[12]|ff)|audio_to_video_attn|video_to_audio_attn)_",
            r"transformer_blocks_\d+_attn[12]_to_gate_logits_",  # LTX-2.3
            r"(audio|video)_embeddings_connector_",
            r"(^|_)av_(ca|cross_attn)_(video|audio|a2v|v2a)_",
        )
    ),
    layer_names=LayerNames(rename=rename_by_table(_RENAMES), model_sign=r"(^|\.)audio_patchify_proj\."),
    blocks=plain_blocks("transformer_blocks"),
    token_routing=TokenRouting({"LTXAVModel": RoutedClass((_ROUTED_LTX_2,))}),
    training=TrainingTargets(
        attention=("attn1", "attn2", r"audio_attn\d", "audio_to_video_attn", "video_to_audio_attn"),
        feed_forward=("ff", "audio_ff"),
        on_request=_CONNECTORS,
        sound=_sound,
    ),
    examples=(
        {
            "diffusion_model.transformer_blocks.0.attn1.to_q": (4096, 4096),
            "diffusion_model.transformer_blocks.0.audio_attn1.to_q": (2048, 2048),
        },
        {"lora_unet_transformer_blocks_47_video_to_audio_attn_to_k": (2048, 4096)},
        {"transformer.transformer_blocks.0.audio_to_video_attn.to_out.0": (4096, 2048)},
        {"diffusion_model.transformer_blocks.0.audio_ff.net.0.proj": (8192, 2048)},
        {"diffusion_model.transformer_blocks.0.attn2.to_gate_logits": (32, 4096)},
        {"diffusion_model.video_embeddings_connector.transformer_1d_blocks.0.attn1.to_q": (3840, 3840)},
        {"diffusion_model.av_ca_a2v_gate_adaln_single.linear": (4096, 4096)},
    ),
)
FAMILY = ModelFamily(
    name="ltx",
    title="LTX-Video, LTX-2 or PixArt",
    recognition=Recognition(shared_names=SharedNames(r"transformer_blocks_\d+_attn[12]_", None)),
    modelspec=Missing("the files do not tell which of the three it is"),
    kohya=Missing("the files do not tell which of the three it is"),
    layer_names=LayerNames(rename=rename_by_table(_RENAMES), model_sign=r"(^|\.)patchify_proj\."),
    blocks=plain_blocks("transformer_blocks", "blocks"),
    token_layout=Missing("nobody has tried token downsampling with any of them"),
    token_routing=TokenRouting({"LTXVModel": RoutedClass((_ROUTED_LTX,)), "PixArtMS": RoutedClass((_ROUTED_PIXART,))}),
    training=TrainingTargets(attention=("attn1", "attn2"), feed_forward=("ff",)),
    examples=({"transformer.transformer_blocks.3.attn1.to_q": (2048, 2048)},),
)
