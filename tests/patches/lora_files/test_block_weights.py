"""Block weights: lists and names, and the blocks that they mean."""

import pytest
from graft_nodes.patches.lora_files import block_weights
from graft_nodes.patches.lora_files.block_weights import (
    block_of,
    parse,
    parse_for_model,
    strength_of_weight,
    weight_lists,
)

FLUX = block_weights.diffusers_blocks(["transformer.single_transformer_blocks.0.attn.to_q.lora_A.weight"])
SD1 = [
    *(f"diffusion_model.input_blocks.{n}.1.w" for n in range(12)),
    "diffusion_model.middle_block.1.w",
    *(f"diffusion_model.output_blocks.{n}.1.w" for n in range(12)),
]


def test_blocks_of_weights():
    assert [
        block_of(f"diffusion_model.{path}.x.weight")
        for path in (
            "input_blocks.4",
            "middle_block.1",
            "output_blocks.11",
            "double_blocks.0",
            "single_blocks.37",
            "time_embed.0",
        )
    ] == ["IN04", "M00", "OUT11", "D00", "S37", "BASE"]


@pytest.mark.parametrize("length", weight_lists())
def test_lists_have_a_strength_a_block(length):
    assert len(set(weight_lists()[length][1])) == length
    assert list(parse(",".join(str(n) for n in range(length))).values()) == list(range(length))


def test_a_list_of_17():
    found = parse_for_model(",".join(str(n) for n in range(17)), SD1)
    assert (
        strength_of_weight(found, "diffusion_model.input_blocks.1.1.w") == 1
        and strength_of_weight(found, "diffusion_model.output_blocks.11.1.w") == 16
    )
    assert (
        strength_of_weight(found, "diffusion_model.input_blocks.0.0.w")
        == strength_of_weight(found, "clip_l.x", text=True)
        == 0
    )


def test_numbers_are_whole():
    """OUT1 is OUT01 and neither OUT10 nor OUT11; a name without a number is every block of its kind."""
    found, expected = parse("OUT=3, OUT1=0, T5=2"), {"OUT00": 3, "OUT01": 0, "OUT10": 3, "OUT11": 3, "T5": 2, "IN01": 1}
    assert {block: block_weights.strength_of_block(found, block) for block in expected} == expected
    assert parse_for_model("IN4=0", SD1) == {"IN4": 0.0}
    with pytest.raises(ValueError, match="this model has no OUT12, T51"):
        parse_for_model("OUT12=0, T51=1", SD1)


def test_names_and_beginnings_of_names():
    found = parse_for_model("IN=0, IN04=0.5, BASE=2", SD1)
    assert [strength_of_weight(found, weight) for weight in (SD1[3], SD1[4], SD1[12])] == [
        0,
        0.5,
        2,
    ] and strength_of_weight(found, "clip_l.x", text=True) == 2


def test_a_list_of_61_for_flux():
    """As sd-webui-lora-block-weight has it: CLIP, T5, IN, 19 double and 38 single blocks, OUT."""
    flux = [
        *(f"diffusion_model.double_blocks.{n}.img_attn.qkv.weight" for n in range(19)),
        "diffusion_model.final_layer.linear.weight",
        *(f"diffusion_model.single_blocks.{n}.linear1.weight" for n in range(38)),
        "diffusion_model.img_in.weight",
    ]
    found = parse_for_model(",".join(str(n) for n in range(61)), flux)
    assert [
        strength_of_weight(found, weight) for weight in (flux[0], flux[18], flux[20], flux[57], flux[-1], flux[19])
    ] == [
        3,
        21,
        22,
        59,
        2,
        60,
    ]
    assert [
        strength_of_weight(found, name, text=True)
        for name in ("clip_l.transformer.x.weight", "t5xxl.transformer.x.weight")
    ] == [0, 1]
    names = ("lora_te1_x", "lora_te3_x", "text_encoder_2.x", "text_encoders.t5xxl.x", "lora_te_x")
    assert [block_weights.text_block(name, FLUX) for name in names] == ["CLIP", "T5", "T5", "T5", "CLIP"]
    assert block_weights.text_block("lora_te2_x") == "CLIP"  # SDXL's
    with pytest.raises(ValueError, match=r"no D00.*expected a list of 17"):
        parse_for_model(",".join("1" * 61), SD1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,2", "got 2"),
        ("X3=1", "X3 is not a block"),
        ("IN=a", "expected numbers, got 'a'"),
        ("nan" + ",1" * 16, "expected numbers"),
        ("IN=-1000", "expected numbers, got '-1000'"),
        ("IN=1000", "expected numbers, got '1000'"),
        ("IN=-999.5, OUT=999.5", None),
        (",".join("1" * 20), None),
        (",".join("1" * 58), "no D00.*expected a list of 17"),
    ],
)
def test_wrong_lists(text, message):
    if message is None:
        assert parse_for_model(text, SD1)
        return
    with pytest.raises(ValueError, match=message):
        parse_for_model(text, SD1)


@pytest.mark.parametrize(
    ("layer", "block"),
    [
        ("input_blocks_4_1_proj_in", "IN04"),
        ("output_blocks.11.1.proj_in", "OUT11"),
        ("middle_block_1_proj_in", "M00"),
        ("down_blocks.1.attentions.0.proj_in", "IN04"),
        ("down_blocks_3_resnets_1_conv1", "IN11"),
        ("down_blocks_0_downsamplers_0_conv", "IN03"),
        ("up_blocks_3_attentions_2_proj_in", "OUT11"),
        ("up_blocks_1_upsamplers_0_conv", "OUT05"),
        ("mid_block.attentions.0.proj_in", "M00"),
        ("conv_in", "IN00"),
        ("double_blocks_3_img_attn_qkv", "D03"),
        ("single_transformer_blocks.4.attn.to_q", "S04"),
        ("joint_blocks_7_x_block_attn_qkv", "L07"),
        ("transformer_blocks.7.attn.to_q", "L07"),
        ("img_in", "IN"),
        ("final_layer.linear", "OUT"),
        ("time_embed_0", "BASE"),
    ],
)
def test_the_block_of_a_layer_in_a_file(layer, block):
    assert block_weights.block_of_name(layer) == block
    assert block_weights.block_of_name(layer, FLUX) == ("D07" if layer.startswith("transformer_blocks") else block)


def test_presets():
    """As sd-webui-lora-block-weight's preset file has them, for 17 blocks."""
    assert list(block_weights.parse("MIDD").values()) == [1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0]
    assert list(block_weights.parse("outall").values()) == [1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    assert (
        block_weights.strength_of_weight(block_weights.parse("ALL0.5"), "diffusion_model.double_blocks.3.x.weight")
        == 0.5
    )
    assert block_weights.parse_for_model("NONE", ["diffusion_model.layers.3.x.weight"]) == {"": 0.0}
