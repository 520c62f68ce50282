"""Names of LoRA layers on tiny models of ComfyUI's own classes: every trainer's spelling, against the weights that it
stands for.

The truth is spelled out here, comes from diffusers' own checkpoint conversions (a LoRA of the converted model must be
the same LoRA of the original one), or from ComfyUI's loader where that knows the names too.
"""

import types

import comfy.lora
import comfy.lora_convert
import comfy.model_management
import comfy.model_patcher
import comfy.sd
import comfy.supported_models
import pytest
import torch
from comfy.ldm.flux.model import FluxParams
from comfy.ldm.hunyuan_video.model import HunyuanVideoParams
from families import accepted
from graft_nodes.host import lora_stacks
from graft_nodes.patches.lora_files import layer_matching, merge, parse, save
from graft_nodes.patches.lora_files.entry import LoraEntry
from graft_nodes.patches.lora_files.open_file import load_once
from graft_nodes.patches.models import registry
from graft_nodes.patches.models.recognition import factors_of
from graft_nodes.patches.models.registry import recognize_lora
from safetensors.torch import save_file
from tiny_families import EVERY

UNET = dict(
    image_size=32,
    in_channels=4,
    out_channels=4,
    model_channels=32,
    num_res_blocks=[1, 1],
    channel_mult=[1, 2],
    transformer_depth=[1, 1],
    transformer_depth_output=[1, 1, 1, 1],
    transformer_depth_middle=1,
    context_dim=24,
    num_heads=4,
    num_head_channels=-1,
    legacy=False,
    use_spatial_transformer=True,
    use_linear_in_transformer=False,
    adm_in_channels=None,
    use_temporal_attention=False,
)
FLUX = dict(
    image_model="flux",
    in_channels=4,
    out_channels=4,
    vec_in_dim=8,
    context_in_dim=12,
    hidden_size=32,
    mlp_ratio=4.0,
    num_heads=2,
    depth=2,
    depth_single_blocks=2,
    axes_dim=[4, 6, 6],
    theta=10000,
    patch_size=2,
    qkv_bias=True,
    guidance_embed=False,
    **({"txt_ids_dims": []} if "txt_ids_dims" in FluxParams.__dataclass_fields__ else {}),
)
FAMILIES = {  # name: (class of comfy.supported_models, settings)
    "sd1": ("SD15", UNET),
    "sdxl": (
        "SDXL",
        UNET
        | dict(
            adm_in_channels=48,
            num_classes="sequential",
            use_linear_in_transformer=True,
            transformer_depth=[0, 2],
            transformer_depth_output=[0, 0, 2, 2],
        ),
    ),
    "flux": ("Flux", FLUX),
    "sd3": (
        "SD3",
        dict(
            input_size=None,
            patch_size=2,
            in_channels=4,
            depth=2,
            adm_in_channels=8,
            pos_embed_max_size=16,
            num_patches=256,
            qk_norm="rms",
            context_embedder_config={"target": "torch.nn.Linear", "params": {"in_features": 12, "out_features": 128}},
        ),
    ),
    "qwen": (
        "QwenImage",
        dict(
            image_model="qwen_image",
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=12,
            axes_dims_rope=(4, 6, 6),
        ),
    ),
    "lumina": (
        "Lumina2",
        dict(
            image_model="lumina2",
            patch_size=2,
            in_channels=4,
            dim=32,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=1,
            multiple_of=8,
            ffn_dim_multiplier=2.0,
            qk_norm=True,
            cap_feat_dim=12,
            axes_dims=(4, 6, 6),
            axes_lens=(64, 64, 64),
        ),
    ),
    "wan": (
        "WAN21_T2V",
        dict(
            image_model="wan2.1",
            model_type="t2v",
            in_dim=4,
            dim=36,
            ffn_dim=32,
            freq_dim=16,
            text_dim=12,
            out_dim=4,
            num_heads=2,
            num_layers=2,
        ),
    ),
    "wan i2v": (
        "WAN21_I2V",
        dict(
            image_model="wan2.1",
            model_type="i2v",
            in_dim=4,
            dim=36,
            ffn_dim=32,
            freq_dim=16,
            text_dim=12,
            out_dim=4,
            num_heads=2,
            num_layers=2,
        ),
    ),
}
FAMILIES["hunyuan"] = (
    "HunyuanVideo",
    dict(
        image_model="hunyuan_video",
        in_channels=4,
        out_channels=4,
        vec_in_dim=8,
        context_in_dim=12,
        hidden_size=32,
        mlp_ratio=4.0,
        num_heads=2,
        depth=2,
        depth_single_blocks=2,
        axes_dim=[4, 6, 6],
        theta=256,
        patch_size=[1, 2, 2],
        qkv_bias=True,
        guidance_embed=True,
        byt5=False,
        meanflow=False,
        **{
            name: value
            for name, value in (("use_cond_type_embedding", False), ("vision_in_dim", None), ("meanflow_sum", False))
            if name in HunyuanVideoParams.__dataclass_fields__
        },
    ),
)
FAMILIES["z-image"] = ("Lumina2", FAMILIES["lumina"][1] | dict(n_kv_heads=2))


def build(family):
    """A ModelPatcher of a tiny model of the family, with random weights."""
    name, settings = FAMILIES[family]
    config = getattr(comfy.supported_models, name)(dict(settings))
    config.set_inference_dtype(torch.float32, None)
    model = config.get_model({}, "", None)
    generator = torch.Generator().manual_seed(0)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point() and tensor.ndim:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
    return comfy.model_patcher.ModelPatcher(model, load_device=torch.device("cpu"), offload_device=torch.device("cpu"))


def weights(patcher):
    """What a loaded model holds."""
    comfy.model_management.load_models_gpu([patcher], force_full_load=True)
    found = {name: tensor.detach().clone() for name, tensor in patcher.model.state_dict().items()}
    comfy.model_management.unload_all_models()
    return found


def pair(name, rows, columns, seed, up="lora_up.weight", down="lora_down.weight"):
    """(a LoRA of rank 2 of one layer, its delta)."""
    generator = torch.Generator().manual_seed(seed)
    b, a = torch.randn(rows, 2, generator=generator), torch.randn(2, columns, generator=generator)
    return {f"{name}.{up}": b, f"{name}.{down}": a}, b @ a


