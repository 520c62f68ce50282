"""config.json of a UNet against diffusers' own class and the published models."""

import pytest
import torch
from graft_nodes.patches.models.diffusers_config import diffusers_config

COMMON = {"in_channels": 4, "out_channels": 4, "model_channels": 320}
FULL = {  # ComfyUI's unet_config of each, and what config.json says on the hub
    "SD 1.5": (
        {
            **COMMON,
            "num_res_blocks": [2] * 4,
            "channel_mult": [1, 2, 4, 4],
            "transformer_depth": [1] * 6 + [0] * 2,
            "transformer_depth_output": [1] * 9 + [0] * 3,
            "transformer_depth_middle": 1,
            "context_dim": 768,
            "num_heads": 8,
            "num_head_channels": -1,
            "use_linear_in_transformer": False,
        },
        {"block_out_channels": [320, 640, 1280, 1280], "attention_head_dim": 8, "cross_attention_dim": 768},
        859_520_964,
    ),
    "SD 2.1": (
        {
            **COMMON,
            "num_res_blocks": [2] * 4,
            "channel_mult": [1, 2, 4, 4],
            "transformer_depth": [1] * 6 + [0] * 2,
            "transformer_depth_output": [1] * 9 + [0] * 3,
            "transformer_depth_middle": 1,
            "context_dim": 1024,
            "num_heads": -1,
            "num_head_channels": 64,
            "use_linear_in_transformer": True,
        },
        {"attention_head_dim": [5, 10, 20, 20], "cross_attention_dim": 1024, "use_linear_projection": True},
        865_910_724,
    ),
    "SDXL": (
        {
            **COMMON,
            "num_res_blocks": [2] * 3,
            "channel_mult": [1, 2, 4],
            "transformer_depth": [0, 0, 2, 2, 10, 10],
            "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
            "transformer_depth_middle": 10,
            "context_dim": 2048,
            "num_heads": -1,
            "num_head_channels": 64,
            "use_linear_in_transformer": True,
            "adm_in_channels": 2816,
        },
        {
            "block_out_channels": [320, 640, 1280],
            "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
            "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
            "transformer_layers_per_block": [1, 2, 10],
            "attention_head_dim": [5, 10, 20],
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
            "sample_size": 128,
        },
        2_567_463_684,
    ),
}


@pytest.mark.parametrize("name", FULL)
def test_a_config_is_diffusers_own_at_full_size(name):
    """With as many parameters as the published model."""
    diffusers = pytest.importorskip("diffusers")
    config, published, count = FULL[name]
    made = diffusers_config(config)
    assert {key: made[key] for key in published} == published
    with torch.device("meta"):
        unet = diffusers.UNet2DConditionModel.from_config(made)
    assert sum(weight.numel() for weight in unet.parameters()) == count


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_res_blocks": [1] * 4}, "this is another model"),
        ({"context_dim": None, "num_res_blocks": [2] * 3}, "this is another model"),
        ({"transformer_depth": [1, 2, 1, 1, 1, 1, 0, 0]}, "blocks of several depths"),
        ({"transformer_depth_middle": -1}, "middle block is of another depth"),
    ],
)
def test_other_layouts_have_no_config(changed, said):
    with pytest.raises(ValueError, match=said):
        diffusers_config({**FULL["SD 1.5"][0], **changed})
