"""What a LoRA file says about itself, and which model it is for, from its header."""

import json
import os
import tracemalloc

import pytest
import torch
from graft_nodes.patches.lora_files import metadata
from graft_nodes.patches.models.registry import recognize_lora
from safetensors.torch import save_file

SDXL = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn2_to_k"


def factors(name, columns=8, rank=4, kind=torch.bfloat16):
    return {
        f"{name}.lora_up.weight": torch.ones(6, rank, dtype=kind),
        f"{name}.lora_down.weight": torch.ones(rank, columns, dtype=kind),
    }


def test_describe(tmp_path):
    path = str(tmp_path / "a.safetensors")
    conv = {
        "lora_unet_conv.lora_up.weight": torch.ones(6, 3, 1, 1),
        "lora_unet_conv.lora_down.weight": torch.ones(3, 4, 3, 3),
    }
    dora = {**factors("lora_te1_a"), "lora_te1_a.dora_scale": torch.ones(6, 1)}
    state = {
        **factors(SDXL, 2048),
        f"{SDXL}.alpha": torch.tensor(2.0),
        **conv,
        **dora,
        "lora_unet_n.diff": torch.ones(3),
    }
    state["odd"] = torch.ones(1)
    state["bundle_emb.<hat>.clip_l"] = torch.ones(2, 4)
    said = {
        "ss_todo_factor": "4 2",
        "ss_ema_decay": "0.99",
        "ss_tag_frequency": json.dumps({"10_x": {"zorp": 12, "b": 3}}),
        "graft_state": "k",
        "modelspec.trigger_phrase": "zorp",
        "modelspec.title": "Zorp",
        "ss_steps": "250",
        "ss_resolution": "(512, 512)",
    }
    save_file(state, path, said)
    found = metadata.describe(path)
    assert (
        json.loads(json.dumps(found))
        == found
        == {
            "file": "a.safetensors",
            "size": os.path.getsize(path),
            "layers": 4,
            "kinds": {"LoRA": 2, "LoCon": 1, "DoRA": 1, "diff": 1},
            "ranks": [3, 4],
            "alphas": [2.0],
            "types": {"BF16": 4, "F32": 7},
            "family": "sdxl",
            "base": "SDXL",
            "title": "Zorp",
            "words": "zorp",
            "tags": [["zorp", 12], ["b", 3]],
            "embeddings": ["hat"],
            "steps": "250",
            "resolution": "(512, 512)",
            "todo": {"factor": "4 2"},
            "ema": {"decay": "0.99"},
            "text_encoder": True,
            "from_graft": True,
        }
    )


def test_what_a_lora_was_trained_on_top_of(tmp_path):
    path = str(tmp_path / "a.safetensors")
    below = "style.safetensors at 0.8"
    save_file({"lora_unet_a.lora_up.weight": torch.ones(2, 1)}, path, {metadata.ON_TOP_OF: below})
    assert metadata.describe(path)["on_top_of"] == below
    assert f"on top of {below}" in metadata.summarize({metadata.ON_TOP_OF: below})


@pytest.mark.parametrize(
    ("said", "title"),
    [
        ({"ss_output_name": "zorp_v2"}, "zorp_v2"),
        ({"ss_output_name": "zorp_v2", "modelspec.title": "Zorp"}, "Zorp"),
        ({"ss_output_name": "zorp_v2", "modelspec.title": ""}, "zorp_v2"),
        ({}, ""),
    ],
)
def test_the_title_is_the_files_own_or_the_name_that_kohyas_scripts_gave_it(tmp_path, said, title):
    path = str(tmp_path / "x.safetensors")
    save_file(factors("lora_unet_x"), path, said)
    assert metadata.describe(path)["title"] == title


def test_contents():
    assert (
        metadata.summarize_contents({**factors(SDXL, 2048), **factors("lora_unet_x", rank=8)})
        == "2 LoRA, ranks 4 to 8, for SDXL"
    )
    assert metadata.summarize_contents({"a": torch.ones(1)}) == "no LoRA layers"


def test_contents_of_xlabs(tmp_path):
    layer = "double_blocks.0.processor.qkv_lora1"
    state = {f"{layer}.up.weight": torch.ones(9216, 16), f"{layer}.down.weight": torch.ones(16, 3072)}
    assert metadata.summarize_contents(state) == "1 LoRA, rank 16, for Flux"
    save_file(state, path := str(tmp_path / "x.safetensors"))
    found = metadata.describe(path)
    assert (found["layers"], found["kinds"], found["ranks"], found["family"]) == (1, {"LoRA": 1}, [16], "flux")


