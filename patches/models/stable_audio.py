"""Stable Audio, which makes sounds and music."""

from __future__ import annotations

from .block_names import plain_blocks
from .family import Missing, ModelFamily, TrainingTargets
from .recognition import Recognition

# From the beginning: MiniMax' music model holds layers of the same names one level below.
_LAYER = r"^(diffusion_model_|lora_unet_|model_model_)?(transformer_)?layers_\d+_"

FAMILY = ModelFamily(
    name="stable-audio",
    title="Stable Audio",
    recognition=Recognition(names=(rf"{_LAYER}(self_attn_to_(qkv|out)|cross_attn_to_(q|kv|out)|ff_ff_\d)[._]",)),
    modelspec=Missing("modelspec names no Stable Audio"),
    kohya=Missing("sd-scripts does not train it"),
    layer_names=Missing("its layers keep ComfyUI's names: diffusers has to_qkv and to_kv in parts"),
    blocks=plain_blocks("layers"),
    token_layout=Missing("its tokens are moments of a sound, not places of a picture"),
    training=TrainingTargets(attention=("self_attn", "cross_attn"), feed_forward=("ff",)),
    examples=(
        {"diffusion_model.transformer.layers.0.self_attn.to_qkv": (4608, 1536)},
        {"lora_unet_transformer_layers_23_cross_attn_to_kv": (1536, 768)},
        {"model.model.transformer.layers.0.ff.ff.0.proj": (12288, 1536)},
        {"transformer.layers.0.self_attn.to_out": (1536, 1536)},
    ),
)
