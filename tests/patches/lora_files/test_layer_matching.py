"""Names of layers beyond a host's own map; on models of ComfyUI's own classes see
tests/with_comfyui/checks/test_lora_names.py.
"""

import pytest
import torch
from graft_nodes.patches.lora_files.key_formats.registry import generic_keys
from graft_nodes.patches.lora_files.layer_matching import find_targets, join_targets
from graft_nodes.patches.lora_files.parse import Target
from graft_nodes.patches.models.diffusers_names import swap_halves

D = "diffusion_model."
WAN = {
    ("model", f"{D}blocks.0.{attention}.{letter}.weight"): (8, 8)
    for attention in ("self_attn", "cross_attn")
    for letter in "qkvo"
}
LUMINA = {
    ("model", f"{D}layers.0.attention.qkv.weight"): (16, 8),
    ("model", f"{D}layers.0.attention.out.weight"): (8, 8),
}
CLIP = {
    ("clip", f"{name}.weight"): (4, 4) for name in ("clip_l.transformer.a.b", "t5xxl.transformer.a.b", "clip_l.x.c.d")
}

TWO = {
    ("clip", f"clip_{which}.x.m.{name}.weight"): (4, 4) for which, names in (("l", "a"), ("g", "ab")) for name in names
}
SD3_WITHOUT_G = {("clip", f"{name}.weight"): (4, 4) for name in ("clip_l.x.text_model.a", "t5xxl.x.e")}
LLAMA_FIRST = {("clip", f"{name}.weight"): (4, 4) for name in ("llama.x.e", "clip_l.x.text_model.a")}
G_ALONE = {("clip", "clip_g.x.text_model.a.weight"): (4, 4)}
HUNYUAN = {
    ("model", f"{D}{name}.weight"): shape
    for name, shape in (
        ("img_in.proj", (8, 4, 1, 2, 2)),
        ("txt_in.individual_token_refiner.blocks.0.mlp.0", (8, 8)),
        ("final_layer.adaLN_modulation.1", (16, 8)),
    )
}
WAN_WITH_BIASES = WAN | {(space, name.replace(".weight", ".bias")): (8,) for space, name in WAN}
BESIDE_WAN = WAN | {("model", "model_sampling.table.weight"): (8, 8)}
LAST_NORM = f"{D}final_layer.adaLN_modulation.1.weight"
HUNYUAN_15 = {("model", LAST_NORM): (16, 8), ("model", f"{D}vision_in.proj.1.weight"): (8, 8)}
FLUX = {("model", f"{D}single_blocks.0.linear{n}.weight"): shape for n, shape in ((1, (40, 8)), (2, (8, 16)))}
FLUX |= {("model", f"{D}double_blocks.0.{stream}_attn.qkv.weight"): (24, 8) for stream in ("img", "txt")}


def generic(shapes):
    """What a host knows: its network's own names."""
    return {name.removesuffix(".weight"): Target(space, name) for space, name in shapes if name.startswith(D)}


