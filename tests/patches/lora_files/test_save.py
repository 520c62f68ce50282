"""Saved names, spelled out, and the deltas that they stand for."""

import hashlib

import pytest
import torch
from graft_nodes.patches.lora_files.parse import Target, read
from graft_nodes.patches.lora_files.save import build_metadata, kohya_hashes, names_comfyui_ignores, to_key_format
from graft_nodes.patches.models.registry import recognize_lora
from safetensors.torch import save

BASE = "diffusion_model.input_blocks.1.1.proj_in"
LORA = {
    f"{BASE}.lora_up.weight": torch.randn(6, 4),
    f"{BASE}.lora_down.weight": torch.randn(4, 8),
    f"{BASE}.alpha": torch.tensor(2.0),
}
FULL = {f"{BASE}.diff": torch.randn(6, 8), f"{BASE}.diff_b": torch.randn(6)}
EXPECTED = {
    "kohya": {f"lora_unet_input_blocks_1_1_proj_in.{end}" for end in ("lora_up.weight", "lora_down.weight", "alpha")},
    "peft": {f"{BASE}.lora_A.weight", f"{BASE}.lora_B.weight"},
    "comfyui": set(LORA),
}


@pytest.mark.parametrize("names", EXPECTED)
def test_names_and_the_same_change(names):
    saved = to_key_format(LORA, names, torch.float32)
    assert set(saved) == EXPECTED[names]
    target = Target("model", f"{BASE}.weight")
    keys = {BASE: target, "lora_unet_input_blocks_1_1_proj_in": target}
    ((layer,),) = read(saved, keys, {("model", f"{BASE}.weight"): (6, 8)}, "x").layers.values()
    exact = 2.0 / 4 * LORA[f"{BASE}.lora_up.weight"] @ LORA[f"{BASE}.lora_down.weight"]
    assert torch.allclose(layer.delta((6, 8)), exact, atol=1e-6)


def test_types():
    saved = to_key_format(LORA, "kohya", torch.bfloat16)
    assert {key.rpartition("proj_in.")[2]: tensor.dtype for key, tensor in saved.items()} == {
        "lora_up.weight": torch.bfloat16,
        "lora_down.weight": torch.bfloat16,
        "alpha": torch.float32,
    }


def test_differences_have_kohya_names_and_no_peft_names():
    assert set(to_key_format(FULL, "kohya", torch.float32)) == {
        f"lora_unet_input_blocks_1_1_proj_in.{end}" for end in ("diff", "diff_b")
    }
    with pytest.raises(ValueError, match="PEFT has no name for diff, diff_b; save with kohya or comfyui names"):
        to_key_format(FULL, "peft", torch.float32)


ATTENTION = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to"


@pytest.mark.parametrize(
    "base", [f"unet.{ATTENTION}_out.0", f"unet.{ATTENTION.replace('.to', '.processor.to')}_out", f"{ATTENTION}_out.0"]
)
@pytest.mark.parametrize("names", ["kohya", "comfyui"])
def test_diffusers_names_of_merged_files_become_kohyas(base, names):
    """ComfyUI reads no others of a UNet with factors of any form."""
    state = {
        f"{name}.lora_{side}.weight": torch.ones(2, 2)
        for side in ("up", "down")
        for name in (base, "text_encoder.text_model.a.q", "text_encoder_2.a.fc1", "transformer.a.b", "lora_unet_c")
    }
    flat = ATTENTION.replace(".", "_")
    assert {key.removesuffix(".weight").rpartition(".")[0] for key in to_key_format(state, names, torch.float32)} == {
        f"lora_unet_{flat}_out_0",
        "lora_te1_text_model_a_q",
        "lora_te2_a_fc1",
        "transformer.a.b",
        "lora_unet_c",
    }