H, QKV, KV = (
    32,
    (0, 32, 64),
    (32, 16),
)  # width of the tiny models; where Q, K and V begin; Lumina's Q and its fewer K and V
D = "diffusion_model."
NAMES = [  # family, layer's name in the file, weight, rows of the weight (None: all)
    *(
        ("flux", f"{prefix}double_blocks{s}0{s}img_attn{s}qkv", D + "double_blocks.0.img_attn.qkv", None)
        for prefix, s in (
            ("lora_unet_", "_"),
            ("diffusion_model.", "."),
            ("lycoris_", "_"),
            ("base_model.model.", "."),
            ("", "."),
        )
    ),
    *(
        ("flux", f"{prefix}transformer_blocks{s}1{s}attn{s}to_{letter}", D + "double_blocks.1.img_attn.qkv", (start, H))
        for prefix, s in (
            ("transformer.", "."),
            ("lycoris_", "_"),
            ("lora_transformer_", "_"),
            ("base_model.model.", "."),
            ("", "."),
        )
        for letter, start in zip("qkv", QKV, strict=True)
    ),
    *(
        (
            "flux",
            f"transformer.transformer_blocks.0.attn.add_{letter}_proj",
            D + "double_blocks.0.txt_attn.qkv",
            (start, H),
        )
        for letter, start in zip("qkv", QKV, strict=True)
    ),
    *(
        ("flux", f"transformer.single_transformer_blocks.1.attn.to_{letter}", D + "single_blocks.1.linear1", (start, H))
        for letter, start in zip("qkv", QKV, strict=True)
    ),
    ("flux", "transformer.single_transformer_blocks.1.proj_mlp", D + "single_blocks.1.linear1", (96, 128)),
    ("flux", "transformer.single_transformer_blocks.1.proj_out", D + "single_blocks.1.linear2", None),
    ("flux", "transformer.transformer_blocks.0.ff_context.net.2", D + "double_blocks.0.txt_mlp.2", None),
    ("flux", "oft_unet_single_blocks_0_linear1", D + "single_blocks.0.linear1", None),
    *(
        ("sd3", f"{prefix}joint_blocks{s}1{s}x_block{s}attn{s}qkv", D + "joint_blocks.1.x_block.attn.qkv", None)
        for prefix, s in (("lora_unet_", "_"), ("diffusion_model.", "."), ("model.diffusion_model.", "."))
    ),
    *(
        (
            "sd3",
            f"{prefix}transformer_blocks{s}0{s}attn{s}add_k_proj",
            D + "joint_blocks.0.context_block.attn.qkv",
            (128, 128),
        )
        for prefix, s in (
            ("transformer.", "."),
            ("base_model.model.", "."),
            ("lora_transformer_", "_"),
            ("lycoris_", "_"),
        )
    ),
    *(
        ("qwen", f"{prefix}transformer_blocks{s}1{s}attn{s}to_q", D + "transformer_blocks.1.attn.to_q", None)
        for prefix, s in (
            ("lora_unet_", "_"),
            ("transformer.", "."),
            ("diffusion_model.", "."),
            ("", "."),
            ("base_model.model.", "."),
            ("lycoris_", "_"),
            ("lora_transformer_", "_"),
        )
    ),
    *(
        ("lumina", f"{prefix}layers{s}1{s}attn{s}to_{letter}", D + "layers.1.attention.qkv", place)
        for prefix, s in (("transformer.", "."), ("lycoris_", "_"), ("base_model.model.", "."))
        for letter, place in (("q", (0, 32)), ("k", (32, 16)), ("v", (48, 16)))
    ),
    ("lumina", "lora_unet_layers_0_attention_qkv", D + "layers.0.attention.qkv", None),
    ("lumina", "transformer.context_refiner.0.attn.to_out.0", D + "context_refiner.0.attention.out", None),
    ("lumina", "transformer.layers.0.feed_forward.linear_2", D + "layers.0.feed_forward.w2", None),
    *(
        ("z-image", f"{prefix}layers{s}0{s}attention{s}to_{letter}", D + "layers.0.attention.qkv", (start, H))
        for prefix, s in (("transformer.", "."), ("diffusion_model.", "."), ("lora_unet_", "_"), ("", "."))
        for letter, start in zip("qkv", QKV, strict=True)
    ),
    ("z-image", "diffusion_model.noise_refiner.0.attention.to_out.0", D + "noise_refiner.0.attention.out", None),
    *(
        ("wan", f"{prefix}blocks{s}1{s}cross_attn{s}k", D + "blocks.1.cross_attn.k", None)
        for prefix, s in (
            ("lora_unet_", "_"),
            ("lora_unet__", "_"),
            ("diffusion_model.", "."),
            ("", "."),
            ("base_model.model.", "."),
            ("pipe.dit.", "."),
        )
    ),
    *(
        ("wan", f"{prefix}blocks{s}0{s}attn1{s}to_out{s}0", D + "blocks.0.self_attn.o", None)
        for prefix, s in (("transformer.", "."), ("lora_transformer_", "_"), ("lycoris_", "_"))
    ),
    ("wan", "transformer.blocks.0.ffn.net.0.proj", D + "blocks.0.ffn.0", None),
    ("wan", "transformer.condition_embedder.text_embedder.linear_2", D + "text_embedding.2", None),
    ("wan i2v", "transformer.blocks.1.attn2.add_v_proj", D + "blocks.1.cross_attn.v_img", None),
    *(
        (
            "hunyuan",
            f"transformer.single_transformer_blocks.1.attn.to_{letter}",
            D + "single_blocks.1.linear1",
            (start, H),
        )
        for letter, start in zip("qkv", QKV, strict=True)
    ),
    ("hunyuan", "transformer.single_transformer_blocks.0.proj_mlp", D + "single_blocks.0.linear1", (96, 128)),
    ("hunyuan", "transformer.double_blocks.0.img_attn_qkv", D + "double_blocks.0.img_attn.qkv", None),
    ("hunyuan", "diffusion_model.double_blocks.1.txt_mlp.fc1", D + "double_blocks.1.txt_mlp.0", None),
    ("hunyuan", "transformer.single_blocks.0.modulation.linear", D + "single_blocks.0.modulation.lin", None),
    ("hunyuan", "lora_unet_double_blocks_0_img_attn_proj", D + "double_blocks.0.img_attn.proj", None),
    ("hunyuan", "Hunyuan_video_I2V_lora_double_blocks_0_img_attn_qkv", D + "double_blocks.0.img_attn.qkv", None),
    ("hunyuan", "Hunyuan_video_I2V_lora_double_blocks_0_txt_mlp_fc2", D + "double_blocks.0.txt_mlp.2", None),
    *(
        ("hunyuan", f"{prefix}double_blocks{s}1{s}txt_attn_{letter}", D + "double_blocks.1.txt_attn.qkv", (start, H))
        for prefix, s in (("lora_unet_", "_"), ("diffusion_model.", "."))
        for letter, start in zip("qkv", QKV, strict=True)
    ),
    ("hunyuan", "lora_unet_double_blocks_0_img_mod_linear", D + "double_blocks.0.img_mod.lin", None),
    *(
        ("flux", f"{prefix}attn{s}{layer}", D + weight, (0, 96))
        for prefix, s, layer, weight in (
            ("transformer.transformer_blocks.0.", ".", "to_qkv", "double_blocks.0.img_attn.qkv"),
            ("lora_transformer_transformer_blocks_1_", "_", "to_added_qkv", "double_blocks.1.txt_attn.qkv"),
            ("transformer.single_transformer_blocks.1.", ".", "to_qkv", "single_blocks.1.linear1"),
        )
    ),
    ("flux", "lora_unet_transformer_blocks_0_attn_to_k_", D + "double_blocks.0.img_attn.qkv", (32, H)),
    *(
        (
            "sd1",
            f"{name}down_blocks{s}0{s}attentions{s}0{s}transformer_blocks{s}0{s}attn1{s}to_q",
            D + "input_blocks.1.1.transformer_blocks.0.attn1.to_q",
            None,
        )
        for name, s in (
            ("lora_unet_", "_"),
            ("unet.", "."),
            ("base_model.model.", "."),
            ("unet.base_model.model.", "."),
            ("lycoris_", "_"),
            ("", "."),
        )
    ),
    (
        "sd1",
        "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn2.processor.to_out",
        D + "input_blocks.1.1.transformer_blocks.0.attn2.to_out.0",
        None,
    ),
    *(
        (
            "sdxl",
            f"lora_unet_{block}_transformer_blocks_1_attn2_to_k",
            D + "input_blocks.3.1.transformer_blocks.1.attn2.to_k",
            None,
        )
        for block in ("input_blocks_3_1", "down_blocks_1_attentions_0")
    ),
    *(
        ("sdxl", f"{prefix}up_blocks{s}0{s}attentions{s}1{s}proj_in", D + "output_blocks.1.1.proj_in", None)
        for prefix, s in (("lora_unet_", "_"), ("unet.", "."), ("lycoris_", "_"))
    ),
]