def test_describe_reads_no_tensor(tmp_path):
    """A file whose tensors were never written: sparse, with only its header and one alpha."""
    path = str(tmp_path / "big.safetensors")
    save_file({**factors("lora_unet_x"), "lora_unet_x.alpha": torch.tensor(1.0)}, path)
    with open(path, "rb") as file:
        text = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    end = max(of["data_offsets"][1] for of in text.values())
    text["lora_unet_y.diff"] = {"dtype": "F32", "shape": [1 << 38], "data_offsets": [end, end + (1 << 40)]}
    encoded = json.dumps(text).encode()
    with open(path, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        try:
            file.truncate(8 + len(encoded) + end + (1 << 40))
        except OSError:
            pytest.skip("this file system has no sparse files of 1 TB")
    assert metadata.describe(path)["kinds"] == {"LoRA": 1, "diff": 1}


@pytest.mark.parametrize(
    ("name", "columns", "family"),
    [
        ("lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k", 768, "sd1"),
        (SDXL, 2048, "sdxl"),
        (SDXL, 1024, "sd2"),
        ("unet.down_blocks.1.attentions.0.transformer_blocks.0.attn2.processor.to_v", 2048, "sdxl"),
        ("lora_unet_input_blocks_4_1_transformer_blocks_5_attn1_to_k", 640, "sdxl"),
        (SDXL, 24, None),
        ("lora_unet_double_blocks_0_img_attn_qkv", 3072, "flux"),
        ("transformer.single_transformer_blocks.0.attn.to_q", 3072, "flux"),
        ("transformer.transformer_blocks.0.attn.to_q", 3072, "flux"),
        ("transformer.transformer_blocks.0.attn.to_q", 1536, "sd3"),
        ("diffusion_model.joint_blocks.0.x_block.attn.qkv", 1536, "sd3"),
        ("diffusion_model.blocks.0.self_attn.q", 1536, "wan"),
        ("transformer.blocks.0.attn2.to_k", 5120, "wan"),
        ("lora_unet_blocks_0_cross_attn_k_img", 5120, "wan"),
        ("transformer.transformer_blocks.0.img_mlp.net.2", 12288, "qwen"),
        ("diffusion_model.layers.0.attention.qkv", 3840, "z-image"),
        ("transformer.layers.0.attn.to_q", 2304, "lumina"),
        ("diffusion_model.blocks.0.self_attn.q_proj", 2048, "cosmos"),
        ("transformer.transformer_blocks.3.attn1.to_q", 2048, "ltx"),
        ("lora_prior_unet_down_blocks_0_1_attention_attn", 2048, "cascade"),
        ("lora_te_text_model_encoder_layers_0_mlp_fc1", 768, None),
    ],
)
def test_families(name, columns, family):
    found = recognize_lora([(f"{name}.lora_down.weight", (4, columns)), (f"{name}.lora_up.weight", (9, 4))])
    assert (found.name if found else None) == family


@pytest.mark.parametrize(("length", "shown"), [(79, "x" * 79), (80, "x" * 80), (81, "x" * 79 + "…")])
def test_long_texts_are_cut_to_80_characters(length, shown):
    text = "x" * length
    assert metadata.summarize({"modelspec.title": text}) == f"title {shown}"
    tags = json.dumps({"10_x": {text: 2}})
    assert metadata.summarize({"ss_tag_frequency": tags}) == f"tags {shown} (2)"


def with_metadata(path, said):
    """A small LoRA file whose header has these texts by name."""
    layer = "lora_unet_input_blocks_1_1_transformer_blocks_0_attn1_to_q"
    save_file(
        {f"{layer}.lora_down.weight": torch.zeros(4, 8), f"{layer}.lora_up.weight": torch.zeros(8, 4)}, path, said
    )
    return str(path)


def peak_of(act):
    """The most bytes that Python held while `act()` ran."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "said",
    [
        {"modelspec.title": "x" * 20_000_000},
        {f"key {number}": "y" * 20 for number in range(600_000)},
        {"ss_tag_frequency": json.dumps({"folder": {f"tag {number}": 1 for number in range(1_200_000)}})},
    ],
    ids=["one text", "many texts", "tags"],
)
def test_a_header_of_20_mb_is_refused_before_it_is_parsed(tmp_path, said):
    path = with_metadata(tmp_path / "large.safetensors", said)

    def describe():
        with pytest.raises(ValueError, match=r"large\.safetensors has a header of [\d,]+ bytes, more than the 16,"):
            metadata.describe(path)

    assert peak_of(describe) < 1_000_000


@pytest.mark.parametrize(
    "said",
    [
        {"modelspec.title": "word " * 2_000_000},
        {"ss_trigger_words": ", ".join(map(str, range(1_000_000)))},
        {f"ss_todo_{number}": "y" for number in range(200_000)},
        {f"ss_ema_{number}": "y" * 1000 for number in range(5000)},
        {"ss_base_model_version": "x" * 10_000_000, "ss_steps": "1" * 1_000_000, "ss_resolution": "x" * 1_000_000},
        {"ss_network_alpha": "1" * 10_000_000},
        {"ss_tag_frequency": json.dumps({"folder": {"tag" * 200_000: 1, "plain": 2}})},
        {"ss_tag_frequency": json.dumps({"folder": {f"tag {number}": 1 for number in range(500_000)}})},
    ],
    ids=["title", "words", "todo", "ema", "base", "alpha", "long tag", "many tags"],
)
def test_what_is_shown_of_a_file_is_bounded(tmp_path, said):
    path = with_metadata(tmp_path / "long.safetensors", said)
    assert len(json.dumps(metadata.describe(path))) < 20_000
    assert len(metadata.summarize(said)) < 2000