def test_files_names_that_peft_cannot_have_are_refused():
    state = {f"lora_unet_{name}.lora_{side}.weight": torch.ones(2, 2) for side in ("up", "down") for name in "ab"}
    with pytest.raises(
        ValueError, match=r"- 2 layers have a file's names.*\(lora_unet_a, lora_unet_b\); connect model to Merge LoRAs"
    ):
        to_key_format(state, "peft", torch.float32)
    old = {
        f"unet.{ATTENTION.replace('.to', '.processor.to')}_{part}.lora_{side}.weight": torch.ones(2, 2)
        for side in ("up", "down")
        for part in ("q", "out")
    }
    saved = {key.partition(".lora")[0] for key in to_key_format(old, "peft", torch.float32)}
    assert saved == {f"unet.{ATTENTION}_q", f"unet.{ATTENTION}_out.0"}


def test_diffusers_takes_layers_of_several_ranks_as_they_are():
    """It has one alpha for a whole part of a model: what it works out for every layer must be what was saved."""
    utils = pytest.importorskip("diffusers.utils.peft_utils")
    lora = {}
    for layer, rank, kernel in (("a", 2, ()), ("b", 8, ()), ("c", 3, (3, 3))):
        base = f"diffusion_model.input_blocks.1.1.transformer_blocks.0.attn2.to_k.{layer}"
        ones = (1,) * len(kernel)
        lora[f"{base}.lora_up.weight"], lora[f"{base}.lora_down.weight"] = (
            torch.randn(4, rank, *ones),
            torch.randn(rank, 768, *kernel),
        )
        lora[f"{base}.alpha"] = torch.tensor(2.0)
    saved = to_key_format(lora, "peft", torch.float32)
    ranks = {key.replace("lora_A", "lora_B"): value.shape[0] for key, value in saved.items() if "lora_A" in key}
    said = utils.get_peft_kwargs(ranks, None, saved)
    for key, up in lora.items():
        if key.endswith(".lora_up.weight"):
            name = f"unet.{layer_of(key)}"
            scale = said["lora_alpha"] / said["r"]
            assert not said["rank_pattern"] and not said["alpha_pattern"]
            theirs = scale * saved[f"{name}.lora_B.weight"].flatten(1) @ saved[f"{name}.lora_A.weight"].flatten(1)
            rank = up.shape[1]
            assert torch.allclose(
                theirs, 2.0 / rank * up.flatten(1) @ lora[key.replace("up.w", "down.w")].flatten(1), atol=1e-4
            )


def layer_of(key):
    """diffusers' name of a made-up layer inside SD1.x's first transformer."""
    inside = key.partition("transformer_blocks.0.")[2].partition(".lora")[0]
    return f"down_blocks.0.attentions.0.transformer_blocks.0.{inside}"


def test_the_refiners_unet_has_diffusers_names_too():
    layers = {"input_blocks.4.1.transformer_blocks.0.attn2.to_k": (768, 1280), "middle_block.1.proj_in": (1536, 1536)}
    saved = {key.partition(".lora")[0] for key in to_key_format(of_layers(layers), "peft", torch.float32)}
    assert saved == {
        "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k",
        "unet.mid_block.attentions.0.proj_in",
    }


def test_text_encoders_keep_the_generic_form():
    state = {"text_encoders.a.lora_up.weight": torch.ones(2, 1), "text_encoders.a.lora_down.weight": torch.ones(1, 2)}
    assert set(to_key_format(state, "kohya", torch.float32)) == set(state)


def test_a_models_own_parameter_keeps_the_generic_form():
    """Of `<name>.weight` ComfyUI knows the kohya name, of a parameter that is not a weight of a module it does not."""
    own = {
        f"diffusion_model.{name}.diff": torch.ones(1, 6, 8)
        for name in ("blocks.0.modulation", "head.modulation", "x_pad_token")
    }
    norm = {"diffusion_model.blocks.0.norm3.diff": torch.ones(8)}
    saved = to_key_format(own | norm | of_layers({"single_blocks.0.modulation.lin": (8, 8)}), "kohya", torch.float32)
    others = {
        f"lora_unet_single_blocks_0_modulation_lin.{end}" for end in ("lora_up.weight", "lora_down.weight", "alpha")
    }
    assert set(saved) == set(own) | {"lora_unet_blocks_0_norm3.diff"} | others