@pytest.fixture(scope="module")
def models():
    """{family: (patcher, its weights)}, built when asked for; every test leaves them as they are."""
    built = {}

    def of(family):
        if family not in built:
            patcher = build(family)
            built[family] = (patcher, {name: tensor.detach() for name, tensor in patcher.model.state_dict().items()})
        return built[family]

    return of


@pytest.mark.parametrize(
    ("family", "name", "weight", "rows"), NAMES, ids=[f"{family}-{name}" for family, name, *_ in NAMES]
)
def test_a_name_changes_its_weight_and_no_other(models, family, name, weight, rows):
    patcher, base = models(family)
    start, length = rows or (0, base[f"{weight}.weight"].shape[0])
    state, delta = pair(name, length, base[f"{weight}.weight"][0].numel(), 1)
    changed = weights(lora_stacks.apply_lora_stack(patcher, None, [LoraEntry("x", state)], "merge").model)
    expected = base[f"{weight}.weight"].clone()
    expected.flatten(1)[start : start + length] += delta
    assert torch.allclose(changed[f"{weight}.weight"], expected, atol=1e-5)
    assert [key for key in base if not torch.equal(base[key], changed[key])] == [f"{weight}.weight"]


@pytest.mark.parametrize("mode", ["merge", "bypass", "host"])
@pytest.mark.parametrize(
    ("family", "name", "layers"),
    [
        ("wan", "transformer.blocks.1.attn1.to_qkv", [f"blocks.1.self_attn.{letter}" for letter in "qkv"]),
        ("wan i2v", "transformer.blocks.0.attn2.to_added_kv", [f"blocks.0.cross_attn.{letter}_img" for letter in "kv"]),
        (
            "qwen",
            "lycoris_transformer_blocks_0_attn_to_qkv",
            [f"transformer_blocks.0.attn.to_{letter}" for letter in "qkv"],
        ),
        (
            "sdxl",
            "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_qkv",
            [f"middle_block.1.transformer_blocks.0.attn1.to_{letter}" for letter in "qkv"],
        ),
    ],
)
def test_one_layer_for_several_weights(models, family, name, layers, mode):
    """Each weight changes by its rows of the product, in the order in which the layer joins them."""
    patcher, base = models(family)
    names = [f"{D}{layer}.weight" for layer in layers]
    state, delta = pair(name, sum(len(base[weight]) for weight in names), base[names[0]].shape[1], 1)
    patched = lora_stacks.apply_lora_stack(patcher, None, [LoraEntry("x", state)], mode).model
    if mode == "bypass":
        assert sorted(weight for stack in lora_stacks.carried_stacks(patched) for weight in stack.patches) == sorted(
            names
        )
        return
    changed = weights(patched)
    expected = dict(zip(names, delta.split([len(base[weight]) for weight in names]), strict=True))
    for weight, tensor in base.items():
        assert torch.allclose(changed[weight], tensor + expected.get(weight, 0.0), atol=1e-5), weight


def test_both_forms_of_a_change_count_once(models):
    """As a converter of musubi-tuner's Z-Image files leaves them; a file in which they differ is refused."""
    patcher, base = models("z-image")
    weight = f"{D}layers.0.attention.qkv.weight"
    state, delta = pair("lora_unet_layers_0_attention_qkv", *base[weight].shape, 1)
    up, down = state.values()
    for letter, rows in zip("qkv", up.split(H), strict=True):
        key = f"lora_unet_layers_0_attention_to_{letter}"
        state |= {f"{key}.lora_up.weight": rows.clone(), f"{key}.lora_down.weight": down.clone()}
    made = lora_stacks.apply_lora_stack(patcher, None, [LoraEntry("x", state)], "merge")
    assert torch.allclose(weights(made.model)[weight], base[weight] + delta, atol=1e-5)
    assert "3 names repeat the changes of another name, which counts once" in made.report
    state["lora_unet_layers_0_attention_to_k.lora_up.weight"] *= 1.01
    for partial in (False, True):
        with pytest.raises(
            ValueError, match="attention_to_k: changes the same rows as lora_unet_layers_0_attention_qkv"
        ):
            lora_stacks.apply_lora_stack(patcher, None, [LoraEntry("x", state, partial=partial)], "merge")


@pytest.mark.parametrize("family", ["flux", "sd3", "qwen", "lumina", "z-image", "wan", "hunyuan", "sd1", "sdxl"])
def test_agrees_with_comfyuis_loader_where_that_knows_the_names(models, family):
    """Every name of the table that the host takes, in one file a weight, through its own loader."""
    patcher, base = models(family)
    targets = lora_stacks.model_weights(patcher).key_map
    known = {(weight, rows): name for of, name, weight, rows in NAMES if of == family and name in targets}
    if not known:
        assert family == "z-image"  # 0.3.64 has no map for it
        pytest.skip("this ComfyUI knows none of these names")
    state = {}
    for seed, ((weight, rows), name) in enumerate(known.items()):
        shape = base[f"{weight}.weight"].shape
        state |= pair(name, rows[1] if rows else shape[0], shape[1:].numel(), seed)[0]
    theirs = weights(comfy.sd.load_lora_for_models(patcher, None, state, 0.7, 0.0)[0])
    ours = weights(lora_stacks.apply_lora_stack(patcher, None, [LoraEntry("x", state, 0.7)], "merge").model)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in base)


