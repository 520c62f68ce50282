"""A made-up model family in one file, as a file beside patches/models/flux.py would be; test_made_up_family.py loads it
there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .block_names import BlockNames
from .diffusers_names import LayerNames, SwappedHalves, rename_by_table, square_qkv
from .family import Kohya, ModelFamily, ModelSpec, TrainingTargets
from .recognition import Recognition
from .routed_blocks import RoutedBlocks, RoutedClass, TokenRouting
from .token_layout import Layout, Place, TokenLayout, TransformerClass, patch_size, text_length, token_grid


def _layout(model: nn.Module, x: Tensor, context: Tensor | None, conditions: Mapping[str, Any]) -> Layout:
    """Image, then text."""
    grid = token_grid(x.shape, patch_size(model))
    image = grid[0] * grid[1]
    return Layout(1, grid, {image + text_length(context): Place(0)})


FAMILY = ModelFamily(
    name="rowan",
    title="Rowan",
    recognition=Recognition(names=(r"(branches|rowan_stages)_\d+_(mixer|swish|attn)",)),
    modelspec=ModelSpec("rowan-v1", "https://example.org/rowan"),
    kohya=Kohya("rowan1"),
    layer_names=LayerNames(
        rename=rename_by_table(
            (
                (r"^branches\.(\d+)\.mixer\.out$", r"rowan_stages.\1.attn.to_out.0"),
                (r"^branches\.(\d+)\.swish\.(\d)$", r"rowan_stages.\1.swish.linear_\2"),
                (r"^last_modulation$", "norm_out.linear"),
            )
        ),
        fused=(square_qkv(r"^branches\.(\d+)\.mixer\.qkv$", r"rowan_stages.\1.attn.to_{}"),),
        swapped=(SwappedHalves(r"^last_modulation$"),),
        model_sign=r"(^|\.)branches\.0\.mixer\.qkv\.",
    ),
    blocks=BlockNames(
        kinds=("R",),
        lists={"branches": "R", "rowan_stages": "R"},
        weight_lists={3: ("Rowan", ("BASE", "R00", "R01"))},
        presets={"ROWANTOP": {"R00": 0.0, "R01": 1.0}},
    ),
    token_layout=TokenLayout({"RowanTransformer": TransformerClass(_layout, patch_size, ("branches",))}),
    token_routing=TokenRouting({"RowanTransformer": RoutedClass((RoutedBlocks("branches", "x"),), _layout)}),
    training=TrainingTargets(attention=("mixer",), feed_forward=("swish",)),
    examples=({"diffusion_model.branches.0.mixer.qkv": (48, 16)},),
)
