"""Every layer of diffusers' models finds its weight in ComfyUI's: the list comes from diffusers' own classes, in a tiny
size, next to ComfyUI's model of the same size.

Which rows of a weight a layer stands for is taken from diffusers' conversions of ComfyUI's checkpoints where it has
one, and spelled out for the others.
"""

import types

import comfy.model_management
import comfy.supported_models
import comfyui_version
import diffusers
import pytest
import torch
from comfy.ldm.flux.model import FluxParams
from diffusers.loaders import single_file_utils
from diffusers.models.condition_embedders.condition_embedder_anima import AnimaTextConditioner
from diffusers.pipelines.ace_step.modeling_ace_step import (
    AceStepAudioTokenDetokenizer,
    AceStepAudioTokenizer,
    AceStepConditionEncoder,
)
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from families import EVERY, build, connects_text_of_ltx_2
from graft_nodes.host import lora_stacks
from graft_nodes.patches.lora_files import layer_matching

D = "diffusion_model."
TWO_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
AXES = (4, 6, 6)
DOUBLE_AND_SINGLE = {**TWO_HEADS, "num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 12}
FLUX = {
    "image_model": "flux",
    "in_channels": 16,
    "out_channels": 16,
    "vec_in_dim": None,
    "context_in_dim": 12,
    "hidden_size": 32,
    "mlp_ratio": 4.0,
    "num_heads": 2,
    "depth": 1,
    "depth_single_blocks": 1,
    "axes_dim": list(AXES),
    "theta": 10000,
    "patch_size": 2,
    "qkv_bias": True,
    "guidance_embed": False,
    "txt_ids_dims": [1, 2],
}
HUNYUAN = {**TWO_HEADS, "num_refiner_layers": 2, "mlp_ratio": 2.0, "text_embed_dim": 12, "rope_axes_dim": AXES}
WAN = {
    "num_attention_heads": 2,
    "attention_head_dim": 18,
    "text_dim": 12,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 2,
}
COSMOS = {**TWO_HEADS, "num_layers": 2, "mlp_ratio": 2.0, "text_embed_dim": 12, "adaln_lora_dim": 8}
COSMOS_1 = {
    "image_model": "cosmos",
    "max_img_h": 240,
    "max_img_w": 240,
    "max_frames": 128,
    "in_channels": 16,
    "out_channels": 16,
    "patch_spatial": 2,
    "patch_temporal": 1,
    "concat_padding_mask": True,
    "block_config": "FA-CA-MLP",
    "model_channels": 32,
    "num_blocks": 2,
    "num_heads": 2,
    "mlp_ratio": 2.0,
    "block_x_format": "THWBD",
    "crossattn_emb_channels": 12,
    "pos_emb_cls": "rope3d",
    "pos_emb_learnable": False,
    "affline_emb_norm": True,
    "use_adaln_lora": True,
    "adaln_lora_dim": 8,
    "extra_per_block_abs_pos_emb": True,
    "extra_per_block_abs_pos_emb_type": "learnable",
}
COGVIDEOX = {**TWO_HEADS, "num_layers": 2, "text_embed_dim": 12, "time_embed_dim": 16}
COGVIDEOX |= {"use_rotary_positional_embeddings": True}
JOYIMAGE = {"hidden_size": 32, "num_attention_heads": 2, "text_dim": 12, "num_layers": 2}
ACE = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
ACE_CODES = {**ACE, "intermediate_size": 96, "head_dim": 128}
LINEAR_UNET = {
    "block_out_channels": (64, 128),
    "layers_per_block": 1,
    "down_block_types": ["CrossAttnDownBlock2D"] * 2,
    "up_block_types": ["CrossAttnUpBlock2D"] * 2,
    "cross_attention_dim": 12,
    "attention_head_dim": 8,
    "use_linear_projection": True,
}
# name: (ComfyUI's model, by its name in EVERY or as (class, settings); diffusers' class and sizes; prefix in files)
# diffusers has no class of OmniGen2: these are the layers of its authors' own (VectorSpaceLab/OmniGen2,
# omnigen2/models/transformers/transformer_omnigen2.py), which PEFT trains and whose pipeline loads LoRAs.
OMNIGEN2_BLOCK = {
    "attn.to_q": (32, 32),
    "attn.to_k": (16, 32),
    "attn.to_v": (16, 32),
    "attn.to_out.0": (32, 32),
    "feed_forward.linear_1": (128, 32),
    "feed_forward.linear_2": (32, 128),
    "feed_forward.linear_3": (128, 32),
}
OMNIGEN2 = {
    "x_embedder": (32, 64),
    "ref_image_patch_embedder": (32, 64),
    "time_caption_embed.timestep_embedder.linear_1": (32, 256),
    "time_caption_embed.timestep_embedder.linear_2": (32, 32),
    "time_caption_embed.caption_embedder.1": (32, 12),
    "norm_out.linear_1": (32, 32),
    "norm_out.linear_2": (64, 32),
    **{f"context_refiner.0.{layer}": shape for layer, shape in OMNIGEN2_BLOCK.items()},
    **{
        f"{block}.{layer}": shape
        for block in ("noise_refiner.0", "ref_image_refiner.0", "layers.0", "layers.1")
        for layer, shape in {**OMNIGEN2_BLOCK, "norm1.linear": (128, 32)}.items()
    },
}
MODELS = {
    "flux": (
        ("flux", {"mlp_ratio": 4.0}),
        diffusers.FluxTransformer2DModel,
        {
            **DOUBLE_AND_SINGLE,
            "in_channels": 64,
            "pooled_projection_dim": 8,
            "guidance_embeds": True,
            "axes_dims_rope": AXES,
        },
        "transformer.",
    ),
    "flux2": (
        ("flux2", {}),
        diffusers.Flux2Transformer2DModel,
        {**DOUBLE_AND_SINGLE, "in_channels": 128, "axes_dims_rope": (4, 4, 4, 4)},
        "transformer.",
    ),
    "chroma": (
        ("chroma", {"mlp_ratio": 4.0}),
        diffusers.ChromaTransformer2DModel,
        {**DOUBLE_AND_SINGLE, "axes_dims_rope": AXES, "approximator_hidden_dim": 16, "approximator_layers": 1},
        "transformer.",
    ),
    "longcat": (
        ("LongCatImage", FLUX),
        diffusers.LongCatImageTransformer2DModel,
        {**DOUBLE_AND_SINGLE, "axes_dims_rope": list(AXES)},
        "transformer.",
    ),
    "ovis": (
        ("Flux", {**FLUX, "yak_mlp": True, "txt_norm": True}),
        diffusers.OvisImageTransformer2DModel,
        {**DOUBLE_AND_SINGLE, "axes_dims_rope": AXES},
        "transformer.",
    ),
    "ltx": (
        ("ltx", {}),
        diffusers.LTXVideoTransformer3DModel,
        {**TWO_HEADS, "num_layers": 2, "cross_attention_dim": 32, "caption_channels": 12},
        "transformer.",
    ),
    "ltx 2": (
        ("ltx 2", {}),
        diffusers.LTX2VideoTransformer3DModel,
        {
            **TWO_HEADS,
            "num_layers": 2,
            "cross_attention_dim": 32,
            "caption_channels": 12,
            "audio_num_attention_heads": 2,
            "audio_attention_head_dim": 8,
            "audio_cross_attention_dim": 16,
        },
        "transformer.",
    ),
    "ltx 2 connectors": (
        ("ltx 2", {}),
        LTX2TextConnectors,
        {
            "caption_channels": 12,
            "video_connector_num_attention_heads": 2,
            "video_connector_attention_head_dim": 6,
            "video_connector_num_layers": 1,
            "audio_connector_num_attention_heads": 2,
            "audio_connector_attention_head_dim": 6,
            "audio_connector_num_layers": 1,
        },
        "connectors.",
    ),
    "ace-step 1.5": (
        ("ace-step 1.5", {}),
        diffusers.AceStepTransformer1DModel,
        {**ACE, "num_hidden_layers": 2},
        "transformer.",
    ),
    "ace-step 1.5 encoder": (
        ("ace-step 1.5", {}),
        AceStepConditionEncoder,
        {
            **ACE,
            "text_hidden_dim": 12,
            "num_lyric_encoder_hidden_layers": 1,
            "num_timbre_encoder_hidden_layers": 1,
        },
        "condition_encoder.",
    ),
    "ace-step 1.5 tokenizer": (
        ("ace-step 1.5", {}),
        AceStepAudioTokenizer,
        {**ACE_CODES, "num_attention_pooler_hidden_layers": 1, "fsq_dim": 32},
        "audio_tokenizer.",
    ),
    "ace-step 1.5 detokenizer": (
        ("ace-step 1.5", {}),
        AceStepAudioTokenDetokenizer,
        {**ACE_CODES, "num_attention_pooler_hidden_layers": 2},
        "audio_token_detokenizer.",
    ),
    "hunyuan": (
        ("hunyuan", {}),
        diffusers.HunyuanVideoTransformer3DModel,
        {**HUNYUAN, "num_layers": 1, "num_single_layers": 1, "pooled_projection_dim": 8},
        "transformer.",
    ),
    "hunyuan 1.5": (
        ("hunyuan 1.5", {}),
        diffusers.HunyuanVideo15Transformer3DModel,
        {**HUNYUAN, "num_layers": 2, "image_embed_dim": 16},
        "transformer.",
    ),
    "hunyuan image": (
        ("hunyuan image", {"byt5": True, "guidance_embed": True, "meanflow": True}),
        diffusers.HunyuanImageTransformer2DModel,
        {
            **HUNYUAN,
            "num_layers": 1,
            "num_single_layers": 1,
            "text_embed_2_dim": 1472,
            "rope_axes_dim": (8, 8),
            "guidance_embeds": True,
            "use_meanflow": True,
        },
        "transformer.",
    ),
    "krea2": (
        ("krea2", {}),
        diffusers.Krea2Transformer2DModel,
        {
            "num_layers": 2,
            "attention_head_dim": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 128,
            "timestep_embed_dim": 16,
            "text_hidden_dim": 12,
            "num_text_layers": 3,
            "text_num_attention_heads": 2,
            "text_num_key_value_heads": 2,
            "text_intermediate_size": 128,
            "axes_dims_rope": (8, 12, 12),
        },
        "transformer.",
    ),
    "kandinsky 5": (
        ("kandinsky 5", {}),
        diffusers.Kandinsky5Transformer3DModel,
        {
            "in_visual_dim": 16,
            "in_text_dim": 12,
            "in_text_dim2": 8,
            "time_dim": 16,
            "out_visual_dim": 16,
            "model_dim": 32,
            "ff_dim": 48,
            "num_text_blocks": 1,
            "num_visual_blocks": 2,
            "axes_dims": AXES,
            "visual_cond": True,
        },
        "transformer.",
    ),
    "cosmos": (
        ("cosmos", {}),
        diffusers.CosmosTransformer3DModel,
        {**COSMOS, "extra_pos_embed_type": None},
        "transformer.",
    ),
    "cosmos 1": (("CosmosT2V", COSMOS_1), diffusers.CosmosTransformer3DModel, COSMOS, "transformer."),
    "anima": (
        ("anima", {}),
        diffusers.CosmosTransformer3DModel,
        {**COSMOS, "extra_pos_embed_type": None},
        "transformer.",
    ),
    "anima's text": (
        ("anima", {}),
        AnimaTextConditioner,
        {"source_dim": 12, "target_dim": 12, "model_dim": 12, "num_layers": 1, "num_attention_heads": 2},
        "text_conditioner.",
    ),
    "pixart": (
        ("pixart", {}),
        diffusers.PixArtTransformer2DModel,
        {
            "num_attention_heads": 2,
            "attention_head_dim": 24,
            "num_layers": 2,
            "cross_attention_dim": 48,
            "caption_channels": 12,
        },
        "transformer.",
    ),
    "sd3": (
        ("sd3", {}),
        diffusers.SD3Transformer2DModel,
        {
            "num_attention_heads": 2,
            "attention_head_dim": 64,
            "num_layers": 2,
            "dual_attention_layers": (0,),
            "joint_attention_dim": 12,
            "caption_projection_dim": 128,
            "pooled_projection_dim": 8,
        },
        "transformer.",
    ),
    "wan": (("wan", {}), diffusers.WanTransformer3DModel, WAN, "transformer."),
    "wan i2v": (
        ("wan i2v", {}),
        diffusers.WanTransformer3DModel,
        {**WAN, "in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 36},
        "transformer.",
    ),
    "wan vace": (
        ("WAN21_Vace", {**EVERY["wan"].config, "model_type": "vace", "vace_layers": 2, "vace_in_dim": 96}),
        diffusers.WanVACETransformer3DModel,
        {**WAN, "vace_layers": [0, 1]},
        "transformer.",
    ),
    "wan animate": (
        (
            "WAN22_Animate",
            {**EVERY["wan"].config, "model_type": "animate", "in_dim": 36, "num_layers": 5},
        ),
        diffusers.WanAnimateTransformer3DModel,
        {**WAN, "num_layers": 5, "added_kv_proj_dim": 36},
        "transformer.",
    ),
    "qwen": (
        ("qwen", {}),
        diffusers.QwenImageTransformer2DModel,
        {**TWO_HEADS, "num_layers": 2, "joint_attention_dim": 12, "axes_dims_rope": AXES},
        "transformer.",
    ),
    "lumina2": (
        ("lumina2", {"ffn_dim_multiplier": 4.0}),
        diffusers.Lumina2Transformer2DModel,
        {
            "hidden_size": 32,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "num_attention_heads": 2,
            "num_kv_heads": 1,
            "multiple_of": 8,
            "ffn_dim_multiplier": 4.0 if comfyui_version.__version__ == "0.3.64" else 1.0,  # as it counts in ComfyUI
            "cap_feat_dim": 12,
            "axes_dim_rope": AXES,
        },
        "transformer.",
    ),
    "z-image": (
        ("z-image", {"ffn_dim_multiplier": 8.0 / 3.0, "multiple_of": 2, "dim": 1024, "n_heads": 64, "n_kv_heads": 64}),
        diffusers.ZImageTransformer2DModel,
        {
            "dim": 1024,
            "n_layers": 2,
            "n_refiner_layers": 1,
            "n_heads": 64,
            "n_kv_heads": 64,
            "cap_feat_dim": 12,
            "axes_dims": list(AXES),
        },
        "transformer.",
    ),
    "auraflow": (
        ("auraflow", {}),
        diffusers.AuraFlowTransformer2DModel,
        {
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 12,
            "caption_projection_dim": 32,
            "pos_embed_max_size": 256,
        },
        "transformer.",
    ),
    "hidream": (
        ("hidream", {}),
        diffusers.HiDreamImageTransformer2DModel,
        {
            **TWO_HEADS,
            "patch_size": 2,
            "in_channels": 16,
            "num_layers": 2,
            "num_single_layers": 2,
            "caption_channels": [12, 10],
            "text_emb_dim": 8,
            "axes_dims_rope": AXES,
            "llama_layers": [0, 1, 1, 0],
        },
        "transformer.",
    ),
    "ernie": (
        ("ernie", {}),
        diffusers.ErnieImageTransformer2DModel,
        {
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_layers": 2,
            "ffn_hidden_size": 48,
            "in_channels": 128,
            "out_channels": 128,
            "text_in_dim": 12,
        },
        "transformer.",
    ),
    "ideogram 4": (
        ("ideogram 4", {}),
        diffusers.Ideogram4Transformer2DModel,
        {**TWO_HEADS, "num_layers": 2, "intermediate_size": 48, "adaln_dim": 8, "llm_features_dim": 52},
        "transformer.",
    ),
    "stable audio": (
        ("stable audio", {}),
        diffusers.StableAudioDiTModel,
        {
            "num_layers": 2,
            "attention_head_dim": 32,
            "num_attention_heads": 2,
            "num_key_value_attention_heads": 2,
            "cross_attention_dim": 64,
        },
        "transformer.",
    ),
    "cogvideox": (
        ("CogVideoX_T2V", {"image_model": "cogvideox", **COGVIDEOX}),
        diffusers.CogVideoXTransformer3DModel,
        COGVIDEOX,
        "transformer.",
    ),
    "mochi": (  # ComfyUI takes no other width
        (
            "GenmoMochi",
            {
                "image_model": "mochi_preview",
                "in_channels": 12,
                "hidden_size_x": 3072,
                "hidden_size_y": 1536,
                "depth": 2,
                "num_heads": 24,
                "mlp_ratio_x": 4.0,
                "mlp_ratio_y": 4.0,
                "use_t5": True,
                "learn_sigma": False,
                "qk_norm": True,
                "qkv_bias": False,
                "out_bias": True,
            },
        ),
        diffusers.MochiTransformer3DModel,
        {"num_layers": 2},
        "transformer.",
    ),
    "hunyuan dit": (
        (
            "HunyuanDiT1",
            {
                "image_model": "hydit1",
                "depth": 4,
                "hidden_size": 32,
                "num_heads": 2,
                "mlp_ratio": 4.0,
                "size_cond": True,
                "use_style_cond": True,
            },
        ),
        diffusers.HunyuanDiT2DModel,
        {
            **TWO_HEADS,
            "in_channels": 4,
            "patch_size": 2,
            "hidden_size": 32,
            "num_layers": 4,
        },
        "transformer.",
    ),
    "omnigen2": (("omnigen2", {}), None, OMNIGEN2, "transformer."),
    "joyimage": (
        ("JoyImage", {"image_model": "joyimage", "in_channels": 16, **JOYIMAGE}),
        diffusers.JoyImageEditTransformer3DModel,
        JOYIMAGE,
        "transformer.",
    ),
    "sd1": (
        ("sd1", {}),
        diffusers.UNet2DConditionModel,
        {**LINEAR_UNET, "use_linear_projection": False},
        "unet.",
    ),
    "sd2": (("sd2-v", {}), diffusers.UNet2DConditionModel, LINEAR_UNET, "unet."),
    "sdxl": (
        ("sdxl", {}),
        diffusers.UNet2DConditionModel,
        {
            **LINEAR_UNET,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
        },
        "unet.",
    ),
}
OTHER_PREFIXES = ("lora_transformer_", "lycoris_", "base_model.model.", "")  # OneTrainer, SimpleTuner, PEFT, DiffSynth
WITHOUT_COUNTERPART = {  # (model, layer): why
    ("ltx 2 connectors", "text_proj_in"): "ComfyUI has it in the text encoder, and diffusers trains no LoRA of it",
}


def on_meta(kind, settings):
    """A model of ComfyUI that tiny_families.py has no settings for, without memory for its weights."""
    if not hasattr(comfy.supported_models, kind):
        pytest.skip(f"this ComfyUI has no {kind}")
    newer = {*settings} & {"yak_mlp"} - {*FluxParams.__dataclass_fields__}
    if newer:
        pytest.skip(f"this ComfyUI's Flux has no {', '.join(newer)}")
    config = getattr(comfy.supported_models, kind)(dict(settings))
    config.set_inference_dtype(torch.float32, None)
    with torch.device("meta"):
        return types.SimpleNamespace(model=config.get_model({}, "", torch.device("meta")), backup={}, patches={})


@pytest.fixture(scope="module")
def models():
    """{name: patcher} of ComfyUI's models, built when asked for; every test leaves them as they are."""
    built = {}

    def of(name):
        (family, settings), *_ = MODELS[name]
        if name not in built:
            built[name] = build(family, **settings) if family in EVERY else on_meta(family, settings)
        return built[name]

    return of


def layers_of_diffusers(name):
    """{layer: shape of its weight} of diffusers' class; as they are listed, where it has none."""
    _, kind, sizes, _ = MODELS[name]
    if kind is None:
        return sizes
    with torch.device("meta"):
        model = kind(**sizes)
    found = {}
    for path, part in model.named_modules():
        weight = getattr(part, "weight", None)
        if weight is not None and weight.ndim > 1 and not isinstance(part, torch.nn.Embedding):
            found[path] = tuple(weight.shape)
    assert len(found) > 5
    return found


def found_targets(patcher, names):
    """What Graft finds for the names of a file, as it reads files."""
    weights = lora_stacks.model_weights(patcher)
    known = {name: weights.key_map[name] for name in names if name in weights.key_map}
    found = {**known, **layer_matching.find_targets(names, weights.key_map, weights.shapes)}
    return {name: target for name, target in found.items() if (target.model, target.weight) in weights.shapes}


def shape_of(target, shapes):
    rows, rest = 0, ()
    for piece in target.pieces:
        count, *rest = shapes[piece.model, piece.weight]
        rows += count if piece.part is None else piece.part[2]
    return rows, *rest


def spelled(prefix, layer):
    """A layer under a prefix of files: those that end in an underscore have underscores for dots."""
    return prefix + (layer.replace(".", "_") if prefix.endswith("_") else layer)


def is_there(name, layer):
    """Whether ComfyUI's model of this version has the part of the network that a layer is in."""
    return (name, layer) not in WITHOUT_COUNTERPART


def skip_what_this_version_lacks(name):
    if name == "ltx 2 connectors" and hasattr(comfy.supported_models, "LTXAV") and not connects_text_of_ltx_2():
        pytest.skip("this ComfyUI has the connectors in the text encoder")


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_of_diffusers_finds_its_weight(models, name):
    skip_what_this_version_lacks(name)
    patcher, prefix = models(name), MODELS[name][3]
    shapes = lora_stacks.model_weights(patcher).shapes
    layers = {layer: shape for layer, shape in layers_of_diffusers(name).items() if is_there(name, layer)}
    found = found_targets(patcher, [prefix + layer for layer in layers])
    assert {layer: shape_of(found[prefix + layer], shapes) for layer in layers if prefix + layer in found} == layers
    rows = {}
    for target in found.values():
        for piece in target.pieces:
            rows.setdefault(piece.weight, []).append(piece.part)
    for weight, parts in rows.items():  # each row of a weight has one name, and all of them have one
        total = shapes["model", weight][0]
        pieces = sorted((0, total) if part is None else part[1:] for part in parts)
        starts = [sum(length for _, length in pieces[:number]) for number in range(len(pieces))]
        assert [start for start, _ in pieces] == starts and sum(length for _, length in pieces) == total, weight


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model[3] == "transformer."])
@pytest.mark.parametrize("prefix", OTHER_PREFIXES, ids=lambda prefix: prefix or "bare")
def test_other_trainers_spell_the_same_layers(models, name, prefix):
    patcher = models(name)
    layers = list(layers_of_diffusers(name))
    usual = found_targets(patcher, ["transformer." + layer for layer in layers])
    found = found_targets(patcher, [spelled(prefix, layer) for layer in layers])
    for layer in layers:
        target, expected = found.get(spelled(prefix, layer)), usual["transformer." + layer]
        assert target is not None and (target.weight, target.part) == (expected.weight, expected.part), layer