def originally(name):
    """A name in HunyuanVideo's own checkpoints, of ComfyUI's."""
    for part, theirs in (
        ("_attn.qkv.", "_attn_qkv."),
        ("_attn.proj.", "_attn_proj."),
        ("_mod.lin.", "_mod.linear."),
        (".modulation.lin.", ".modulation.linear."),
        ("_mlp.0.", "_mlp.fc1."),
        ("_mlp.2.", "_mlp.fc2."),
    ):
        name = name.replace(part, theirs)
    if name.startswith(("time_in.", "guidance_in.", "txt_in.t_embedder.")):
        name = name.replace("in_layer", "mlp.0").replace("out_layer", "mlp.2")
    if name.startswith("txt_in.c_embedder."):
        name = name.replace("in_layer", "linear_1").replace("out_layer", "linear_2")
    if name.startswith("txt_in.individual_token_refiner."):
        name = name.replace("self_attn.", "self_attn_").replace("mlp.0.", "mlp.fc1.").replace("mlp.2.", "mlp.fc2.")
    return name


def converted(family, state):
    """diffusers' checkpoint of the original's tensors, by its own conversion."""
    from diffusers.loaders import single_file_utils

    plain = {name.removeprefix(D): tensor.clone() for name, tensor in state.items() if name.startswith(D)}
    plain = {name: tensor for name, tensor in plain.items() if tensor.ndim}
    name = {
        "wan": "wan_transformer",
        "wan i2v": "wan_transformer",
        "sd3": "sd3_transformer_checkpoint",
        "z-image": "z_image_transformer_checkpoint",
        "hunyuan": "hunyuan_video_transformer",
    }[family]
    if family == "hunyuan":
        plain = {
            originally(name): tensor for name, tensor in plain.items() if ".linear1." not in name
        }  # it splits those at 3072 rows
    return getattr(single_file_utils, f"convert_{name}_to_diffusers")(plain)


@pytest.mark.parametrize("family", ["wan", "wan i2v", "sd3", "z-image", "hunyuan"])
def test_every_layer_of_diffusers_names(models, family):
    """A LoRA on every matrix of the converted model is the same change, seen through the conversion."""
    patcher, base = models(family)
    theirs = converted(family, base)
    state, deltas = {}, {}
    for seed, (name, tensor) in enumerate(theirs.items()):
        layer = name.removesuffix(".weight")
        if name.endswith(".weight") and tensor.ndim == 2 and "patch_embed" not in name:
            of, deltas[name] = pair(f"transformer.{layer}", *tensor.shape, seed, "lora_B.weight", "lora_A.weight")
            state |= of
    changed = converted(
        family, weights(lora_stacks.apply_lora_stack(patcher, None, [LoraEntry("x", state)], "merge").model)
    )
    assert len(deltas) > 15 and changed.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.allclose(changed[name], tensor + deltas.get(name, 0.0), atol=1e-4), name


def test_every_layer_of_diffusers_unet(models):
    """The same for the UNet, through diffusers' own conversion of SD1.x checkpoints."""
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint

    patcher, base = models("sd1")
    config = dict(
        layers_per_block=1,
        down_block_types=["CrossAttnDownBlock2D"] * 2,
        up_block_types=["CrossAttnUpBlock2D"] * 2,
        class_embed_type=None,
        addition_embed_type=None,
    )

    def seen(state):
        own = {f"model.{name}": tensor.clone() for name, tensor in state.items() if name.startswith(D)}
        return convert_ldm_unet_checkpoint(own, config)

    theirs, state, deltas = seen(base), {}, {}
    for seed, (name, tensor) in enumerate(theirs.items()):
        if name.endswith(".weight") and tensor.ndim == 2 and "attentions" in name:
            of, deltas[name] = pair(
                f"unet.{name.removesuffix('.weight')}", *tensor.shape, seed, "lora_B.weight", "lora_A.weight"
            )
            state |= of
    changed = seen(weights(lora_stacks.apply_lora_stack(patcher, None, [LoraEntry("x", state)], "merge").model))
    assert len(deltas) > 50
    assert all(torch.allclose(changed[name], theirs[name] + deltas.get(name, 0.0), atol=1e-4) for name in theirs)


def test_the_hosts_conversion_takes_no_key_of_a_remembered_file(models, tmp_path):
    """ComfyUI renames the keys of a Wan Fun file in the very mapping that it is given."""
    patcher, base = models("wan")
    weight = f"{D}blocks.0.cross_attn.k.weight"
    state, delta = pair("lora_unet__blocks_0_cross_attn_k", *base[weight].shape, 1)
    taken, path = dict(state), str(tmp_path / "wan_fun.safetensors")
    comfy.lora_convert.convert_lora(taken)
    assert not taken.keys() & state.keys(), "else this test says nothing"
    save_file(state, path)
    for _ in range(2):
        patched = lora_stacks.apply_lora_stack(patcher, None, [LoraEntry("x", load_once(path)[0])], "merge").model
        assert torch.allclose(weights(patched)[weight], base[weight] + delta, atol=1e-5)
        assert load_once(path)[0].keys() == state.keys()


