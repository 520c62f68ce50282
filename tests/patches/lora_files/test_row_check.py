"""What is wrong with a row's texts, and the blocks of its file."""

import pytest
import torch
from graft_nodes.patches.lora_files import row_check
from graft_nodes.patches.models import registry
from safetensors.torch import save_file


def file_of(tmp_path, *layers):
    tensors = {}
    for layer in layers:
        tensors[f"{layer}.lora_up.weight"] = torch.zeros(4, 1)
        tensors[f"{layer}.lora_down.weight"] = torch.zeros(1, 4)
    save_file(tensors, tmp_path / "a.safetensors")
    return str(tmp_path / "a.safetensors")


def test_blocks_are_listed_in_the_models_order(tmp_path):
    path = file_of(
        tmp_path,
        "lora_unet_up_blocks_1_attentions_0_transformer_blocks_0_attn1_to_q",
        "lora_unet_mid_block_attentions_0_proj_in",
        "lora_unet_down_blocks_0_attentions_1_proj_in",
        "lora_te_text_model_encoder_layers_0_mlp_fc1",
    )
    assert row_check.blocks_of(path) == ["CLIP", "IN02", "M00", "OUT03"]
    path = file_of(
        tmp_path,
        "transformer.single_transformer_blocks.11.attn.to_q",
        "transformer.transformer_blocks.3.attn.to_q",
        "transformer.single_transformer_blocks.2.attn.to_q",
        "text_encoder.text_model.encoder.layers.0.mlp.fc1",
    )
    assert row_check.blocks_of(path) == ["CLIP", "D03", "S02", "S11"]


def test_strengths_are_those_that_the_run_uses():
    blocks = ["CLIP", "IN02", "M00", "OUT03"]
    assert row_check.strengths(blocks, "") == row_check.strengths(blocks, "nonsense") == [1.0] * 4
    assert row_check.strengths(blocks, "IN=0, OUT03=0.5") == [1.0, 0.0, 1.0, 0.5]
    assert row_check.strengths(blocks, "BASE=0.3, IN=0") == [0.3, 0.0, 0.3, 0.3]
    assert row_check.strengths(blocks, "MIDD") == [1.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("blocks", "schedule", "wrong"),
    [
        ("", "", set()),
        ("OUTALL", "0.2-0.8", set()),
        ("1,2", "", {"blocks"}),
        ("IN=x", "0:1, 1", {"blocks", "schedule"}),
        ("ZZ=1", "", {"blocks"}),
    ],
)
def test_texts_are_checked_as_the_run_checks_them(blocks, schedule, wrong):
    found = row_check.check_texts(blocks, schedule)
    assert set(found) == wrong
    assert not any(text.startswith(("blocks:", "schedule:")) for text in found.values())


def test_blocks_of_another_family_are_said():
    assert row_check.foreign_blocks(["IN01", "OUT03"], "D=0, IN=1") == (
        "this file is for a model without D; its blocks are IN01, OUT03"
    )
    assert row_check.foreign_blocks(["D03"], "S=0, CLIP=1, BASE=1") == "", "another kind of block of the same family"
    assert row_check.foreign_blocks([], "D=0") == row_check.foreign_blocks(["IN01"], "") == ""


def test_every_family_with_blocks_has_a_place_for_each_of_its_kinds():
    kinds = {kind for names in registry.block_names() for kind in names.kinds}
    assert kinds <= set(row_check.ORDER)
