"""AuraFlow."""

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
    """Registers, text, image."""
    registers: Any = model.register_tokens
    text, grid = registers.shape[1] + text_length(context), token_grid(x.shape, patch_size(model))
    return Layout(1, grid, {text + grid[0] * grid[1]: Place(text)})


_ROUTED = RoutedBlocks("double_layers", "x", joint=False, returned=1), RoutedBlocks("single_layers", "cx")
FAMILY = ModelFamily(
    name="auraflow",
    title="AuraFlow",
    recognition=Recognition(names=(r"joint_transformer_blocks_\d", r"(double|single)_layers_\d")),
    blocks=plain_blocks("layers", "transformer_blocks"),
    token_routing=TokenRouting({"MMDiT": RoutedClass(_ROUTED, _layout)}),
    training=TrainingTargets(attention=("attn",), feed_forward=("mlp",)),
    examples=(
        {"joint_transformer_blocks.0.attn.to_q": (3072, 3072)},
        {"diffusion_model.double_layers.0.attn.w1q": (3072, 3072)},
    ),
)