@pytest.mark.parametrize(
    ("layer", "kinds"),
    [
        ("input_blocks.1.0.in_layers.2", ("lora_up", "lokr")),
        ("middle_block.1.transformer_blocks.0.attn1.to_q", ("lora_up", "diff")),
    ],
)
def test_comfyuis_loader_reads_all_of_a_merged_layer(models, layer, kinds):
    """Factors and a difference of one name: it would let the difference overwrite the factors."""
    patcher, base = models("sd1")
    shape = base[f"{D}{layer}.weight"].shape
    first, _ = pair(f"{D}{layer}", shape[0], shape[1], 1)
    first = {key: value.reshape(*value.shape, *(1 for _ in shape[2:])) for key, value in first.items()}
    first[f"{D}{layer}.lora_down.weight"] = torch.randn(2, *shape[1:])
    second = {
        f"{D}{layer}.lokr_w1": torch.randn(2, 2),
        f"{D}{layer}.lokr_w2": torch.randn(shape[0] // 2, shape[1] // 2, *shape[2:]),
    }
    second = second if "lokr" in kinds else {f"{D}{layer}.diff": torch.randn(shape)}
    entries = [LoraEntry("x", first, 0.7), LoraEntry("y", second, -0.4)]
    expected = weights(lora_stacks.apply_lora_stack(patcher, None, entries, "merge").model)
    changes, _ = lora_stacks.lora_changes(patcher, None, entries)
    for made in (merge.merge_loras(entries), merge.merge_changes(changes)):
        state = save.to_key_format(made.state, "kohya", torch.float32)
        theirs = weights(comfy.sd.load_lora_for_models(patcher, None, state, 1.0, 0.0)[0])
        assert all(torch.allclose(theirs[name], expected[name], atol=1e-4) for name in base)


@pytest.mark.parametrize("family", ["wan", "z-image", "flux", "sd3"])
def test_comfyuis_loader_reads_every_difference_under_kohyas_names(models, family):
    patcher, _ = models(family)
    differences = {
        name: torch.ones_like(tensor)
        for name, tensor in patcher.model.named_parameters()
        if name.startswith(D) and not name.endswith(".bias")
    }
    made = merge.extract_lora({name: lambda tensor=tensor: tensor for name, tensor in differences.items()}, 1)
    saved = save.to_key_format(made.state, "kohya", torch.float32)
    known = comfy.lora.model_lora_keys_unet(patcher.model, {})
    assert set(comfy.lora.load_lora(saved, known, log_missing=False)) == set(differences)


@pytest.mark.parametrize("layer", ["input_blocks.1.1.proj_in", "middle_block.1.transformer_blocks.0.attn1.to_q"])
def test_comfyuis_loader_reads_pefts_magnitudes(models, layer):
    """Without a change of the direction, where its norm and PEFT's are the same; both have as many rows as columns."""
    patcher, base = models("sd1")
    weight = base[f"{D}{layer}.weight"]
    assert weight.shape[0] == weight.shape[1]
    ones = (1,) * (weight.ndim - 2)
    magnitude = torch.rand(weight.shape[0]) + 1
    state = {
        f"{D}{layer}.lora_B.weight": torch.zeros(len(weight), 1, *ones),
        f"{D}{layer}.lora_A.weight": torch.ones(1, *weight.shape[1:]),
        f"{D}{layer}.lora_magnitude_vector": magnitude.reshape(1, -1, *ones) if ones else magnitude,
    }
    saved = save.to_key_format(state, "kohya", torch.float32)
    expected = weight * (magnitude / weight.flatten(1).norm(dim=1)).reshape(-1, 1, *ones)
    theirs = weights(comfy.sd.load_lora_for_models(patcher, None, saved, 1.0, 0.0)[0])
    assert torch.allclose(theirs[f"{D}{layer}.weight"], expected, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "names", "hosts"),
    [
        ("qwen", ("norm_out.linear", "transformer_blocks.0.img_mlp.net.0.proj"), True),
        ("flux", ("final_layer.adaLN_modulation.1", "double_blocks.0.img_attn.qkv"), True),
        (
            "hunyuan",
            ("img_in.proj", "final_layer.adaLN_modulation.1", "txt_in.individual_token_refiner.blocks.0.mlp.0"),
            False,
        ),
    ],
)
def test_what_is_saved_under_pefts_names_is_the_same_change(models, family, names, hosts):
    """Through ComfyUI's own loader, where that knows the names."""
    patcher, base = models(family)
    state = {}
    for seed, name in enumerate(names):
        of, _ = pair(f"{D}{name}", len(base[f"{D}{name}.weight"]), base[f"{D}{name}.weight"][0].numel(), seed)
        kernel = base[f"{D}{name}.weight"].shape[1:]
        state |= {
            key: value.reshape(2, *kernel) if "down" in key else value.reshape(-1, 2, *(1,) * (len(kernel) - 1))
            for key, value in of.items()
        }
    expected = weights(lora_stacks.apply_lora_stack(patcher, None, [LoraEntry("x", state)], "merge").model)
    saved = save.to_key_format(state, "peft", torch.float32)
    made = [lora_stacks.apply_lora_stack(patcher, None, [LoraEntry("x", saved)], "merge").model]
    made += [comfy.sd.load_lora_for_models(patcher, None, saved, 1.0, 0.0)[0]] if hosts else []
    assert all(not torch.equal(expected[f"{D}{name}.weight"], base[f"{D}{name}.weight"]) for name in names)
    for found in map(weights, made):
        assert all(torch.allclose(found[name], expected[name], atol=1e-4) for name in base)


def test_xlabs_files_for_flux(models):
    patcher, base = models("flux")
    state, expected = {}, {}
    for seed, (name, weight, rows) in enumerate(
        [
            ("double_blocks.0.processor.qkv_lora1", "double_blocks.0.img_attn.qkv", 96),
            ("double_blocks.0.processor.qkv_lora2", "double_blocks.0.txt_attn.qkv", 96),
            ("double_blocks.1.processor.proj_lora1", "double_blocks.1.img_attn.proj", 32),
            ("double_blocks.1.processor.proj_lora2", "double_blocks.1.txt_attn.proj", 32),
            ("single_blocks.0.processor.qkv_lora", "single_blocks.0.linear1", 96),
            ("single_blocks.0.processor.proj_lora", "single_blocks.0.linear2", 32),
        ]
    ):
        of, delta = pair(name, rows, base[f"{D}{weight}.weight"].shape[1], seed, "up.weight", "down.weight")
        state |= of
        expected[f"{D}{weight}.weight"] = base[f"{D}{weight}.weight"].clone()
        expected[f"{D}{weight}.weight"][:rows] += delta
    changed = weights(lora_stacks.apply_lora_stack(patcher, None, [LoraEntry("x", state)], "merge").model)
    assert all(torch.allclose(changed[name], expected.get(name, base[name]), atol=1e-5) for name in base)


def test_bfls_control_loras_enlarge_a_weight(models):
    """They go through ComfyUI's own adapter, their biases and norms too; everything comes off again."""
    patcher, base = models("flux")
    norm = next(name for name in base if "single_blocks.0.norm.key_norm" in name)
    up, down = torch.randn(32, 2), torch.randn(2, 32)  # twice the input channels
    state, delta = pair("double_blocks.0.img_attn.proj", 32, 32, 4, "lora_B.weight", "lora_A.weight")
    state |= {
        "img_in.lora_B.weight": up,
        "img_in.lora_A.weight": down,
        "img_in.lora_B.bias": torch.ones(32),
        "single_blocks.0.norm.key_norm.scale": torch.full((16,), 2.0),
    }
    made = lora_stacks.apply_lora_stack(patcher, None, [LoraEntry("control", state)], "merge")
    assert "img_in.weight" in made.report and "enlarges" in made.report
    changed = weights(made.model)
    wide = torch.cat([base[f"{D}img_in.weight"], torch.zeros(32, 16)], 1) + up @ down
    assert torch.allclose(changed[f"{D}img_in.weight"], wide, atol=1e-5)
    assert torch.allclose(changed[f"{D}img_in.bias"], base[f"{D}img_in.bias"] + 1)
    assert torch.allclose(changed[norm], torch.full((16,), 2.0))
    proj = f"{D}double_blocks.0.img_attn.proj.weight"
    assert torch.allclose(changed[proj], base[proj] + delta, atol=1e-5)
    after = weights(patcher)
    assert all(torch.equal(after[name], base[name]) for name in base)
    other, _ = pair("img_in", 32, 16, 5)
    with pytest.raises(ValueError, match=r"plain changes diffusion_model.img_in.weight, which control enlarges"):
        lora_stacks.apply_lora_stack(patcher, None, [LoraEntry("control", state), LoraEntry("plain", other)], "merge")
    with pytest.raises(
        ValueError, match=r"plain changes diffusion_model.img_in.weight, which a LoRA that the model carries enlarges"
    ):
        lora_stacks.apply_lora_stack(made.model, None, [LoraEntry("plain", other)], "merge")
    made.model.patch_model()
    assert patcher.model.state_dict()[f"{D}img_in.weight"].shape == (32, 32), "enlarged while that model is loaded"
    plain = lora_stacks.apply_lora_stack(patcher, None, [LoraEntry("plain", other)], "merge").model
    made.model.unpatch_model()
    assert not torch.equal(weights(plain)[f"{D}img_in.weight"], base[f"{D}img_in.weight"])


# --- text encoders ---


