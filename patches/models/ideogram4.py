"""Ideogram 4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from . import lumina
from .diffusers_names import LayerNames, rename_by_table, square_qkv
from .family import ModelFamily, ModelSpec
from .recognition import Recognition, SharedNames
from .routed_blocks import RoutedBlocks, RoutedClass, TokenRouting
from .token_layout import Layout, Place, text_length, token_grid


def _layout(model: nn.Module, x: Tensor, context: Tensor | None, conditions: Mapping[str, Any]) -> Layout:
    """Text, image: a token for every place of the latent."""
    text, grid = text_length(context), token_grid(x.shape, 1)
    return Layout(1, grid, {text + grid[0] * grid[1]: Place(text)})


_ROUTED = RoutedBlocks("layers", "x", positions=("freqs_cis",), masks=("attn_mask",), one_step={"adaln_input": 3})
FAMILY = ModelFamily(
    name="ideogram4",
    title="Ideogram 4",
    recognition=Recognition(
        names=("llm_cond_proj", r"layers_\d+_adaln_modulation_"),
        shared_names=SharedNames(lumina.SHARED, (4608,)),
    ),
    modelspec=ModelSpec("Ideogram-4", "https://huggingface.co/Comfy-Org/Ideogram-4"),
    layer_names=LayerNames(
        rename=rename_by_table(((r"attention\.o$", "attention.to_out.0"),)),
        fused=(square_qkv(r"^(.*)attention\.qkv$", r"\1attention.to_{}"),),
        model_sign=r"(^|\.)embed_image_indicator\.",
    ),
    blocks=lumina.BLOCKS,
    token_routing=TokenRouting({"Ideogram4Transformer2DModel": RoutedClass((_ROUTED,), _layout)}),
    training=lumina.TARGETS,
    examples=(
        {"lora_unet_layers_0_attention_qkv": (13824, 4608), "lora_unet_layers_0_feed_forward_w1": (12288, 4608)},
        {"diffusion_model.layers.33.attention.o": (4608, 4608)},
        {"transformer.layers.0.attention.to_q": (4608, 4608)},
        {"conditional_transformer.layers.0.attention.qkv": (13824, 4608)},
        {
            "diffusion_model.layers.0.attention.qkv": (13824, 4608),
            "diffusion_model.layers.0.adaln_modulation": (18432, 512),
        },
        {"lora_unet_layers_0_adaln_modulation": (18432, 512)},
        {"diffusion_model.llm_cond_proj": (4608, 53248)},
    ),
)