def test_parameters_beside_layers_are_known():
    names = ("blocks.0.modulation", "blocks.0.self_attn.q", "head.modulation", "x_pad_token", "norm.scale", "a.b")
    lora = {f"diffusion_model.{name}.diff": torch.ones(1, 6, 8) for name in names}
    lora |= of_layers({"single_blocks.0.modulation": (8, 8)})  # a module of that name
    lora |= {f"diffusion_model.patch_embedding.{role}": torch.ones(8) for role in ("diff", "diff_b")}  # Wan's
    assert names_comfyui_ignores(lora) == ["blocks.0.modulation", "head.modulation", "x_pad_token"]


@pytest.mark.parametrize("kernel", [(), (3, 3)])
def test_pefts_magnitudes_are_of_rows(kernel):
    """Also where a weight has as many columns: against PEFT's own definition, in float64."""
    ones, generator = (1,) * len(kernel), torch.Generator().manual_seed(0)
    up, down, magnitude, weight = (
        torch.rand(shape, generator=generator)
        for shape in ((8, 2, *ones), (2, 8, *kernel), (1, 8, *ones) if kernel else (8,), (8, 8, *kernel))
    )
    name = "a.lora_magnitude_vector" + (".weight" if kernel else "")
    saved = to_key_format({"a.lora_B.weight": up, "a.lora_A.weight": down, name: magnitude}, "comfyui", torch.float32)
    assert saved["a.dora_scale"].shape == (8, 1, *ones)  # ComfyUI multiplies with it as it is
    ((layer,),) = read(
        saved, {"a": Target("model", "a.weight")}, {("model", "a.weight"): weight.shape}, "x"
    ).layers.values()
    changed = weight.double() + (up.double().flatten(1) @ down.double().flatten(1)).reshape(weight.shape)
    rows = magnitude.double().flatten() / changed.flatten(1).norm(dim=1)
    assert torch.allclose(layer.apply(weight).double(), changed * rows.reshape(8, 1, *ones), atol=1e-5)


@pytest.mark.parametrize(("lora", "message"), [({}, "it is empty"), ({"x": torch.ones(1)}, "x: not a LoRA tensor")])
def test_what_cannot_be_saved(lora, message):
    with pytest.raises(ValueError, match=message):
        to_key_format(lora, "kohya", torch.float32)


def test_a_rank_is_not_said_beside_a_lokr_that_has_none():
    """Readers that know the rank divide a LoKr's alpha by it."""
    lokr = {
        "diffusion_model.b.lokr_w1": torch.ones(2, 2),
        "diffusion_model.b.lokr_w2": torch.ones(3, 4),
        "diffusion_model.b.alpha": torch.tensor(1.0),
    }
    assert "ss_network_dim" not in build_metadata(LORA | lokr, "x", {})
    product = {"diffusion_model.b.lokr_w1": torch.ones(2, 2), "diffusion_model.b.lokr_w2_a": torch.ones(3, 2)}
    assert "ss_network_dim" in build_metadata(LORA | product, "x", {})


def test_metadata():
    assert build_metadata(LORA, "graft", {"ss_steps": "9"}) == {
        "format": "pt",
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.title": "graft",
        "ss_network_module": "networks.lora",
        "modelspec.implementation": "https://github.com/comfyanonymous/ComfyUI",
        "ss_output_name": "graft",
        "ss_network_dim": "4",
        "ss_network_alpha": "2",
        "ss_steps": "9",
    }
    said = build_metadata(of_layers({"input_blocks.1.1.transformer_blocks.0.attn2.to_k": (320, 768)}), "x", {})
    assert (
        said["modelspec.architecture"] == "stable-diffusion-v1/lora" and said["modelspec.implementation"] == "diffusers"
    )
    assert said["ss_base_model_version"] == "sd_v1" and said["ss_v2"] == "False"
    second = build_metadata(of_layers({"input_blocks.1.1.transformer_blocks.0.attn2.to_k": (320, 1024)}), "x", {})
    assert second["ss_v2"] == "True" and "modelspec.architecture" not in second  # 512 or 768-v: its names do not say


