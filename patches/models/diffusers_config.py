"""The config.json of diffusers' UNet for a UNet of ComfyUI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def diffusers_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of diffusers' UNet2DConditionModel for a UNet of ComfyUI's `unet_config`, with two residual
    blocks per level.

    Raises:
        ValueError: for another layout, as of other families.
    """
    if (
        list(config.get("num_res_blocks", ())) != [2] * len(config.get("channel_mult", ()))
        or "context_dim" not in config
    ):
        raise ValueError("diffusers' UNet2DConditionModel has SD 1.x, SD 2.x and SDXL, and this is another model")
    channels = [config["model_channels"] * factor for factor in config["channel_mult"]]
    depths, ups, middle = (
        config["transformer_depth"],
        config["transformer_depth_output"],
        config["transformer_depth_middle"],
    )
    levels = list(depths[::2])
    if list(depths) != [depth for depth in levels for _ in range(2)] or list(ups) != [
        depth for depth in levels for _ in range(3)
    ]:
        raise ValueError("its levels have blocks of several depths, which diffusers' UNet2DConditionModel has not")
    if middle < 1 or (levels[-1] and levels[-1] != middle):
        raise ValueError("its middle block is of another depth than its last level, which diffusers does not write so")
    heads: int | list[int] = config["num_heads"]
    if config.get("num_head_channels", -1) > 0:
        heads = [width // config["num_head_channels"] for width in channels]
    made: dict[str, Any] = {
        "_class_name": "UNet2DConditionModel",
        "in_channels": config["in_channels"],
        "out_channels": config["out_channels"],
        "sample_size": 64,
        "block_out_channels": channels,
        "layers_per_block": 2,
        "down_block_types": ["CrossAttnDownBlock2D" if depth else "DownBlock2D" for depth in levels],
        "up_block_types": ["CrossAttnUpBlock2D" if depth else "UpBlock2D" for depth in reversed(levels)],
        "transformer_layers_per_block": [depth or 1 for depth in levels[:-1]] + [middle],
        "attention_head_dim": heads,  # diffusers' name for the number of heads
        "cross_attention_dim": config["context_dim"],
        "use_linear_projection": config["use_linear_in_transformer"],
    }
    if config.get("adm_in_channels"):
        made.update(
            sample_size=128,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=config["adm_in_channels"],
        )
    return made
