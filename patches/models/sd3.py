"""SD3 and SD3.5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .block_names import plain_blocks
from .diffusers_names import LayerNames, SwappedHalves, equal_qkv, rename_by_table
from .family import Kohya, ModelFamily, ModelSpec, TrainingTargets
from .recognition import Recognition, SharedNames
from .routed_blocks import RoutedBlocks, RoutedClass, TokenRouting
from .token_layout import Layout, Place, TokenLayout, TransformerClass, patch_size, text_length, token_grid

_RENAMES = (
    (r"^joint_blocks\.(\d+)\.x_block\.attn\.proj$", r"transformer_blocks.\1.attn.to_out.0"),
    (r"^joint_blocks\.(\d+)\.x_block\.attn2\.proj$", r"transformer_blocks.\1.attn2.to_out.0"),
    (r"^joint_blocks\.(\d+)\.context_block\.attn\.proj$", r"transformer_blocks.\1.attn.to_add_out"),
    (r"^joint_blocks\.(\d+)\.x_block\.mlp\.fc1$", r"transformer_blocks.\1.ff.net.0.proj"),
    (r"^joint_blocks\.(\d+)\.x_block\.mlp\.fc2$", r"transformer_blocks.\1.ff.net.2"),
    (r"^joint_blocks\.(\d+)\.context_block\.mlp\.fc1$", r"transformer_blocks.\1.ff_context.net.0.proj"),
    (r"^joint_blocks\.(\d+)\.context_block\.mlp\.fc2$", r"transformer_blocks.\1.ff_context.net.2"),
    (r"^joint_blocks\.(\d+)\.x_block\.adaLN_modulation\.1$", r"transformer_blocks.\1.norm1.linear"),
    (r"^joint_blocks\.(\d+)\.context_block\.adaLN_modulation\.1$", r"transformer_blocks.\1.norm1_context.linear"),
    (r"^context_embedder$", "context_embedder"),
    (r"^x_embedder\.proj$", "pos_embed.proj"),
    (r"^final_layer\.linear$", "proj_out"),
    (r"^final_layer\.adaLN_modulation\.1$", "norm_out.linear"),
    (r"^t_embedder\.mlp\.0$", "time_text_embed.timestep_embedder.linear_1"),
    (r"^t_embedder\.mlp\.2$", "time_text_embed.timestep_embedder.linear_2"),
    (r"^y_embedder\.mlp\.0$", "time_text_embed.text_embedder.linear_1"),
    (r"^y_embedder\.mlp\.2$", "time_text_embed.text_embedder.linear_2"),
)


def _layout(model: nn.Module, x: Tensor, context: Tensor | None, conditions: Mapping[str, Any]) -> Layout:
    """Registers, text, image in joint attention; the image alone in the second attention of SD3.5 medium's first
    blocks.
    """
    text = text_length(context) + int(getattr(model, "register_length", 0))
    grid = token_grid(x.shape, patch_size(model))
    image = grid[0] * grid[1]
    return Layout(1, grid, {image: Place(0), text + image: Place(text)})


_ROUTED = RoutedBlocks("joint_blocks", 1, joint=False, returned=1)
_CLASS = TransformerClass(_layout, patch_size, ("joint_blocks",))
FAMILY = ModelFamily(
    name="sd3",
    title="SD3",
    recognition=Recognition(
        names=(r"joint_blocks_\d", "context_block"),
        shared_names=SharedNames(r"transformer_blocks_\d+_attn_(add_)?(to_)?[qkv]", (1536, 2432)),
    ),
    modelspec=ModelSpec("stable-diffusion-3", "https://github.com/Stability-AI/generative-models"),
    kohya=Kohya("sd3"),
    layer_names=LayerNames(
        rename=rename_by_table(_RENAMES),
        fused=(
            equal_qkv(r"^joint_blocks\.(\d+)\.x_block\.attn\.qkv$", r"transformer_blocks.\1.attn.to_{}"),
            equal_qkv(r"^joint_blocks\.(\d+)\.x_block\.attn2\.qkv$", r"transformer_blocks.\1.attn2.to_{}"),
            equal_qkv(r"^joint_blocks\.(\d+)\.context_block\.attn\.qkv$", r"transformer_blocks.\1.attn.add_{}_proj"),
        ),
        swapped=(
            SwappedHalves(r"^final_layer\.adaLN_modulation\.1$"),
            SwappedHalves(r"\.context_block\.adaLN_modulation\.1$", rows_per_column=2),  # of the last block alone
        ),
        model_sign=r"(^|\.)joint_blocks\.0\.x_block\.attn\.qkv\.",
        t5="3",
    ),
    blocks=plain_blocks("joint_blocks", "transformer_blocks"),
    token_layout=TokenLayout({"MMDiT": _CLASS, "OpenAISignatureMMDITWrapper": _CLASS}),
    token_routing=TokenRouting({"OpenAISignatureMMDITWrapper": RoutedClass((_ROUTED,), _layout)}),
    training=TrainingTargets(attention=("attn", "attn2"), feed_forward=("mlp",)),
    examples=(
        {"diffusion_model.joint_blocks.0.x_block.attn.qkv": (4608, 1536)},
        {"transformer.transformer_blocks.0.attn.to_q": (1536, 1536)},
        {"transformer.transformer_blocks.0.attn.to_q": (2432, 2432)},
    ),
)