@pytest.mark.parametrize("rows", [8, 300_000])
def test_hashes_are_those_of_sd_scripts(rows):
    """Its rule, on the file that the safetensors library writes of the tensors and their ss_ metadata."""
    tensors = {
        "b.lora_up.weight": torch.randn(rows, 2),
        "a.lora_down.weight": torch.randn(2, 8),
        "a.alpha": torch.tensor(2.0),
    }
    said = {"ss_steps": "9", "ss_output_name": "ä", "modelspec.title": "not hashed"}
    content = save(tensors, {"ss_steps": "9", "ss_output_name": "ä"})
    start = 8 + int.from_bytes(content[:8], "little")
    assert kohya_hashes(tensors, said) == {
        "sshs_model_hash": hashlib.sha256(content[start:]).hexdigest(),
        "sshs_legacy_hash": hashlib.sha256(content[0x100000:0x110000]).hexdigest()[:8],
    }


# --- what other tools read ---


def of_layers(layers, alpha=1.0):
    """A LORA_MODEL of rank 2 on layers of a model: {path: (rows, columns)}."""
    generator, state = torch.Generator().manual_seed(0), {}
    for path, (rows, columns) in layers.items():
        state[f"diffusion_model.{path}.lora_up.weight"] = torch.randn(rows, 2, generator=generator)
        state[f"diffusion_model.{path}.lora_down.weight"] = torch.randn(2, columns, generator=generator)
        state[f"diffusion_model.{path}.alpha"] = torch.tensor(alpha)
    return state


def changes(state):
    """{layer: up @ down, seen by one vector} of a state dict in PEFT's names."""
    layers = [key.removesuffix(".lora_A.weight") for key in state if key.endswith(".lora_A.weight")]
    vector = torch.randn(20000, generator=torch.Generator().manual_seed(9))
    downs = {layer: state[f"{layer}.lora_A.weight"] for layer in layers}
    return {layer: state[f"{layer}.lora_B.weight"] @ (down @ vector[: down.shape[1]]) for layer, down in downs.items()}


def same(first, second):
    first, second = changes(first), changes(second)
    assert first.keys() == second.keys() and first
    assert all(torch.allclose(first[layer], second[layer], atol=1e-2, rtol=1e-4) for layer in first)


def generic(state):
    """ComfyUI's names with PEFT's factors, alpha in B."""
    out = {}
    for key, value in state.items():
        base, _, role = key.partition(".lora_")
        if role:
            scale = float(state[f"{base}.alpha"]) / 2
            out[f"{base}.lora_{'B' if role.startswith('up') else 'A'}.weight"] = (
                value * scale if role.startswith("up") else value
            )
    return out


FLUX = {
    **{
        f"double_blocks.{n}.{stream}_{layer}": shape
        for n in range(2)
        for stream in ("img", "txt")
        for layer, shape in {
            "attn.qkv": (9216, 3072),
            "attn.proj": (3072, 3072),
            "mlp.0": (12288, 3072),
            "mlp.2": (3072, 12288),
            "mod.lin": (18432, 3072),
        }.items()
    },
    **{
        f"single_blocks.{n}.{layer}": shape
        for n in range(2)
        for layer, shape in {"linear1": (21504, 3072), "linear2": (3072, 15360), "modulation.lin": (9216, 3072)}.items()
    },
}
WAN = {
    f"blocks.{n}.{layer}": (1536, 1536)
    for n in range(2)
    for layer in (
        *(f"{attention}_attn.{letter}" for attention in ("self", "cross") for letter in "qkvo"),
        "ffn.0",
        "ffn.2",
    )
}
Z_IMAGE = {
    f"{part}.0.{layer}": shape
    for part in ("layers", "context_refiner", "noise_refiner")
    for layer, shape in {
        "attention.qkv": (11520, 3840),
        "attention.out": (3840, 3840),
        "feed_forward.w1": (10240, 3840),
        "feed_forward.w2": (3840, 10240),
        "feed_forward.w3": (10240, 3840),
    }.items()
}
LUMINA = {
    f"{part}.0.{layer}": shape
    for part in ("layers", "context_refiner", "noise_refiner")
    for layer, shape in {
        "attention.qkv": (3840, 2304),
        "attention.out": (2304, 2304),
        "feed_forward.w1": (9216, 2304),
        "feed_forward.w2": (2304, 9216),
        "feed_forward.w3": (9216, 2304),
    }.items()
}
LUMINA |= {f"{part}.0.adaLN_modulation.1": (9216, 1024) for part in ("layers", "noise_refiner")}
QWEN = {
    f"transformer_blocks.0.{layer}": (3072, 3072)
    for layer in ("attn.to_q", "attn.add_k_proj", "attn.to_out.0", "img_mlp.net.2")
}