CONVERSIONS = {  # diffusers' own, and what they cannot do in this size
    "flux2": ("flux2_transformer_checkpoint", ()),
    "ltx": ("ltx_transformer_checkpoint", ()),
    "sd3": ("sd3_transformer_checkpoint", ()),
    "wan": ("wan_transformer", ()),
    "wan i2v": ("wan_transformer", ()),
    "z-image": ("z_image_transformer_checkpoint", ()),
    "auraflow": ("auraflow_transformer_checkpoint", ()),
    "cosmos": ("cosmos_transformer_checkpoint", ()),
    "ernie": ("ernie_image_transformer_checkpoint", ()),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_rows_are_those_of_diffusers_conversion(models, name):
    """Each weight of the converted model, put into the rows of its target as a difference is, is what is there."""
    patcher, (conversion, without) = models(name), CONVERSIONS[name]
    base = {key: tensor.detach() for key, tensor in patcher.model.state_dict().items()}
    plain = {key.removeprefix(D): tensor.clone() for key, tensor in base.items() if key.startswith(D)}
    plain = {key: tensor for key, tensor in plain.items() if not any(part in key for part in without)}
    theirs = getattr(single_file_utils, f"convert_{conversion}_to_diffusers")(plain)
    layers = [layer for layer in layers_of_diffusers(name) if f"{layer}.weight" in theirs]
    assert len(layers) > 15
    found = found_targets(patcher, ["transformer." + layer for layer in layers])
    for layer in layers:
        target = found["transformer." + layer]
        expected = theirs[f"{layer}.weight"]
        if target.function is not None:
            expected = target.function(expected)
        held = base[target.weight]
        if target.part is not None:
            held = held[target.part[1] : target.part[1] + target.part[2]]
        assert torch.equal(held.reshape(expected.shape), expected), layer
