"""The settings of one tiny model of every family, of ComfyUI's own classes; `families.py` builds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

UNET = {
    "image_size": 32,
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 64,
    "num_res_blocks": [1, 1],
    "channel_mult": [1, 2],
    "transformer_depth": [1, 1],
    "transformer_depth_output": [1, 1, 1, 1],
    "transformer_depth_middle": 1,
    "context_dim": 12,
    "use_spatial_transformer": True,
    "use_linear_in_transformer": True,
    "adm_in_channels": None,
    "use_temporal_attention": False,
    "legacy": False,
}
FLUX = {
    "in_channels": 16,
    "out_channels": 16,
    "vec_in_dim": 8,
    "context_in_dim": 12,
    "hidden_size": 32,
    "mlp_ratio": 2.0,
    "num_heads": 2,
    "depth": 1,
    "depth_single_blocks": 1,
    "axes_dim": [4, 6, 6],
    "theta": 10000,
    "patch_size": 2,
    "qkv_bias": True,
    "guidance_embed": True,
}
CHROMA = {
    "image_model": "chroma",
    **{key: value for key, value in FLUX.items() if key not in ("vec_in_dim", "guidance_embed")},
    "in_channels": 64,
    "out_channels": 64,
    "in_dim": 64,
    "out_dim": 32,
    "hidden_dim": 16,
    "n_layers": 1,
    "vec_in_dim": None,
    "txt_ids_dims": [],
}
LUMINA = {
    "patch_size": 2,
    "in_channels": 16,
    "dim": 32,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 1,
    "multiple_of": 8,
    "ffn_dim_multiplier": 2.0,
    "qk_norm": True,
    "cap_feat_dim": 12,
    "axes_dims": [4, 6, 6],
    "axes_lens": [64, 64, 64],
}
COSMOS = {
    "max_img_h": 240,
    "max_img_w": 240,
    "max_frames": 128,
    "in_channels": 16,
    "out_channels": 16,
    "patch_spatial": 2,
    "patch_temporal": 1,
    "concat_padding_mask": True,
    "model_channels": 32,
    "num_blocks": 2,
    "num_heads": 2,
    "mlp_ratio": 2.0,
    "crossattn_emb_channels": 12,
    "pos_emb_cls": "rope3d",
    "use_adaln_lora": True,
    "adaln_lora_dim": 8,
}


HUNYUAN_VIDEO = {
    "image_model": "hunyuan_video",
    "in_channels": 16,
    "out_channels": 16,
    "vec_in_dim": 8,
    "context_in_dim": 12,
    "hidden_size": 32,
    "mlp_ratio": 2.0,
    "num_heads": 2,
    "depth": 1,
    "depth_single_blocks": 1,
    "axes_dim": [4, 6, 6],
    "theta": 256,
    "patch_size": [1, 2, 2],
    "qkv_bias": True,
    "guidance_embed": True,
    "byt5": False,
    "meanflow": False,
    "use_cond_type_embedding": False,
    "vision_in_dim": None,
    "meanflow_sum": False,
}
QWEN = {
    "image_model": "qwen_image",
    "patch_size": 2,
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 12,
    "axes_dims_rope": (4, 6, 6),
}
WAN = {
    "image_model": "wan2.1",
    "model_type": "t2v",
    "in_dim": 16,
    "dim": 36,
    "ffn_dim": 32,
    "freq_dim": 16,
    "text_dim": 12,
    "out_dim": 16,
    "num_heads": 2,
    "num_layers": 2,
}
LTX = {
    "image_model": "ltxv",
    "in_channels": 128,
    "cross_attention_dim": 32,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "caption_channels": 12,
    "num_layers": 2,
}
KANDINSKY = {
    "image_model": "kandinsky5",
    "in_text_dim": 12,
    "in_text_dim2": 8,
    "time_dim": 16,
    "model_dim": 32,
    "ff_dim": 48,
    "num_text_blocks": 1,
    "num_visual_blocks": 2,
    "axes_dims": (4, 6, 6),
}


@dataclass(frozen=True)
class Family:
    """A class of comfy.supported_models, the settings of a tiny model of it, its latents, and what its text encoder
    gives beside tokens of width `text`.

    `extras` are shapes; a list of them is a list of tensors, and a name stands for a mask, ids or a flag.
    `extra_config` replaces settings that ComfyUI's class has of its own; `sound` is the latent of the sound that comes
    with its video.
    """

    supported: str
    config: Mapping[str, Any]
    latent: tuple[int, ...] = (4, 16, 16)
    extras: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    predicts: str = "flow"
    text: int = 12
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    sound: tuple[int, ...] = ()


def _seconds() -> dict[str, torch.Tensor]:
    """The embedders of the seconds of Stable Audio, which are in its file."""
    draws, made = torch.Generator().manual_seed(0), {}
    for name in ("start", "total"):
        for key, shape in {"0.weights": (128,), "1.weight": (768, 257), "1.bias": (768,)}.items():
            drawn = torch.randn(shape, generator=draws) * 0.05
            made[f"conditioner.conditioners.seconds_{name}.embedder.embedding.{key}"] = drawn
    return made


FAMILIES = {
    "sd1": Family(
        "SD15", UNET | {"use_linear_in_transformer": False, "num_heads": 8, "num_head_channels": -1}, predicts="eps"
    ),
    "sd2-v": Family(
        "SD20",
        UNET,
        weights={"output_blocks.11.1.transformer_blocks.0.norm1.bias": torch.tensor([-1.0, 1.0])},
        predicts="v",
    ),
    "sdxl": Family(
        "SDXL",
        UNET | {"adm_in_channels": 2816, "num_classes": "sequential", "num_head_channels": 32},
        extras={"pooled_output": (1, 1280)},
        predicts="eps",
    ),
    "sd3": Family(
        "SD3",
        {
            "input_size": None,
            "patch_size": 2,
            "in_channels": 16,
            "depth": 2,
            "adm_in_channels": 8,
            "pos_embed_max_size": 16,
            "num_patches": 256,
            "qk_norm": "rms",
            "x_block_self_attn_layers": [0],
            "context_embedder_config": {
                "target": "torch.nn.Linear",
                "params": {"in_features": 12, "out_features": 128},
            },
        },
        (16, 8, 10),
        {"pooled_output": (1, 8)},
    ),
    "flux": Family("Flux", {"image_model": "flux", **FLUX}, (16, 8, 10), {"pooled_output": (1, 8)}),
    "flux schnell": Family(
        "FluxSchnell", {"image_model": "flux", **FLUX, "guidance_embed": False}, (16, 8, 10), {"pooled_output": (1, 8)}
    ),
    "qwen": Family("QwenImage", QWEN, (16, 1, 8, 10), {"attention_mask": "mask"}),
    "lumina2": Family("Lumina2", {"image_model": "lumina2", **LUMINA}, (16, 8, 10), {"attention_mask": "mask"}),
    "z-image": Family(
        "ZImage",
        {
            "image_model": "lumina2",
            **LUMINA,
            "dim": 256,
            "n_heads": 16,
            "n_kv_heads": 16,
            "z_image_modulation": True,
            "time_scale": 1000.0,
            "pad_tokens_multiple": 8,
        },
        (16, 8, 10),
    ),
    "wan": Family("WAN21_T2V", WAN, (16, 1, 8, 10)),
}


# Families that ComfyUI loads and that are tried for their gradients alone: their blocks change tensors in place, too.
OTHERS = {
    "chroma": Family(
        "Chroma",
        CHROMA,
        (16, 8, 10),
        {"pooled_output": (1, 8)},
    ),
    "auraflow": Family(
        "AuraFlow",
        {
            "cond_seq_dim": 12,
            "dim": 32,
            "n_layers": 2,
            "n_double_layers": 1,
            "n_heads": 2,
            "global_conddim": 32,
            "max_seq": 256,
        },
        (4, 8, 10),
    ),
    "pixart": Family(
        "PixArtAlpha",
        {
            "image_model": "pixart_alpha",
            "hidden_size": 48,
            "depth": 2,
            "num_heads": 2,
            "caption_channels": 12,
            "model_max_length": 6,
            "micro_condition": True,
        },
        (4, 40, 40),
        predicts="eps",
    ),
    "hunyuan image": Family(
        "HunyuanImage21",
        {
            **HUNYUAN_VIDEO,
            "in_channels": 64,
            "out_channels": 64,
            "vec_in_dim": None,
            "axes_dim": [8, 8],
            "patch_size": [1, 1],
            "guidance_embed": False,
        },
        (64, 8, 10),
    ),
    "omnigen2": Family(
        "Omnigen2",
        {
            "image_model": "omnigen2",
            "patch_size": 2,
            "in_channels": 16,
            "hidden_size": 32,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "num_attention_heads": 2,
            "num_kv_heads": 1,
            "multiple_of": 8,
            "axes_dim_rope": (4, 6, 6),
            "axes_lens": (64, 64, 64),
            "text_feat_dim": 12,
        },
        (16, 8, 10),
        {"attention_mask": "ones"},
    ),
    "anima": Family(
        "Anima",
        {
            "image_model": "anima",
            **COSMOS,
        },
        (16, 1, 8, 10),
        {"t5xxl_ids": "ids", "t5xxl_weights": (6,)},
    ),
    "cosmos": Family("CosmosT2IPredict2", {"image_model": "cosmos_predict2", **COSMOS}, (16, 1, 8, 10)),
    "ernie": Family(
        "ErnieImage",
        {
            "image_model": "ernie",
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_layers": 2,
            "ffn_hidden_size": 48,
            "in_channels": 128,
            "out_channels": 128,
            "text_in_dim": 12,
            "rope_axes_dim": (4, 6, 6),
        },
        (128, 8, 10),
    ),
    "ltx": Family("LTXV", LTX, (128, 1, 8, 10), {"attention_mask": "mask"}),
    "radiance": Family(
        "ChromaRadiance",
        {
            **CHROMA,
            "image_model": "chroma_radiance",
            "in_channels": 3,
            "out_channels": 3,
            "patch_size": 16,
            "nerf_hidden_size": 8,
            "nerf_mlp_ratio": 2,
            "nerf_depth": 2,
            "nerf_max_freqs": 2,
            "nerf_tile_size": 0,
            "nerf_final_head_type": "conv",
            "nerf_embedder_dtype": None,
            "use_x0": False,
            "use_sequential_txt_ids": False,
        },
        (3, 64, 80),
        {"pooled_output": (1, 8)},
    ),
    "flux kontext": Family(
        "Flux",
        {"image_model": "flux", **FLUX},
        (16, 8, 10),
        {"pooled_output": (1, 8), "reference_latents": [(1, 16, 4, 6)]},
    ),
    "flux2": Family(
        "Flux2",
        {
            **FLUX,
            "image_model": "flux2",
            "in_channels": 128,
            "out_channels": 128,
            "vec_in_dim": None,
            "mlp_ratio": 3.0,
            "axes_dim": [4, 4, 4, 4],
            "theta": 2000,
            "patch_size": 1,
            "qkv_bias": False,
            "txt_ids_dims": [3],
            "global_modulation": True,
            "mlp_silu_act": True,
            "ops_bias": False,
            "default_ref_method": "index",
            "ref_index_scale": 10.0,
        },
        (128, 8, 10),
        {"pooled_output": "nothing"},
    ),
    "krea2": Family(
        "Krea2",
        {
            "image_model": "krea2",
            "features": 64,
            "tdim": 16,
            "txtdim": 12,
            "heads": 2,
            "kvheads": 1,
            "multiplier": 1,
            "layers": 2,
            "txtlayers": 3,
            "txtheads": 2,
            "txtkvheads": 2,
        },
        (16, 1, 8, 10),
        text=36,
    ),
    "qwen edit": Family(
        "QwenImage",
        QWEN,
        (16, 1, 8, 10),
        {"attention_mask": "mask", "reference_latents": [(1, 16, 1, 4, 6)]},
    ),
    "wan i2v": Family("WAN21_I2V", {**WAN, "model_type": "i2v", "in_dim": 36}, (16, 1, 8, 10)),
    "wan 2.2 i2v": Family("WAN21_T2V", {**WAN, "in_dim": 36}, (16, 1, 8, 10)),
    "wan 2.2": Family("WAN22_T2V", {**WAN, "in_dim": 48, "out_dim": 48}, (48, 1, 8, 10)),
    "hunyuan": Family(
        "HunyuanVideo", HUNYUAN_VIDEO, (16, 1, 8, 10), {"pooled_output": (1, 8), "attention_mask": "mask"}
    ),
    "hunyuan 1.5": Family(
        "HunyuanVideo15",
        {
            **HUNYUAN_VIDEO,
            "in_channels": 65,
            "out_channels": 32,
            "vec_in_dim": None,
            "depth": 2,
            "depth_single_blocks": 0,
            "patch_size": [1, 1, 1],
            "guidance_embed": False,
            "byt5": True,
            "use_cond_type_embedding": True,
            "vision_in_dim": 16,
        },
        (32, 1, 4, 5),
        {"pooled_output": "nothing", "conditioning_byt5small": (1, 4, 1472)},
    ),
    "ltx 2": Family(
        "LTXAV",
        {
            **LTX,
            "image_model": "ltxav",
            "audio_cross_attention_dim": 16,
            "audio_attention_head_dim": 8,
            "audio_num_attention_heads": 2,
            "connector_attention_head_dim": 6,
            "connector_num_attention_heads": 2,
            "connector_num_layers": 1,
        },
        (128, 1, 8, 10),
        {"unprocessed_ltxav_embeds": "yes"},
    ),
    "hidream": Family(
        "HiDream",
        {
            "image_model": "hidream",
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 16,
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "caption_channels": [12, 10],
            "text_emb_dim": 8,
            "num_routed_experts": 4,
            "num_activated_experts": 2,
            "axes_dims_rope": (4, 6, 6),
            "max_resolution": (128, 128),
            "llama_layers": [0, 1, 1, 0],
        },
        (16, 8, 10),
        {"pooled_output": (1, 8), "conditioning_llama3": (1, 2, 5, 10)},
    ),
    "hidream o1": Family(
        "HiDreamO1",
        {
            "image_model": "hidream_o1",
            "text_config_overrides": {
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 8,
                "rope_dims": [2, 1, 1],
            },
            "vision_config_overrides": {
                "hidden_size": 16,
                "num_heads": 2,
                "intermediate_size": 24,
                "depth": 1,
                "num_position_embeddings": 16,
            },
        },
        (3, 64, 96),
        {"text_input_ids": "words"},
    ),
    "ideogram 4": Family(
        "Ideogram4",
        {"image_model": "ideogram4", "in_channels": 128, "num_layers": 2},
        (128, 8, 10),
        {"attention_mask": "mask"},
        text=52,  # 13 layers of the text encoder
        extra_config={
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "intermediate_size": 48,
            "adaln_dim": 8,
            "llm_features_dim": 52,
            "mrope_section": [4, 2, 2],
        },
    ),
    "kandinsky 5": Family("Kandinsky5", KANDINSKY, (16, 1, 8, 10), {"pooled_output": (1, 8)}),
    "kandinsky 5 image": Family(
        "Kandinsky5Image", {**KANDINSKY, "visual_embed_dim": 64}, (16, 8, 10), {"pooled_output": (1, 8)}
    ),
    "ace-step": Family(
        "ACEStep",
        {
            "audio_model": "ace",
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "mlp_ratio": 2.0,
            "text_embedding_dim": 12,
            "ssl_latent_dims": [10, 8],
            "lyric_encoder_vocab_size": 40,
            "lyric_hidden_size": 16,
        },
        (8, 16, 10),
        {"conditioning_lyrics": "lyrics"},
    ),
    "ace-step 1.5": Family(
        "ACEStep15",
        {
            "audio_model": "ace1.5",
            "hidden_size": 32,
            "text_hidden_dim": 12,
            "num_dit_layers": 2,
            "num_lyric_layers": 1,
            "num_timbre_layers": 1,
            "num_tokenizer_layers": 1,
            "num_heads": 2,
            "num_kv_heads": 1,
            "head_dim": 16,
            "intermediate_size": 48,
            "encoder_hidden_size": 32,
            "encoder_intermediate_size": 48,
            "encoder_num_heads": 2,
            "fsq_dim": 32,
        },
        (64, 20),
        {"conditioning_lyrics": (1, 5, 12)},
    ),
    "stable audio": Family(
        "StableAudio",
        {"audio_model": "dit1.0", "embed_dim": 64, "depth": 2, "num_heads": 2, "project_cond_tokens": True},
        (64, 20),
        weights=_seconds(),
        predicts="v",
        text=768,
    ),
}
WITH_SOUND = {"ltx 2 sound": replace(OTHERS["ltx 2"], latent=(128, 2, 4, 5), sound=(8, 10, 16))}
EVERY = FAMILIES | OTHERS | WITH_SOUND
CLIPS = [  # families of clips, beside those whose pictures have a frame
    "wan",
    "wan i2v",
    "wan 2.2 i2v",
    "wan 2.2",
    "hunyuan",
    "hunyuan 1.5",
    "ltx",
    "ltx 2",
    "ltx 2 sound",
    "cosmos",
    "kandinsky 5",
]
TITLES = {  # rows of docs/families.md
    "sd1": "SD 1.x",
    "sd2-v": "SD 2",
    "sdxl": "SDXL",
    "sd3": "SD 3",
    "flux": "Flux.1 dev",
    "flux schnell": "Flux.1 schnell",
    "flux kontext": "Flux Kontext",
    "flux2": "Flux.2",
    "krea2": "Krea 2",
    "chroma": "Chroma",
    "radiance": "Chroma Radiance",
    "qwen": "Qwen-Image",
    "qwen edit": "Qwen-Image-Edit",
    "lumina2": "Lumina 2",
    "z-image": "Z-Image",
    "wan": "Wan 2.1 and 2.2 T2V",
    "wan i2v": "Wan 2.1 I2V",
    "wan 2.2 i2v": "Wan 2.2 I2V 14B",
    "wan 2.2": "Wan 2.2 5B",
    "hunyuan": "HunyuanVideo",
    "hunyuan 1.5": "HunyuanVideo 1.5",
    "hunyuan image": "HunyuanImage 2.1",
    "ltx": "LTX-Video",
    "ltx 2": "LTX-2, pictures",
    "ltx 2 sound": "LTX-2, video with its sound",
    "cosmos": "Cosmos Predict 2",
    "anima": "Anima",
    "ernie": "ERNIE-Image",
    "hidream": "HiDream-I1",
    "hidream o1": "HiDream-O1",
    "ideogram 4": "Ideogram 4",
    "kandinsky 5": "Kandinsky 5",
    "kandinsky 5 image": "Kandinsky 5 Image",
    "ace-step": "ACE-Step",
    "ace-step 1.5": "ACE-Step 1.5",
    "stable audio": "Stable Audio",
    "auraflow": "AuraFlow",
    "pixart": "PixArt",
    "omnigen2": "OmniGen2",
}