@pytest.mark.parametrize(
    ("shapes", "name", "target"),
    [
        *(
            (WAN, f"{prefix}blocks{s}0{s}cross_attn{s}q", Target("model", f"{D}blocks.0.cross_attn.q.weight"))
            for prefix, s in (
                ("lora_unet_", "_"),
                ("lora_unet__", "_"),
                ("base_model.model.", "."),
                ("unet.base_model.model.", "."),
                ("model.diffusion_model.", "."),
                ("lycoris_", "_"),
                ("", "."),
            )
        ),
        (WAN, "transformer.blocks.0.attn2.to_out.0", Target("model", f"{D}blocks.0.cross_attn.o.weight")),
        (WAN_WITH_BIASES, "transformer.blocks.0.attn2.q.bias", None),  # half of a name of diffusers
        (BESIDE_WAN, "model_sampling.table", None),  # of the model, but not of its network
        (LUMINA, "transformer.layers.0.attn.to_q", Target("model", f"{D}layers.0.attention.qkv.weight", (0, 0, 8))),
        (LUMINA, "lora_unet_layers_0_attention_to_v", Target("model", f"{D}layers.0.attention.qkv.weight", (0, 12, 4))),
        (CLIP, "lora_te1_c_d", Target("clip", "clip_l.x.c.d.weight")),
        (CLIP, "text_encoder.c.d", Target("clip", "clip_l.x.c.d.weight")),
        (WAN, "lora_unet_blocks_1_cross_attn_q", None),
        (CLIP, "lora_te1_a_b", None),  # two encoders have it, and nothing says which
        (WAN, "whatever", None),
        *(
            (shapes, f"{second}text_model{s}a", None)
            for second, s in (("lora_te2_", "_"), ("text_encoder_2.", "."))
            for shapes in (
                SD3_WITHOUT_G,
                SD3_WITHOUT_G | LLAMA_FIRST,
                {("clip", "clip_l.x.text_model.a.weight"): (4, 4)},
            )
        ),
        *(
            (SD3_WITHOUT_G, f"{first}text_model{s}a", Target("clip", "clip_l.x.text_model.a.weight"))
            for first, s in (
                ("lora_te1_", "_"),
                ("lora_te_", "_"),
                ("text_encoder.", "."),
                ("base_model.model.", "."),
                ("", "."),
            )
        ),
        (LLAMA_FIRST, "text_encoder_2.text_model.a", Target("clip", "clip_l.x.text_model.a.weight")),
        *(
            (G_ALONE, f"lora_te{number}_text_model_a", Target("clip", "clip_g.x.text_model.a.weight"))
            for number in ("", "1", "2")
        ),
        (TWO, "lora_te1_m_a", Target("clip", "clip_l.x.m.a.weight")),
        (TWO, "lora_te2_m_a", Target("clip", "clip_g.x.m.a.weight")),
        *(
            (TWO, f"{first}m{s}a", Target("clip", "clip_l.x.m.a.weight"))
            for first, s in (("lora_te_", "_"), ("te.", "."))
        ),
        (TWO, "lora_te1_m_b", None),
        (SD3_WITHOUT_G | G_ALONE, "base_model.model.text_model.a", None),
        (HUNYUAN, "transformer.x_embedder.proj", Target("model", f"{D}img_in.proj.weight")),
        *(
            (shapes, "transformer.norm_out.linear", Target("model", LAST_NORM, None, swap_halves))
            for shapes in (HUNYUAN, HUNYUAN_15)
        ),
        (HUNYUAN, "diffusion_model.final_layer.adaLN_modulation.1", None),  # the host knows it, in its own order
        (
            FLUX,
            "diffusion_model.single_blocks.0.linear1_qkv",
            Target("model", f"{D}single_blocks.0.linear1.weight", (0, 0, 24)),
        ),
    ],
)
def test_found(shapes, name, target):
    assert find_targets([name], generic(shapes), shapes).get(name) == target


def test_halves_are_swapped_whole():
    rows = torch.arange(12.0).view(6, 2)
    assert torch.equal(swap_halves(rows), torch.cat([rows[3:], rows[:3]]))


def test_the_hosts_own_names_go_first():
    shapes = {("model", f"{D}a.weight"): (2, 2), ("model", f"{D}b.weight"): (2, 2)}
    known = {"lora_unet_a": Target("model", f"{D}b.weight")}
    assert find_targets(["lora_unet_a"], known, shapes) == {}
    assert find_targets(["lycoris_a"], known, shapes) == {}  # claimed by two: the host's name and the weight's own
    assert find_targets(["lycoris_b"], known, shapes) == {"lycoris_b": Target("model", f"{D}b.weight")}


KREA = {
    ("model", f"{D}{name}.weight"): shape
    for name, shape in {
        "blocks.0.attn.wq": (24, 24),
        "blocks.0.attn.wk": (8, 24),
        "blocks.0.attn.wv": (8, 24),
        "txtfusion.projector": (1, 12),
    }.items()
}
WAN = {("model", f"{D}blocks.0.cross_attn.{name}.weight"): (6, 6) for name in ("q", "k", "v", "k_img", "v_img")} | {
    ("model", f"{D}blocks.0.self_attn.{name}.weight"): (6, 6) for name in "qkv"
}
UNET = {("model", f"{D}middle_block.1.transformer_blocks.0.attn1.to_{letter}.weight"): (6, 6) for letter in "qkv"}