FLUX_2 = {
    "double_blocks.0.img_attn.qkv": (18432, 6144),
    "double_blocks.0.img_mlp.0": (36864, 6144),
    "single_blocks.0.linear1": (55296, 6144),
    "double_stream_modulation_img.lin": (36864, 6144),
}
PIXART = {
    f"blocks.0.{layer}": shape
    for layer, shape in {
        "attn.qkv": (3456, 1152),
        "cross_attn.q_linear": (1152, 1152),
        "cross_attn.kv_linear": (2304, 1152),
        "mlp.fc1": (4608, 1152),
    }.items()
}


@pytest.mark.parametrize(
    ("layers", "family"),
    [
        (FLUX, "flux"),
        (WAN, "wan"),
        (PIXART, None),
        (FLUX_2, "flux2"),
        *(({layer: shape}, "flux2") for layer, shape in list(FLUX_2.items())[1:]),
        (FLUX | {"distilled_guidance_layer.layers.0.in_layer": (5120, 5120)}, "chroma"),
        ({"transformer.single_transformer_blocks.0.attn.to_qkv_mlp_proj": (55296, 6144)}, "flux2"),
        ({"transformer.transformer_blocks.0.ff.linear_in": (36864, 6144)}, "flux2"),
        ({"transformer_blocks.3.attn.to_q": (3072, 3072)}, "qwen"),
        ({"joint_transformer_blocks.0.attn.to_q": (3072, 3072)}, "auraflow"),
    ],
)
def test_families_that_share_names(layers, family):
    shapes = {
        f"diffusion_model.{layer}.lora_{side}.weight": shape
        for layer, (rows, columns) in layers.items()
        for side, shape in (("up", (rows, 2)), ("down", (2, columns)))
    }
    found = recognize_lora(shapes.items())
    assert (found and found.name) == family
    recognize_lora([(name, ()) for name in shapes])  # a file may hold anything under these names


def test_families_without_a_table_keep_their_names():
    lora = of_layers(PIXART)
    same(to_key_format(lora, "peft", torch.float32), generic(lora))
    assert "modelspec.architecture" not in build_metadata(lora, "x", {})


def test_flux_2_gets_the_names_of_its_own_class():
    """Its single blocks stay fused, unlike Flux'."""
    saved = to_key_format(of_layers(FLUX_2), "peft", torch.float32)
    assert sorted(name for name in saved if "lora_B" in name) == [
        "transformer.double_stream_modulation_img.linear.lora_B.weight",
        "transformer.single_transformer_blocks.0.attn.to_qkv_mlp_proj.lora_B.weight",
        "transformer.transformer_blocks.0.attn.to_k.lora_B.weight",
        "transformer.transformer_blocks.0.attn.to_q.lora_B.weight",
        "transformer.transformer_blocks.0.attn.to_v.lora_B.weight",
        "transformer.transformer_blocks.0.ff.linear_in.lora_B.weight",
    ]
    assert "modelspec.architecture" not in build_metadata(of_layers(FLUX_2), "x", {})


NORM = "final_layer.adaLN_modulation.1"


