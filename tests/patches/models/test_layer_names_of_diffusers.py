"""ComfyUI's layers of each family, renamed, are those of diffusers' model: none is missing, and none is too many."""

import diffusers
import pytest
import torch
from graft_nodes.patches.models.registry import FAMILIES

FLUX = {
    "": "img_in txt_in",
    "time_in.": "in_layer out_layer",
    "vector_in.": "in_layer out_layer",
    "guidance_in.": "in_layer out_layer",
    "double_blocks.0.img_": "mod.lin attn.qkv attn.proj mlp.0 mlp.2",
    "double_blocks.0.txt_": "mod.lin attn.qkv attn.proj mlp.0 mlp.2",
    "single_blocks.0.": "linear1 linear2 modulation.lin",
    "final_layer.": "linear adaLN_modulation.1",
}
HUNYUAN = {
    **FLUX,
    "": "img_in.proj txt_in.input_embedder",
    "txt_in.t_embedder.": "in_layer out_layer",
    "txt_in.c_embedder.": "in_layer out_layer",
    "txt_in.individual_token_refiner.blocks.0.": "adaLN_modulation.1 self_attn.qkv self_attn.proj mlp.0 mlp.2",
}
LUMINA_BLOCK = "attention.qkv attention.out feed_forward.w1 feed_forward.w2 feed_forward.w3"
LUMINA = {
    "": "x_embedder t_embedder.mlp.0 t_embedder.mlp.2 cap_embedder.1 final_layer.linear final_layer.adaLN_modulation.1",
    "noise_refiner.0.": LUMINA_BLOCK,
    "context_refiner.0.": LUMINA_BLOCK,
    "layers.0.": LUMINA_BLOCK,
}
KREA_BLOCK = "attn.wq attn.wk attn.wv attn.gate attn.wo mlp.gate mlp.up mlp.down"
SMALL = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1}
AXES = (4, 6, 6)
CASES = {  # the layers of ComfyUI, the class of diffusers, its sizes
    "sd3": (
        {
            "t_embedder.mlp.": "0 2",
            "y_embedder.mlp.": "0 2",
            "": "context_embedder final_layer.linear final_layer.adaLN_modulation.1",
            "joint_blocks.0.context_block.": "attn.qkv attn.proj mlp.fc1 mlp.fc2 adaLN_modulation.1",
            "joint_blocks.0.x_block.": "attn.qkv attn.proj attn2.qkv attn2.proj mlp.fc1 mlp.fc2 adaLN_modulation.1",
            "joint_blocks.1.context_block.": "attn.qkv adaLN_modulation.1",
            "joint_blocks.1.x_block.": "attn.qkv attn.proj mlp.fc1 mlp.fc2 adaLN_modulation.1",
        },
        "SD3Transformer2DModel",
        {**SMALL, "num_layers": 2, "dual_attention_layers": (0,), "caption_projection_dim": 32},
    ),
    "flux": (
        FLUX,
        "FluxTransformer2DModel",
        {**SMALL, "num_single_layers": 1, "guidance_embeds": True, "axes_dims_rope": AXES},
    ),
    "flux2": (
        {
            "": "img_in txt_in double_stream_modulation_img.lin double_stream_modulation_txt.lin"
            " single_stream_modulation.lin",
            "time_in.": "in_layer out_layer",
            "guidance_in.": "in_layer out_layer",
            "double_blocks.0.img_": "attn.qkv attn.proj mlp.0 mlp.2",
            "double_blocks.0.txt_": "attn.qkv attn.proj mlp.0 mlp.2",
            "single_blocks.0.": "linear1 linear2",
            "final_layer.": "linear adaLN_modulation.1",
        },
        "Flux2Transformer2DModel",
        {**SMALL, "num_single_layers": 1, "axes_dims_rope": (4, 4, 4, 4)},
    ),
    "chroma": (
        {
            "": "img_in txt_in final_layer.linear distilled_guidance_layer.in_proj distilled_guidance_layer.out_proj",
            "distilled_guidance_layer.layers.0.": "in_layer out_layer",
            "double_blocks.0.img_": "attn.qkv attn.proj mlp.0 mlp.2",
            "double_blocks.0.txt_": "attn.qkv attn.proj mlp.0 mlp.2",
            "single_blocks.0.": "linear1 linear2",
        },
        "ChromaTransformer2DModel",
        {**SMALL, "num_single_layers": 1, "axes_dims_rope": AXES, "approximator_layers": 1},
    ),
    "ltx": (
        {
            "": "patchify_proj proj_out adaln_single.linear caption_projection.linear_1 caption_projection.linear_2",
            "adaln_single.emb.timestep_embedder.": "linear_1 linear_2",
            "transformer_blocks.0.attn1.": "to_q to_k to_v to_out.0",
            "transformer_blocks.0.attn2.": "to_q to_k to_v to_out.0",
            "transformer_blocks.0.ff.net.": "0.proj 2",
        },
        "LTXVideoTransformer3DModel",
        {**SMALL, "cross_attention_dim": 32},
    ),
    "stable-audio": (
        {
            "": "transformer.project_in transformer.project_out",
            "to_timestep_embed.": "0 2",
            "to_global_embed.": "0 2",
            "to_cond_embed.": "0 2",
            "transformer.layers.0.": "self_attn.to_qkv self_attn.to_out cross_attn.to_q cross_attn.to_kv"
            " cross_attn.to_out ff.ff.0.proj ff.ff.2",
        },
        "StableAudioDiTModel",
        {"num_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2, "num_key_value_attention_heads": 2},
    ),
    "hunyuan": (
        HUNYUAN,
        "HunyuanVideoTransformer3DModel",
        {**SMALL, "num_single_layers": 1, "num_refiner_layers": 1, "rope_axes_dim": AXES},
    ),
    "hunyuan15": (
        {
            **{prefix: names for prefix, names in HUNYUAN.items() if not prefix.startswith(("vec", "gui", "single"))},
            "byt5_in.": "fc1 fc2 fc3",
            "vision_in.proj.": "1 3",
        },
        "HunyuanVideo15Transformer3DModel",
        {**SMALL, "num_refiner_layers": 1, "rope_axes_dim": AXES},
    ),
    "lumina": (
        {**LUMINA, "layers.0.adaLN_modulation.": "1", "noise_refiner.0.adaLN_modulation.": "1"},
        "Lumina2Transformer2DModel",
        {
            "hidden_size": 32,
            "num_layers": 1,
            "num_refiner_layers": 1,
            "num_attention_heads": 2,
            "num_kv_heads": 1,
            "axes_dim_rope": AXES,
        },
    ),
    "z-image": (
        {**LUMINA, "layers.0.adaLN_modulation.": "0", "noise_refiner.0.adaLN_modulation.": "0"},
        "ZImageTransformer2DModel",
        {"dim": 32, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "axes_dims": list(AXES)},
    ),
    "krea2": (
        {
            "": "first last.linear tmlp.0 tmlp.2 tproj.1 txtmlp.1 txtmlp.3 txtfusion.projector",
            "blocks.0.": KREA_BLOCK,
            "txtfusion.layerwise_blocks.0.": KREA_BLOCK,
            "txtfusion.refiner_blocks.0.": KREA_BLOCK,
        },
        "Krea2Transformer2DModel",
        {
            **SMALL,
            "num_key_value_heads": 1,
            "num_layerwise_text_blocks": 1,
            "num_refiner_text_blocks": 1,
            "axes_dims_rope": AXES,
        },
    ),
    "cosmos": (
        {
            "": "x_embedder.proj.1 t_embedder.1.linear_1 t_embedder.1.linear_2",
            "blocks.0.self_attn.": "q_proj k_proj v_proj output_proj",
            "blocks.0.cross_attn.": "q_proj k_proj v_proj output_proj",
            "blocks.0.mlp.": "layer1 layer2",
            "blocks.0.adaln_modulation_": "self_attn.1 self_attn.2 cross_attn.1 cross_attn.2 mlp.1 mlp.2",
            "final_layer.": "linear adaln_modulation.1 adaln_modulation.2",
        },
        "CosmosTransformer3DModel",
        {**SMALL, "extra_pos_embed_type": None},
    ),
    "ideogram4": (
        {
            "": "input_proj llm_cond_proj t_embedding.mlp_in t_embedding.mlp_out adaln_proj",
            "layers.0.attention.": "qkv o",
            "layers.0.": "feed_forward.w1 feed_forward.w2 feed_forward.w3 adaln_modulation",
            "final_layer.": "linear adaln_modulation",
        },
        "Ideogram4Transformer2DModel",
        SMALL,
    ),
}


@pytest.mark.parametrize(
    ("family", "layers", "model", "sizes"), [(name, *case) for name, case in CASES.items()], ids=CASES
)
def test_layers_are_those_of_diffusers_one_by_one(family, layers, model, sizes):
    with torch.device("meta"):
        theirs = getattr(diffusers, model)(**sizes)
    expected = [name for name, part in theirs.named_modules() if isinstance(part, torch.nn.Linear | torch.nn.Conv3d)]
    rename = FAMILIES.get(family).layer_names.parts
    ours = [
        part.name for prefix, names in layers.items() for name in names.split() for part in rename(prefix + name, 40, 8)
    ]
    assert sorted(ours) == sorted(expected)
