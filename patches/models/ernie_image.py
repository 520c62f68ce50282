"""ERNIE-Image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .block_names import plain_blocks
from .family import ModelFamily, TrainingTargets
from .recognition import Recognition
from .routed_blocks import RoutedBlocks, RoutedClass, TokenRouting
from .token_layout import Layout, Place, patch_size, text_length, token_grid


def _layout(model: nn.Module, x: Tensor, context: Tensor | None, conditions: Mapping[str, Any]) -> Layout:
    """Image, text."""
    grid = token_grid(x.shape, patch_size(model))
    return Layout(1, grid, {grid[0] * grid[1] + text_length(context): Place(0)})


_ROUTED = RoutedBlocks("layers", "x", positions=("rotary_pos_emb",), masks=("attention_mask",))
FAMILY = ModelFamily(
    name="ernie",
    title="ERNIE-Image",
    # Not by mlp.gate_proj and mlp.up_proj: text encoders have them too.
    recognition=Recognition(names=(r"layers_\d+_self_attention_to_(q|k|v|out)_", r"layers_\d+_mlp_linear_fc2_")),
    blocks=plain_blocks("layers"),
    token_routing=TokenRouting({"ErnieImageModel": RoutedClass((_ROUTED,), _layout)}),
    training=TrainingTargets(attention=("self_attention",), feed_forward=("mlp",)),
    examples=(
        {"lora_unet_layers_0_self_attention_to_q": (4096, 4096), "lora_unet_layers_0_mlp_gate_proj": (12288, 4096)},
        {"diffusion_model.layers.35.mlp.linear_fc2": (4096, 12288)},
        {"transformer.layers.0.self_attention.to_out.0": (4096, 4096)},
    ),
)