@pytest.mark.parametrize(
    ("layers", "name"),
    [
        ({"txt_in.individual_token_refiner.blocks.0.mlp.0": (12288, 3072), NORM: (6144, 3072)}, "norm_out.linear"),
        ({"double_blocks.0.img_attn.qkv": (6144, 2048), NORM: (4096, 2048)}, "norm_out.linear"),
        ({"joint_blocks.0.x_block.attn.proj": (8, 8), NORM: (16, 8)}, "norm_out.linear"),
        (
            {
                "joint_blocks.0.x_block.attn.proj": (8, 8),
                "joint_blocks.23.context_block.adaLN_modulation.1": (16, 8),
            },
            "transformer_blocks.23.norm1_context.linear",
        ),
    ],
    ids=("hunyuan", "hunyuan 1.5", "sd3", "the last text block of sd3"),
)
def test_scale_and_shift_are_the_other_way_round_in_diffusers(layers, name):
    lora = of_layers(layers)
    up = lora[f"diffusion_model.{list(layers)[-1]}.lora_up.weight"] / 2  # alpha / rank
    saved = to_key_format(lora, "peft", torch.float32)
    half = len(up) // 2
    assert torch.equal(saved[f"transformer.{name}.lora_B.weight"], torch.cat([up[half:], up[:half]]))


def test_scale_and_shift_of_other_text_blocks_of_sd3_stay():
    lora = of_layers({"joint_blocks.0.context_block.adaLN_modulation.1": (48, 8)})
    saved = to_key_format(lora, "peft", torch.float32)
    up = lora["diffusion_model.joint_blocks.0.context_block.adaLN_modulation.1.lora_up.weight"] / 2
    assert torch.equal(saved["transformer.transformer_blocks.0.norm1_context.linear.lora_B.weight"], up)


def test_qwens_last_norm_has_diffusers_order_already():
    lora = of_layers(QWEN | {"norm_out.linear": (6144, 3072)})
    saved = to_key_format(lora, "peft", torch.float32)
    same(saved, {key.replace("diffusion_model", "transformer"): tensor for key, tensor in generic(lora).items()})


@pytest.mark.parametrize(
    ("layers", "names", "convert"),
    [
        (FLUX, "kohya", "kohya_flux"),
        (WAN, "kohya", "musubi_wan"),
        (LUMINA, "generic", "non_diffusers_lumina2"),
        (QWEN, "kohya", "non_diffusers_qwen"),
    ],
)
def test_diffusers_reads_kohya_names_as_the_diffusers_names(layers, names, convert):
    utils = pytest.importorskip("diffusers.loaders.lora_conversion_utils")
    lora = of_layers(layers)
    written = generic(lora) if names == "generic" else to_key_format(lora, names, torch.float32)
    read = getattr(utils, f"_convert_{convert}_lora_to_diffusers")(written)
    same(read, to_key_format(lora, "peft", torch.float32))


def test_names_of_z_image_are_diffusers_modules():
    """Its own reader of other names takes no fused weights (0.36), so what counts is that the saved names are its
    modules.
    """
    diffusers = pytest.importorskip("diffusers")
    with torch.device("meta"):
        modules = {
            name for name, _ in diffusers.ZImageTransformer2DModel(n_layers=1, n_refiner_layers=1).named_modules()
        }
    saved = changes(to_key_format(of_layers(Z_IMAGE), "peft", torch.float32))
    assert {name.removeprefix("transformer.") for name in saved} <= modules and len(saved) == 3 * 7


def unet_layers():
    """Every layer of SD1.x's UNet in LDM's names: spelled after the paper's configuration."""
    attention = [
        f"1.transformer_blocks.0.{layer}"
        for layer in (
            *(f"attn{n}.{projection}" for n in (1, 2) for projection in ("to_q", "to_k", "to_v", "to_out.0")),
            "ff.net.0.proj",
            "ff.net.2",
        )
    ]
    attention += ["1.proj_in", "1.proj_out"]
    residual = [
        f"0.{layer}" for layer in ("in_layers.0", "in_layers.2", "emb_layers.1", "out_layers.0", "out_layers.3")
    ]
    layers = [
        "time_embed.0",
        "time_embed.2",
        "input_blocks.0.0",
        "out.0",
        "out.2",
        *(f"input_blocks.{n}.0.op" for n in (3, 6, 9)),
    ]
    for block in (1, 2, 4, 5, 7, 8, 10, 11):
        skip = ["0.skip_connection"] if block in (4, 7) else []
        layers += [f"input_blocks.{block}.{layer}" for layer in (*residual, *skip, *(attention if block < 10 else []))]
    for block in range(12):
        up = {2: ["1.conv"], 5: ["2.conv"], 8: ["2.conv"]}.get(block, [])
        inside = (*residual, "0.skip_connection", *(attention if block > 2 else []), *up)
        layers += [f"output_blocks.{block}.{layer}" for layer in inside]
    middle = [layer.replace("0.", f"{n}.", 1) for n in (0, 2) for layer in residual]
    return layers + [f"middle_block.{layer}" for layer in (*middle, *attention)]


