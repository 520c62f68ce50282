"""ACE-Step, which makes music."""

from __future__ import annotations

from torch import nn

from .block_names import plain_blocks
from .diffusers_names import LayerNames, rename_by_table
from .family import Missing, ModelFamily, TrainingTargets
from .recognition import Recognition
from .routed_blocks import RoutedBlocks, RoutedClass, TokenRouting

_RENAMES_15 = (  # diffusers has the parts of ACE-Step 1.5 as models of their own, called as in its pipeline
    (r"^(.*\.(?:self|cross)_attn)\.([qkv])_proj$", r"\1.to_\2"),
    (r"^(.*\.(?:self|cross)_attn)\.o_proj$", r"\1.to_out.0"),
    (r"^(.*\.(?:self|cross)_attn)\.([qk])_norm$", r"\1.norm_\2"),
    (r"^decoder\.proj_(in|out)\.1$", r"proj_\1_conv"),
    (r"^decoder\.", ""),
    (r"^encoder\.", "condition_encoder."),
    (r"^tokenizer\.", "audio_tokenizer."),
    (r"^detokenizer\.", "audio_token_detokenizer."),
)


def _unread(model: nn.Module) -> tuple[str, ...]:
    """Heads and projections that only other trainers use, and the speaker, which ComfyUI always leaves empty; of
    ACE-Step 1.5 what turns sound into its codes and back.
    """
    if hasattr(model, "detokenizer"):
        return "tokenizer.", "detokenizer."
    blocks = getattr(model, "transformer_blocks", None)
    if not hasattr(model, "lyric_proj") or not isinstance(blocks, nn.ModuleList):
        return ()
    paths = ["projectors.", "speaker_embedder"]
    for number in range(len(blocks)):
        attention = f"transformer_blocks.{number}.cross_attn."
        paths += [f"{attention}add_", f"{attention}to_add_out"]
    return tuple(paths)


_ROUTED = RoutedBlocks(
    "decoder.layers", "hidden_states", positions=("position_embeddings",), shared=True, window="self_attn"
)
FAMILY = ModelFamily(
    name="ace",
    title="ACE-Step",
    recognition=Recognition(
        names=(
            r"transformer_blocks_\d+_cross_attn_to_",
            r"transformer_blocks_\d+_ff_(inverted|depth|point)_conv_",
            r"(^|_)lyric_(encoder|proj)_",
            r"(^|_)(speaker|genre)_embedder_",
            # 1.5 in ComfyUI's names, and in diffusers': Stable Audio has to_qkv, to_kv and a to_out without a number
            r"decoder_layers_\d+_(self|cross)_attn_[qkvo]_proj_",
            r"layers_\d+_(self_attn_to_[qkv]|cross_attn_to_[kv]|(self|cross)_attn_to_out_0)_",
        )
    ),
    layer_names=LayerNames(prefix="", model_sign=r"(^|\.)lyric_proj\."),
    other_names=(
        LayerNames(
            rename=rename_by_table(_RENAMES_15),
            model_sign=r"(^|\.)decoder\.layers\.0\.cross_attn\.q_proj\.",
        ),
    ),
    blocks=plain_blocks("transformer_blocks"),
    token_layout=Missing("its attention is linear: it costs as much with fewer tokens"),
    token_routing=TokenRouting(
        {"AceStepConditionGenerationModel": RoutedClass((_ROUTED,), what="sound")},
        {"ACEStepTransformer2DModel": "its feed-forward layers mix neighboring moments, so none can be left out"},
    ),
    training=TrainingTargets(
        attention=("attn", "cross_attn"),
        feed_forward=("ff",),
        unread=_unread,
        only_in_all=("encoder",),  # of ACE-Step 1.5, whose trainers train the decoder alone
    ),
    examples=(
        {"transformer_blocks.0.cross_attn.to_q": (2560, 2560), "speaker_embedder": (2560, 512)},
        {"lora_unet_transformer_blocks_23_ff_inverted_conv_conv": (12800, 2560)},
        {"diffusion_model.lyric_encoder.encoders.0.self_attn.linear_q": (1024, 1024)},
        {"diffusion_model.decoder.layers.0.self_attn.q_proj": (2048, 2048)},
        {"transformer.layers.0.self_attn.to_q": (2048, 2048)},
        {"transformer.layers.0.cross_attn.to_k": (1024, 2048)},
        {"lora_transformer_layers_0_self_attn_to_out_0": (2048, 2048)},
    ),
)