def clip(path):
    """A text encoder of ComfyUI's at full size, without memory; only its names and shapes count here."""
    module, _, name = path.rpartition(".")
    of = getattr(__import__(f"comfy.{module}", fromlist=[name]), name)
    made = of if isinstance(of, type) else of()
    with torch.device("meta"):
        module = made(device="meta", dtype=torch.float32)
        return types.SimpleNamespace(
            cond_stage_model=module, patcher=types.SimpleNamespace(model=module, backup={}, patches={})
        )


L = "text_model.encoder.layers.3.self_attn.q_proj"
CLIPS = [  # encoder, name in the file, weight
    *(
        ("sd1_clip.SD1ClipModel", name, f"clip_l.transformer.{L}")
        for name in (
            f"lora_te_{L}",
            f"text_encoder.{L}",
            f"lora_te1_{L}",
            f"te.{L}",
            f"text_encoders.clip_l.transformer.{L}",
        )
    ),
    *(
        ("text_encoders.sd2_clip.SD2ClipModel", name, f"clip_h.transformer.{L}")
        for name in (f"lora_te_{L}", f"text_encoder.{L}")
    ),
    *(
        ("sdxl_clip.SDXLClipModel", name, f"clip_{which}.transformer.{L}")
        for names, which in (
            ((f"lora_te1_{L}", f"text_encoder.{L}", f"te1.{L}"), "l"),
            ((f"lora_te2_{L}", f"text_encoder_2.{L}"), "g"),
        )
        for name in names
    ),
    ("sdxl_clip.SDXLClipModel", "lora_te2_text_projection", "clip_g.transformer.text_projection"),
    ("sdxl_clip.StableCascadeClipModel", f"lora_prior_te_{L}", f"clip_g.transformer.{L}"),
    *(
        ("text_encoders.flux.flux_clip", name, weight)
        for name, weight in (
            (f"lora_te1_{L}", f"clip_l.transformer.{L}"),
            *(
                (
                    f"{prefix}encoder.block.2.layer.0.SelfAttention.k",
                    "t5xxl.transformer.encoder.block.2.layer.0.SelfAttention.k",
                )
                for prefix in ("lora_te2_", "lora_te3_", "text_encoder_2.", "text_encoders.t5xxl.transformer.")
            ),
        )
    ),
    *(
        ("text_encoders.sd3_clip.sd3_clip", name, weight)
        for name, weight in (
            (f"lora_te1_{L}", f"clip_l.transformer.{L}"),
            (f"lora_te2_{L}", f"clip_g.transformer.{L}"),
            *(
                (
                    f"{prefix}encoder.block.2.layer.1.DenseReluDense.wi_0",
                    "t5xxl.transformer.encoder.block.2.layer.1.DenseReluDense.wi_0",
                )
                for prefix in ("lora_te3_", "text_encoder_3.", "text_encoders.t5xxl.transformer.")
            ),
        )
    ),
]


@pytest.fixture(scope="module")
def clips(models):
    """{path: (targets that the host knows, shapes)} of text encoders, made when asked for."""
    made = {}

    def of(path):
        if path not in made:
            weights = lora_stacks.model_weights(models("sd1")[0], clip(path))
            made[path] = weights.key_map, weights.shapes
        return made[path]

    return of


@pytest.mark.parametrize(
    ("path", "name", "weight"), CLIPS, ids=[f"{path.rpartition('.')[2]}-{name}" for path, name, _ in CLIPS]
)
def test_names_of_text_encoders(clips, path, name, weight):
    known, shapes = clips(path)
    name = name.replace(".", "_") if name.startswith("lora_") else name
    target = {**known, **layer_matching.find_targets([name], known, shapes)}.get(name)
    assert target == parse.Target("clip", f"{weight}.weight")


# --- saved names, on models of full size without memory: what GraftSaveLoRA writes must lead back to the same rows of t

FULL = {
    "sd1": (
        "SD15",
        UNET
        | dict(
            model_channels=320,
            num_res_blocks=[2] * 4,
            channel_mult=[1, 2, 4, 4],
            transformer_depth=[1] * 6 + [0] * 2,
            transformer_depth_output=[1] * 9 + [0] * 3,
            context_dim=768,
            num_heads=8,
        ),
    ),
    "sdxl": (
        "SDXL",
        UNET
        | dict(
            model_channels=320,
            num_res_blocks=[2] * 3,
            channel_mult=[1, 2, 4],
            transformer_depth=[0, 0, 2, 2, 10, 10],
            transformer_depth_output=[0, 0, 0, 2, 2, 2, 10, 10, 10],
            transformer_depth_middle=10,
            context_dim=2048,
            num_heads=-1,
            num_head_channels=64,
            use_linear_in_transformer=True,
            adm_in_channels=2816,
            num_classes="sequential",
        ),
    ),
    "flux": (
        "Flux",
        FLUX
        | dict(
            in_channels=16,
            out_channels=16,
            vec_in_dim=768,
            context_in_dim=4096,
            hidden_size=3072,
            num_heads=24,
            depth=19,
            depth_single_blocks=38,
            axes_dim=[16, 56, 56],
            guidance_embed=True,
        ),
    ),
    "sd3": (
        "SD3",
        FAMILIES["sd3"][1]
        | dict(
            in_channels=16,
            depth=24,
            adm_in_channels=2048,
            pos_embed_max_size=192,
            num_patches=36864,
            context_embedder_config={
                "target": "torch.nn.Linear",
                "params": {"in_features": 4096, "out_features": 1536},
            },
        ),
    ),
    "wan": (
        "WAN21_T2V",
        FAMILIES["wan"][1]
        | dict(dim=1536, ffn_dim=8960, freq_dim=256, text_dim=4096, num_heads=12, num_layers=30, in_dim=16, out_dim=16),
    ),
    "qwen": (
        "QwenImage",
        FAMILIES["qwen"][1]
        | dict(
            in_channels=64,
            num_layers=4,
            attention_head_dim=128,
            num_attention_heads=24,
            joint_attention_dim=3584,
            axes_dims_rope=(16, 56, 56),
        ),
    ),
    "lumina": (
        "Lumina2",
        FAMILIES["lumina"][1]
        | dict(
            in_channels=16,
            dim=2304,
            n_layers=26,
            n_refiner_layers=2,
            n_heads=24,
            n_kv_heads=8,
            cap_feat_dim=2304,
            axes_dims=(32, 32, 32),
            axes_lens=(300, 512, 512),
        ),
    ),
    "z-image": (
        "Lumina2",
        FAMILIES["lumina"][1]
        | dict(
            in_channels=16,
            dim=3840,
            n_layers=30,
            n_refiner_layers=2,
            n_heads=30,
            n_kv_heads=30,
            cap_feat_dim=2560,
            axes_dims=(32, 48, 48),
            axes_lens=(1536, 512, 512),
        ),
    ),
}