def test_every_layer_of_sd1_has_diffusers_name():
    """diffusers' own conversion of a checkpoint whose tensors are numbered, and its reading of the
    saved kohya names.
    """
    single_file = pytest.importorskip("diffusers.loaders.single_file_utils")
    layers = unet_layers()
    numbered = {
        f"model.diffusion_model.{layer}.{part}": torch.tensor([float(number)])
        for number, layer in enumerate(layers)
        for part in ("weight", "bias")
    }
    cross = "CrossAttn{}Block2D"
    config = dict(
        layers_per_block=2,
        down_block_types=[cross.format("Down")] * 3 + ["DownBlock2D"],
        class_embed_type=None,
        up_block_types=["UpBlock2D"] + [cross.format("Up")] * 3,
        addition_embed_type=None,
    )
    found = single_file.convert_ldm_unet_checkpoint(numbered, config)
    expected = {
        layers[int(value)]: name.removesuffix(".weight") for name, value in found.items() if name.endswith(".weight")
    }
    shapes = {layer: (320, 768 if "attn2.to_k" in layer or "attn2.to_v" in layer else 320) for layer in layers}
    lora = of_layers(shapes)
    assert len(expected) == len(layers) > 250
    saved, kohya = to_key_format(lora, "peft", torch.float32), to_key_format(lora, "kohya", torch.float32)
    names = {f"diffusion_model.{layer}": f"unet.{name}" for layer, name in expected.items()}
    same(
        saved,
        {key.replace(base := key.partition(".lora_")[0], names[base]): value for key, value in generic(lora).items()},
    )
    assert {key.partition(".")[0] for key in kohya} == {
        "lora_unet_" + name.replace(".", "_") for name in expected.values()
    }


def test_diffusers_reads_kohyas_unet_and_text_encoders():
    utils, diffusers = pytest.importorskip("diffusers.loaders.lora_conversion_utils"), pytest.importorskip("diffusers")
    block = "transformer_blocks.0"
    lora = of_layers(
        {
            f"{place}.1.{block}.{layer}": (64, 768)
            for place in ("input_blocks.1", "middle_block", "output_blocks.11")
            for layer in ("attn1.to_q", "attn2.to_k", "attn2.to_out.0", "ff.net.0.proj")
        }
    )
    encoder = {
        f"text_encoders.clip_l.transformer.text_model.encoder.layers.0.{layer}.{role}": value
        for layer in ("self_attn.q_proj", "self_attn.out_proj", "mlp.fc1")
        for role, value in (("lora_up.weight", torch.randn(8, 2)), ("lora_down.weight", torch.randn(2, 8)))
    }
    written = to_key_format(lora | encoder, "kohya", torch.float32)
    assert any(key.startswith("lora_te_text_model_encoder_layers_0_mlp_fc1.") for key in written)
    read, alphas = utils._convert_non_diffusers_lora_to_diffusers(dict(written))
    kinds = {
        kind: {key: value for key, value in read.items() if key.startswith(kind)} for kind in ("unet.", "text_encoder.")
    }
    text = diffusers.utils.convert_state_dict_to_peft(
        diffusers.utils.convert_state_dict_to_diffusers(kinds["text_encoder."])
    )
    peft = {**diffusers.utils.convert_unet_state_dict_to_peft(kinds["unet."]), **text}
    ours = to_key_format(lora | encoder, "peft", torch.float32)
    assert set(peft) == set(ours) and set(alphas.values()) == {1.0}
    for key, value in ours.items():
        scale = 0.5 if key.startswith("unet.") and "lora_B" in key else 1.0  # alpha 1, rank 2: diffusers keeps it apart
        assert torch.allclose(peft[key] * scale, value), key


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({}, {"l": "lora_te_"}),
        ({"joint_blocks.0.x_block.attn.proj": (8, 8)}, {"l": "lora_te1_", "g": "lora_te2_"}),
        ({"input_blocks.4.1.transformer_blocks.0.attn2.to_k": (640, 2048)}, {"l": "lora_te1_", "g": "lora_te2_"}),
        ({"input_blocks.4.1.transformer_blocks.0.attn2.to_k": (640, 2048)}, {"l": "lora_te1_"}),
        ({}, {"g": "lora_te2_"}),
        ({"input_blocks.4.1.transformer_blocks.0.attn2.to_k": (768, 1280)}, {"g": "lora_te_"}),
    ],
)
def test_numbers_of_text_encoders(more, names):
    state = of_layers(more)
    for which in names:
        state |= {
            f"text_encoders.clip_{which}.transformer.a.lora_{side}.weight": torch.ones(2, 2) for side in ("up", "down")
        }
    keys = {key.partition(".")[0] for key in to_key_format(state, "kohya", torch.float32)}
    assert {f"{name}a" for name in names.values()} <= keys


