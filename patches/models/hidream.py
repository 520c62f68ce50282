"""HiDream-I1 and HiDream-E1, which edits. HiDream-O1 is another model, with other names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from . import flux
from .block_names import BlockNames
from .family import Missing, ModelFamily, TrainingTargets
from .recognition import Recognition
from .routed_blocks import RoutedBlocks, RoutedClass, TokenRouting
from .token_layout import Layout, Place, patch_size, text_length, token_grid


def _layout(model: nn.Module, x: Tensor, context: Tensor | None, conditions: Mapping[str, Any]) -> Layout:
    """Image, text of T5, text of Llama for all blocks, text of Llama for each block. The picture that HiDream-E1 edits
    is beside the image: its tokens skip too.
    """
    patch, sides = patch_size(model), list(x.shape)
    if conditions.get("image_cond") is not None:
        sides[-1] += conditions["image_cond"].shape[-1]
    grid = token_grid(sides, patch)
    image, text = grid[0] * grid[1], text_length(context) + 2 * conditions["encoder_hidden_states_llama3"].shape[-2]
    return Layout(1, grid, {image + text: Place(0, stream=(0, image))})


def _o1_layout(model: nn.Module, x: Tensor, context: Tensor | None, conditions: Mapping[str, Any]) -> Layout:
    """Text, image, reference images."""
    grid = token_grid(x.shape, patch_size(model))
    text = conditions["input_ids"].shape[1]
    total = text + grid[0] * grid[1]
    if conditions.get("ref_patches") is not None:
        total += conditions["ref_patches"].shape[1]
    return Layout(1, grid, {total: Place(text)})


_ROUTED = (
    RoutedBlocks("double_stream_blocks", "image_tokens", joint=False, positions=("rope",), returned=0, apart=True),
    RoutedBlocks("single_stream_blocks", "image_tokens", positions=("rope",), apart=True),
)
_ROUTED_O1 = RoutedBlocks("language_model.layers", "x", positions=("freqs_cis",), returned=0, shared=True)
FAMILY = ModelFamily(
    name="hidream",
    title="HiDream-I1",
    recognition=Recognition(names=(r"(double|single)_stream_blocks_\d+_block_",)),
    modelspec=Missing("modelspec names HiDream-O1 alone, which is another model"),
    blocks=BlockNames(
        kinds=flux.BLOCKS.kinds,
        lists={"double_stream_blocks": "D", "single_stream_blocks": "S"},
        last=("final_layer",),
    ),
    token_routing=TokenRouting(
        {
            "HiDreamImageTransformer2DModel": RoutedClass(_ROUTED, _layout),
            "HiDreamO1Transformer": RoutedClass((_ROUTED_O1,), _o1_layout),
        }
    ),
    training=TrainingTargets(
        attention=("attn1",),
        feed_forward=("ff_i", "ff_t"),
        on_request=("visual",),  # of HiDream-O1: it reads nothing but reference pictures
    ),
    examples=(
        {"lycoris_double_stream_blocks_0_block_attn1_to_q": (2560, 2560)},
        {"diffusion_model.single_stream_blocks.31.block.ff_i.experts.0.w1": (6912, 2560)},
        {"transformer.double_stream_blocks.15.block.attn1.to_out_t": (2560, 2560)},
    ),
)