FULL |= {  # without a tiny model above
    "krea 2": ("Krea2", {"image_model": "krea2"}),
    "ernie": ("ErnieImage", {"image_model": "ernie"}),
    "ideogram 4": ("Ideogram4", {"image_model": "ideogram4"}),
    "ltx 2": ("LTXAV", {"image_model": "ltxav"}),
    "kandinsky 5": ("Kandinsky5", {"image_model": "kandinsky5"}),
    "hidream": (
        "HiDream",
        dict(
            image_model="hidream",
            attention_head_dim=128,
            axes_dims_rope=[64, 32, 32],
            caption_channels=[4096, 4096],
            max_resolution=[128, 128],
            in_channels=16,
            llama_layers=[0] * 48,
            num_attention_heads=20,
            num_routed_experts=4,
            num_activated_experts=2,
            num_layers=16,
            num_single_layers=32,
            out_channels=16,
            patch_size=2,
            text_emb_dim=2048,
        ),
    ),
    "anima": (
        "Anima",
        dict(
            image_model="anima",
            max_img_h=240,
            max_img_w=240,
            max_frames=128,
            in_channels=16,
            out_channels=16,
            patch_spatial=2,
            patch_temporal=1,
            model_channels=2048,
            concat_padding_mask=True,
            crossattn_emb_channels=1024,
            pos_emb_cls="rope3d",
            use_adaln_lora=True,
            adaln_lora_dim=256,
            num_blocks=28,
            num_heads=16,
            extra_per_block_abs_pos_emb=False,
        ),
    ),
    "hunyuan 1.5": (
        "HunyuanVideo15",
        FAMILIES["hunyuan"][1]
        | dict(
            in_channels=65,
            out_channels=32,
            vec_in_dim=None,
            context_in_dim=3584,
            hidden_size=2048,
            num_heads=16,
            depth=54,
            depth_single_blocks=0,
            axes_dim=[16, 56, 56],
            patch_size=[1, 1, 1],
            guidance_embed=False,
            byt5=True,
            use_cond_type_embedding=True,
            vision_in_dim=1152,
        ),
    ),
}
FAMILY_OF = {
    "krea 2": "krea2",
    "ernie": "ernie",
    "ideogram 4": "ideogram4",
    "ltx 2": "ltx2",
    "anima": "anima",
    "hunyuan 1.5": "hunyuan15",
}
DIFFUSERS = {  # the class and what its defaults do not give
    "krea 2": ("Krea2Transformer2DModel", {}),
    "ernie": (
        "ErnieImageTransformer2DModel",
        dict(hidden_size=4096, num_attention_heads=32, ffn_hidden_size=12288, num_layers=36, text_in_dim=3072),
    ),
    "ideogram 4": ("Ideogram4Transformer2DModel", {}),
    "ltx 2": ("LTX2VideoTransformer3DModel", {}),
    "hunyuan 1.5": ("HunyuanVideo15Transformer3DModel", {}),
    "anima": (
        "CosmosTransformer3DModel",
        dict(in_channels=16, num_attention_heads=16, attention_head_dim=128, num_layers=28, extra_pos_embed_type=None),
    ),
}


def full(family):
    """ComfyUI's model of full size, without memory for its weights."""
    name, settings = FULL[family]
    if not hasattr(comfy.supported_models, name):
        pytest.skip(f"this ComfyUI has no {name}")
    config = getattr(comfy.supported_models, name)(dict(settings))
    config.set_inference_dtype(torch.float32, None)
    with torch.device("meta"):
        return config.get_model({}, "", torch.device("meta"))


FLUX_WIDE = {
    "in_channels": 16,
    "out_channels": 16,
    "vec_in_dim": 768,
    "context_in_dim": 4096,
    "hidden_size": 3072,
    "num_heads": 24,
    "depth": 19,
    "depth_single_blocks": 38,
    "axes_dim": [16, 56, 56],
    "mlp_ratio": 4.0,
}
WAN_WIDE = {"freq_dim": 256, "text_dim": 4096, "num_layers": 4}
WHOLE = {  # (settings of full size beside the tiny model's, or None for the class's own; the family of its LoRAs)
    "sd1": (FULL["sd1"][1], "sd1"),
    "sd2-v": (
        FULL["sd1"][1]
        | {"context_dim": 1024, "num_heads": -1, "num_head_channels": 64, "use_linear_in_transformer": True},
        "sd2",
    ),
    "sdxl": (FULL["sdxl"][1], "sdxl"),
    "sd3": (FULL["sd3"][1], "sd3"),
    "flux": (FLUX_WIDE, "flux"),
    "flux schnell": (FLUX_WIDE, "flux"),
    "flux kontext": (FLUX_WIDE, "flux"),
    "flux2": (
        {"context_in_dim": 15360, "hidden_size": 6144, "num_heads": 48, "depth": 8, "depth_single_blocks": 48}
        | {"axes_dim": [32, 32, 32, 32]},
        "flux2",
    ),
    "chroma": (
        FLUX_WIDE
        | {"in_channels": 64, "out_channels": 64, "vec_in_dim": None, "out_dim": 3072, "hidden_dim": 5120}
        | {"n_layers": 5},
        "chroma",
    ),
    "radiance": (
        FLUX_WIDE
        | {"in_channels": 3, "out_channels": 3, "vec_in_dim": None, "out_dim": 3072, "hidden_dim": 5120}
        | {"n_layers": 5, "nerf_hidden_size": 64, "nerf_mlp_ratio": 4, "nerf_depth": 4, "nerf_max_freqs": 8},
        "chroma",
    ),
    "qwen": (FULL["qwen"][1] | {"out_channels": 16}, "qwen"),
    "qwen edit": (FULL["qwen"][1] | {"out_channels": 16}, "qwen"),
    "lumina2": (FULL["lumina"][1], "lumina"),
    "z-image": (FULL["z-image"][1], "z-image"),
    "wan": (WAN_WIDE | {"dim": 1536, "ffn_dim": 8960, "num_heads": 12}, "wan"),
    "wan i2v": (WAN_WIDE | {"dim": 5120, "ffn_dim": 13824, "num_heads": 40}, "wan"),
    "wan 2.2 i2v": (WAN_WIDE | {"dim": 5120, "ffn_dim": 13824, "num_heads": 40}, "wan"),
    "wan 2.2": (WAN_WIDE | {"dim": 3072, "ffn_dim": 14336, "num_heads": 24}, "wan"),
    "hunyuan": (FLUX_WIDE | {"depth": 20, "depth_single_blocks": 40}, "hunyuan"),
    "hunyuan 1.5": (FULL["hunyuan 1.5"][1], "hunyuan15"),
    "hunyuan image": (
        {"context_in_dim": 3584, "hidden_size": 3584, "num_heads": 28, "depth": 20, "depth_single_blocks": 40}
        | {"mlp_ratio": 4.0, "axes_dim": [64, 64], "byt5": True},
        "hunyuan",
    ),
    "ltx": (
        {"in_channels": 128, "cross_attention_dim": 2048, "attention_head_dim": 64, "num_attention_heads": 32}
        | {"caption_channels": 4096, "num_layers": 28},
        "ltx",
    ),
    "ltx 2": (None, "ltx2"),
    "ltx 2 sound": (None, "ltx2"),
    "cosmos": (FULL["anima"][1] | {"image_model": "cosmos_predict2"}, "cosmos"),
    "anima": (FULL["anima"][1], "anima"),
    "ernie": (None, "ernie"),
    "krea2": (None, "krea2"),
    "hidream": (FULL["hidream"][1], "hidream"),
    "ideogram 4": (None, "ideogram4"),
    "kandinsky 5": (None, "kandinsky5"),
    "kandinsky 5 image": ({"model_dim": 2560, "ff_dim": 10240, "visual_embed_dim": 64}, "kandinsky5"),
    "ace-step": (
        {"attention_head_dim": 128, "num_attention_heads": 20, "num_layers": 24, "mlp_ratio": 2.5}
        | {"text_embedding_dim": 768, "ssl_latent_dims": [1024, 768], "lyric_encoder_vocab_size": 6693}
        | {"lyric_hidden_size": 1024},
        "ace",
    ),
    "ace-step 1.5": (
        {"hidden_size": 2048, "text_hidden_dim": 1024, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128}
        | {"fsq_dim": 2048}
        | {"intermediate_size": 6144, "encoder_hidden_size": 2048, "encoder_intermediate_size": 6144}
        | {"encoder_num_heads": 16},
        "ace",
    ),
    "stable audio": (
        {"embed_dim": 1536, "depth": 24, "num_heads": 24, "cond_token_dim": 768, "global_cond_dim": 1536}
        | {"project_cond_tokens": False},
        "stable-audio",
    ),
    "hidream o1": (None, None),
    "auraflow": (
        {"cond_seq_dim": 2048, "dim": 3072, "n_layers": 36, "n_double_layers": 4, "n_heads": 12}
        | {"global_conddim": 3072, "max_seq": 4096},
        "auraflow",
    ),
    "pixart": ({"hidden_size": 1152, "depth": 1, "num_heads": 16, "caption_channels": 4096}, None),
    "omnigen2": (
        {"hidden_size": 2520, "num_layers": 32, "num_refiner_layers": 2, "num_attention_heads": 21}
        | {"num_kv_heads": 7, "multiple_of": 256, "axes_dim_rope": (40, 40, 40), "text_feat_dim": 2048},
        "omnigen2",
    ),
}