def weights_of(shapes, name):
    """[(last words of the weight, rows)] that a fused layer stands for."""
    known = generic(shapes)
    target = find_targets([name], known, shapes).get(name)
    return target and [(".".join(piece.weight.split(".")[-3:-1]), piece.part) for piece in target.pieces]


@pytest.mark.parametrize(
    ("shapes", "name", "expected"),
    [
        (
            KREA,
            "transformer.transformer_blocks.0.attn.to_qkv",
            [("attn.wq", None), ("attn.wk", None), ("attn.wv", None)],
        ),
        (KREA, "lora_unet_blocks_0_attn_wqkv", [("attn.wq", None), ("attn.wk", None), ("attn.wv", None)]),
        (FLUX, "transformer.transformer_blocks.0.attn.to_qkv", [("img_attn.qkv", (0, 0, 24))]),
        (FLUX, "lora_transformer_transformer_blocks_0_attn_to_added_qkv_", [("txt_attn.qkv", (0, 0, 24))]),
        (FLUX, "transformer.single_transformer_blocks.0.attn.to_qkv", [("0.linear1", (0, 0, 24))]),
        (
            WAN,
            "transformer.blocks.0.attn1.to_qkv",
            [("self_attn.q", None), ("self_attn.k", None), ("self_attn.v", None)],
        ),
        (WAN, "transformer.blocks.0.attn2.to_kv", [("cross_attn.k", None), ("cross_attn.v", None)]),
        (WAN, "transformer.blocks.0.attn2.to_added_kv", [("cross_attn.k_img", None), ("cross_attn.v_img", None)]),
        (
            UNET,
            "lycoris_middle_block_1_transformer_blocks_0_attn1_to_qkv",
            [("attn1.to_q", None), ("attn1.to_k", None), ("attn1.to_v", None)],
        ),
        (UNET, "lycoris_middle_block_1_transformer_blocks_0_attn2_to_qkv", None),
    ],
)
def test_layers_for_several_weights_in_one(shapes, name, expected):
    assert weights_of(shapes, name) == expected


def test_rows_that_follow_each_other_are_one_part():
    first, second = (Target("model", "a", (0, start, 4)) for start in (0, 4))
    assert join_targets([first, second]) == Target("model", "a", (0, 0, 8))
    assert join_targets([second, first]).pieces == (second, first)
    turned = second._replace(function=swap_halves)
    assert join_targets([first, turned]).pieces == (first, turned)


def test_a_name_may_end_in_an_underscore():
    name = "lora_unet_transformer_blocks_0_attn_to_q_"
    assert find_targets([name], generic(FLUX), FLUX)[name].part == (0, 0, 8)


def test_the_hosts_name_for_a_weight_that_is_not_there_does_not_count():
    shapes = {("model", f"{D}b.weight"): (2, 2)}
    known = {"b": Target("model", f"{D}other.weight")}
    assert find_targets(["b"], known, shapes) == {"b": Target("model", f"{D}b.weight")}


def test_rows_that_the_host_has_wrong_are_mended():
    """Of a layer that is wider than Flux': the host counts four rows a column."""
    name = "transformer.single_transformer_blocks.0.proj_mlp"
    shapes = FLUX | {("model", f"{D}single_blocks.0.linear1.weight"): (24 + 64, 8)}
    known = generic(shapes) | {name: Target("model", f"{D}single_blocks.0.linear1.weight", (0, 24, 32))}
    assert find_targets([name], known, shapes)[name].part == (0, 24, 64)


def test_xlabs_names():
    state = {"double_blocks.3.processor.qkv_lora2.down.weight": 1, "single_blocks.4.processor.proj_lora.up.weight": 2}
    assert generic_keys(state) == {
        f"{D}double_blocks.3.txt_attn.qkv.lora_down.weight": 1,
        f"{D}single_blocks.4.linear2.lora_up.weight": 2,
    }
    other = {"a.lora_up.weight": 1}
    assert generic_keys(other) is other
