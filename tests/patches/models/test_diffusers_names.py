"""Layer names against diffusers' own models, and whose halves diffusers has the other way round."""

import diffusers
import pytest
import torch
from graft_nodes.patches.models.registry import FAMILIES

# ComfyUI's layers of a Wan model that also sees a picture (image to video).
WAN = (
    "time_embedding.0",
    "time_embedding.2",
    "time_projection.1",
    "text_embedding.0",
    "text_embedding.2",
    "img_emb.proj.1",
    "img_emb.proj.3",
    *(f"blocks.0.self_attn.{letter}" for letter in "qkvo"),
    *(f"blocks.0.cross_attn.{name}" for name in ("q", "k", "v", "o", "k_img", "v_img")),
    "blocks.0.ffn.0",
    "blocks.0.ffn.2",
    "head.head",
)


def layer_names(family):
    return FAMILIES.get(family).layer_names


def test_wans_layers_are_those_of_diffusers_one_by_one():
    sizes = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 16, "freq_dim": 16}
    with torch.device("meta"):
        model = diffusers.WanTransformer3DModel(text_dim=8, image_dim=8, added_kv_proj_dim=24, **sizes)
    theirs = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    ours = [part.name for path in WAN for part in layer_names("wan").parts(path, 24, 24)]
    assert sorted(ours) == sorted(theirs)
    tables = [name for name, _ in model.named_parameters() if name.endswith("scale_shift_table")]
    assert [layer_names("wan").rename(path) for path in ("head.modulation", "blocks.0.modulation")] == tables


@pytest.mark.parametrize(
    ("family", "path", "rows", "swapped"),
    [
        ("sd3", "final_layer.adaLN_modulation.1", 16, True),
        # diffusers' AdaLayerNormContinuous has (scale, shift), its AdaLayerNormZero begins with (shift, scale)
        ("sd3", "joint_blocks.23.context_block.adaLN_modulation.1", 16, True),
        ("sd3", "joint_blocks.0.context_block.adaLN_modulation.1", 48, False),
        ("sd3", "joint_blocks.0.x_block.adaLN_modulation.1", 16, False),
        ("flux", "final_layer.adaLN_modulation.1", 16, True),
        ("flux", "double_blocks.0.img_mod.lin", 48, False),
        ("hunyuan", "final_layer.adaLN_modulation.1", 16, True),
        ("hunyuan15", "final_layer.adaLN_modulation.1", 16, True),
        ("wan", "head.head", 16, False),
    ],
)
def test_scale_and_shift_are_the_other_way_round_where_diffusers_has_them_so(family, path, rows, swapped):
    assert layer_names(family).swaps_halves(path, rows, 8) is swapped