SDXL = {"input_blocks.4.1.transformer_blocks.0.attn2.to_k": (640, 2048)}
SD3 = {"joint_blocks.0.x_block.attn.proj": (8, 8)}


@pytest.mark.parametrize(
    ("more", "encoder", "kohya", "peft"),
    [
        ({}, "clip_l", "lora_te_a", "text_encoder.a"),
        ({}, "clip_h", "lora_te_a", "text_encoder.a"),
        (SDXL, "clip_g", "lora_te2_a", "text_encoder_2.a"),
        (FLUX, "t5xxl", "lora_te3_a", "text_encoder_2.a"),
        (SD3, "t5xxl", "lora_te3_a", "text_encoder_3.a"),
        ({}, "t5xxl", "lora_te3_a", "text_encoder_2.a"),
    ],
)
def test_names_of_one_text_encoder(more, encoder, kohya, peft):
    layer = f"text_encoders.{encoder}.transformer.a"
    state = of_layers(more) | {f"{layer}.lora_{side}.weight": torch.ones(2, 2) for side in ("up", "down")}
    assert f"{kohya}.lora_up.weight" in to_key_format(state, "kohya", torch.float32)
    assert f"{peft}.lora_B.weight" in to_key_format(state, "peft", torch.float32)


def test_peft_merges_what_is_saved_for_it():
    peft = pytest.importorskip("peft")
    linear = torch.nn.Linear(8, 6)
    state = {
        "a.lora_up.weight": torch.randn(6, 4),
        "a.lora_down.weight": torch.randn(4, 8),
        "a.alpha": torch.tensor(2.0),
    }
    expected = linear.weight.detach() + 0.5 * state["a.lora_up.weight"] @ state["a.lora_down.weight"]
    model = peft.get_peft_model(
        torch.nn.ModuleDict({"a": linear}), peft.LoraConfig(r=4, lora_alpha=4, target_modules=["a"])
    )
    saved = {f"base_model.model.{key}": value for key, value in to_key_format(state, "peft", torch.float32).items()}
    assert not peft.set_peft_model_state_dict(model, saved).unexpected_keys
    model.base_model.model["a"].merge()
    assert torch.allclose(model.base_model.model["a"].get_base_layer().weight, expected, atol=1e-6)


def test_numbers_that_a_file_cannot_hold_are_refused():
    lora = {
        "diffusion_model.a.lora_up.weight": torch.full((4, 1), 7e4),
        "diffusion_model.a.lora_down.weight": torch.ones(1, 4),
    }
    with pytest.raises(
        ValueError, match=r"use bf16 or float32:\n- lora_unet_a\.lora_up\.weight: holds numbers above 65504"
    ):
        to_key_format(lora, "kohya", torch.float16)
    assert len(to_key_format(lora, "kohya", torch.bfloat16)) == 2
    for wrong in (torch.nan, torch.inf):
        with pytest.raises(ValueError, match=r"lora_down\.weight: holds NaN or infinite values"):
            to_key_format(
                {**lora, "diffusion_model.a.lora_down.weight": torch.full((1, 4), wrong)}, "peft", torch.bfloat16
            )
