"""Layers whose output nothing reads: a LoRA on them could not learn. Which they are, path by path."""

import pytest
from graft_nodes.tests.training.recipes.real_sizes import build
from graft_nodes.training.trainable.settings import AdapterSettings
from graft_nodes.training.trainable.targets import adapter_targets
from torch import nn

SIDE = (4, 4)
QWEN = [f"transformer_blocks.{{}}.{layer}" for layer in ("attn.to_q", "attn.add_q_proj", "attn.to_add_out", "txt_mlp")]
ACE = [f"transformer_blocks.{{}}.cross_attn.{layer}" for layer in ("to_q", "add_q_proj", "add_k_proj", "to_add_out")]
HUNYUAN = [f"double_blocks.{{}}.{layer}" for layer in ("img_attn.proj", "txt_attn.qkv", "txt_attn.proj", "txt_mlp.0")]
LTX = [f"transformer_blocks.{{}}.{layer}" for layer in ("attn1.to_q", "audio_attn1.to_q", "video_to_audio_attn.to_q")]


def both(layers):
    """The layers of blocks 0 and 1."""
    return [layer.format(number) for number in (0, 1) for layer in layers]


CASES = {
    "Qwen-Image: the text half of the last block": (
        both(QWEN),
        [
            "transformer_blocks.1.attn.add_q_proj",
            "transformer_blocks.1.attn.to_add_out",
            "transformer_blocks.1.txt_mlp",
        ],
    ),
    "ACE-Step: heads of other trainers, the speaker, what its attention has for a text beside the sound": (
        [*both(ACE), "lyric_proj", "projectors.0.0", "speaker_embedder", "genre_embedder"],
        [
            *(layer for layer in both(ACE) if not layer.endswith("to_q")),
            "projectors.0.0",
            "speaker_embedder",
        ],
    ),
    "ACE-Step 1.5: its codes": (
        ["decoder.layers.0.self_attn.q_proj", "tokenizer.proj", "detokenizer.proj"],
        ["tokenizer.proj", "detokenizer.proj"],
    ),
    "OmniGen2: references": (
        ["layers.0.attn.to_q", "ref_image_patch_embedder", "ref_image_refiner.0.attn.to_q"],
        ["ref_image_patch_embedder", "ref_image_refiner.0.attn.to_q"],
    ),
    "Wan: CLIP vision": (["blocks.0.self_attn.q", "img_emb.proj.1"], ["img_emb.proj.1"]),
    "HunyuanVideo 1.5: CLIP vision and the text half of the last block": (
        [*both(HUNYUAN), "vision_in.proj.1"],
        ["double_blocks.1.txt_attn.proj", "double_blocks.1.txt_mlp.0", "vision_in.proj.1"],
    ),
    "HunyuanVideo: single blocks read the text": (
        [*both(HUNYUAN), "single_blocks.0.linear1", "vision_in.proj.1"],
        ["vision_in.proj.1"],
    ),
}


def chosen(layers, **settings):
    network = build(dict.fromkeys(layers, SIDE))
    if hasattr(network, "double_blocks") and not hasattr(network, "single_blocks"):
        network.single_blocks = nn.ModuleList()  # HunyuanVideo 1.5's, which has none
    return set(adapter_targets(network, AdapterSettings(targets="all", **settings)))


@pytest.mark.parametrize(("layers", "unread"), CASES.values(), ids=CASES)
def test_what_nothing_reads_is_not_trained(layers, unread):
    assert chosen(layers) == set(layers) - set(unread)


def test_layers_for_sound_are_trained_with_sound():
    layers = [*both(LTX), "audio_patchify_proj", "av_ca_a2v_gate_adaln_single.linear", "patchify_proj"]
    silent = {"transformer_blocks.0.attn1.to_q", "transformer_blocks.1.attn1.to_q", "patchify_proj"}
    assert chosen(layers) == silent
    assert chosen(layers, with_sound=True) == set(layers)