def whole(name):
    """ComfyUI's model of full size, without memory for its weights, by its name in EVERY."""
    family, (wide, _) = EVERY[name], WHOLE[name]
    if not hasattr(comfy.supported_models, family.supported):
        pytest.skip(f"this ComfyUI has no {family.supported}")
    settings = {"image_model": family.config.get("image_model")}
    if wide is not None:
        settings = accepted({**family.config, **wide})
    config = getattr(comfy.supported_models, family.supported)(settings)
    config.set_inference_dtype(torch.float32, None)
    reads_itself = name in ("pixart", "ace-step 1.5")  # while it is built: not on meta, so with few blocks
    place = torch.device("cpu" if reads_itself else "meta")
    with place:
        return config.get_model(dict(family.weights), "", place)


@pytest.mark.column("recognized")
@pytest.mark.parametrize("name", EVERY)
def test_a_lora_on_the_whole_model_is_recognized(name, record_property):
    state = whole(name).diffusion_model.state_dict()
    layers = {path.removesuffix(".weight"): tensor.shape for path, tensor in state.items() if path.endswith(".weight")}
    layers = {path: shape[:2] for path, shape in layers.items() if len(shape) == 2}
    dotted = factors_of({f"diffusion_model.{path}": shape for path, shape in layers.items()})
    kohyas = factors_of({f"lora_unet_{path.replace('.', '_')}": shape for path, shape in layers.items()})
    for shapes in (dotted, kohyas):
        found = recognize_lora(shapes.items())
        assert getattr(found, "name", None) == WHOLE[name][1]
    if WHOLE[name][1] is None:
        record_property("says", "no")


@pytest.mark.parametrize("family", DIFFUSERS)
def test_layers_have_diffusers_names_and_shapes(family):
    """Every layer of diffusers' class is one of ComfyUI's, or a part of one, by the family's table."""
    diffusers = pytest.importorskip("diffusers")
    name, settings = DIFFUSERS[family]
    if not hasattr(diffusers, name):
        pytest.skip(f"this diffusers has no {name}")
    with torch.device("meta"):
        theirs = getattr(diffusers, name)(**settings).state_dict()
    names = registry.FAMILIES.get(FAMILY_OF[family]).layer_names
    ours = {}
    for path, tensor in full(family).diffusion_model.state_dict().items():
        if path.endswith(".weight") and tensor.ndim >= 2:
            for part in names.parts(path.removesuffix(".weight"), *tensor.shape[:2]):
                ours[f"{part.name}.weight"] = (part.length, *tensor.shape[1:])
    expected = {path: tuple(tensor.shape) for path, tensor in theirs.items() if path.endswith(".weight")}
    expected = {path: shape for path, shape in expected.items() if len(shape) >= 2}
    assert {path: ours.get(path) for path in expected} == expected


@pytest.mark.parametrize("family", FULL)
def test_saved_names_lead_back_to_their_weights(family):
    patcher = types.SimpleNamespace(model=full(family), backup={}, patches={})
    found = lora_stacks.model_weights(patcher)
    known, shapes = found.key_map, found.shapes
    layers = {
        weight.removesuffix(".weight"): shape
        for (_, weight), shape in shapes.items()
        if weight.endswith(".weight") and len(shape) in (2, 4) and "embedder.weight" not in weight
    }
    state = {}
    for base, (rows, columns, *kernel) in layers.items():
        state[f"{base}.lora_up.weight"] = torch.zeros(rows, 1, *(1 for _ in kernel))
        state[f"{base}.lora_down.weight"] = torch.zeros(1, columns, *kernel)
    for names in ("kohya", "peft"):
        saved = save.to_key_format(state, names, torch.bfloat16)
        bases = parse.layer_names(saved)
        targets = {**known, **layer_matching.find_targets(bases, known, shapes)}
        assert [
            base for base in bases if base not in (known if names == "kohya" else targets)
        ] == []  # ComfyUI's own loader knows kohya's
        rows: dict[str, int] = {}
        for base in bases:
            up = saved.get(f"{base}.lora_up.weight", saved.get(f"{base}.lora_B.weight"))
            part = targets[base].part
            assert part is None or part[2] == up.shape[0], base
            rows[targets[base].weight] = rows.get(targets[base].weight, 0) + up.shape[0]
        assert rows == {f"{base}.weight": shape[0] for base, shape in layers.items()}
    styles = {"sd1": "lora_unet_down_blocks_", "sdxl": "lora_unet_input_blocks_", "flux": "lora_unet_double_blocks_"}
    kohya = save.to_key_format(state, "kohya", torch.bfloat16)
    assert any(key.startswith(styles.get(family, "lora_unet_")) for key in kohya)
    expected = "unet." if family in ("sd1", "sdxl") else "transformer."
    assert all(key.startswith(expected) for key in save.to_key_format(state, "peft", torch.bfloat16))
