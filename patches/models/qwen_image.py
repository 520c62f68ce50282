"""Qwen-Image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .block_names import plain_blocks
from .family import ModelFamily, ModelSpec, TrainingTargets
from .recognition import Recognition, SharedNames
from .routed_blocks import REFERENCES, RoutedBlocks, RoutedClass, TokenRouting
from .token_layout import Layout, Place, TokenLayout, TransformerClass, patch_size, text_length, token_count, token_grid

_MORE_THAN_FLUX = (  # Flux has 19 such blocks, and other names in files that do not begin as diffusers' do
    r"(diffusion_model_|lora_unet_)transformer_blocks_\d|transformer_blocks_(19|[2-5]\d)_"
)


def _layout(model: nn.Module, x: Tensor, context: Tensor | None, conditions: Mapping[str, Any]) -> Layout:
    """Text, image (layers or frames one after the other), reference images."""
    patch, text = patch_size(model), text_length(context)
    grid, frames = token_grid(x.shape, patch), x.shape[2]
    references = 0
    for latent in conditions.get("ref_latents") or ():
        references += latent.shape[-3] * token_count(latent.shape, patch)
    return Layout(frames, grid, {text + frames * grid[0] * grid[1] + references: Place(text)})


def _unread(model: nn.Module) -> tuple[str, ...]:
    """The text half of the last block: only the image half is used after it."""
    blocks = getattr(model, "transformer_blocks", None)
    if not isinstance(blocks, nn.ModuleList) or not len(blocks) or not hasattr(blocks[-1], "txt_mlp"):
        return ()
    last = f"transformer_blocks.{len(blocks) - 1}."
    return f"{last}attn.add_q_proj", f"{last}attn.to_add_out", f"{last}txt_mlp"


_ROUTED = RoutedBlocks(
    "transformer_blocks",
    "hidden_states",
    joint=False,
    positions=("image_rotary_emb",),
    returned=1,
    absent={"timestep_zero_index": REFERENCES},
)
FAMILY = ModelFamily(
    name="qwen",
    title="Qwen-Image",
    recognition=Recognition(
        names=(r"transformer_blocks_\d+_(img|txt)_(mlp|mod)",),
        shared_names=SharedNames(r"transformer_blocks_\d+_attn_(add_)?(to_)?[qkv]", (3072,), also=_MORE_THAN_FLUX),
    ),
    modelspec=ModelSpec("Qwen-Image", "https://github.com/QwenLM/Qwen-Image"),
    blocks=plain_blocks("transformer_blocks"),
    token_layout=TokenLayout(
        {"QwenImageTransformer2DModel": TransformerClass(_layout, patch_size, ("transformer_blocks",))}
    ),
    token_routing=TokenRouting({"QwenImageTransformer2DModel": RoutedClass((_ROUTED,), _layout)}),
    training=TrainingTargets(attention=("attn",), feed_forward=("img_mlp", "txt_mlp"), unread=_unread),
    examples=(
        {"transformer.transformer_blocks.0.img_mlp.net.2": (3072, 12288)},
        {"diffusion_model.transformer_blocks.3.attn.to_q": (3072, 3072)},
        {"transformer.transformer_blocks.59.attn.to_q": (3072, 3072)},
    ),
)
