"""Cosmos, Cosmos-Predict 2 and Anima."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .block_names import plain_blocks
from .family import Missing, ModelFamily, TrainingTargets
from .layer_names import LayerNames, same_name
from .recognition import Recognition
from .token_layout import Layout, Place, TokenLayout, TransformerClass, frame_count, text_length, token_grid

_ANIMA_TEXT = 512  # tokens that Anima makes of a shorter text


def _layout(model: nn.Module, x: Tensor, context: Tensor | None, conditions: Mapping[str, Any]) -> Layout:
    """The frames; the text has its own cross-attention."""
    frames = frame_count(x.shape[2], int(model.patch_temporal))  # type: ignore[arg-type]
    grid = token_grid(x.shape, _patch(model))
    total = frames * grid[0] * grid[1]
    t5_ids, text = conditions.get("t5xxl_ids"), text_length(context)
    if t5_ids is not None:
        text = max(_ANIMA_TEXT, t5_ids.shape[-1])
    period = 1
    if text == total:
        period = 2
    return Layout(frames, grid, {total: Place(0, period=period)})


def _patch(model: nn.Module) -> int:
    return int(model.patch_spatial)  # type: ignore[arg-type]


_CLASS = TransformerClass(_layout, _patch, ("blocks",))
FAMILY = ModelFamily(
    name="cosmos",
    title="Cosmos or Anima",
    recognition=Recognition(names=(r"blocks_\d+_(self|cross)_attn_[qkv]_proj", "adaln_modulation")),
    modelspec=Missing("modelspec names neither"),
    kohya=Missing("sd-scripts has no version for either that others read"),
    layer_names=LayerNames(prefix="transformer.", rename=same_name),
    blocks=plain_blocks("blocks"),
    token_layout=TokenLayout({"GeneralDIT": _CLASS, "MiniTrainDIT": _CLASS, "Anima": _CLASS}),
    training=TrainingTargets(attention=("self_attn", "cross_attn"), feed_forward=("mlp",)),
    examples=(
        {"diffusion_model.blocks.0.self_attn.q_proj": (2048, 2048)},
        {"diffusion_model.blocks.0.adaln_modulation_self_attn.1": (256, 2048)},
    ),
)
