"""One tiny, randomly initialised model of every family that training knows, of ComfyUI's own classes, with captions it
understands.
"""

from __future__ import annotations

import contextlib
import functools
import unittest.mock
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import comfy.model_patcher
import comfy.supported_models
import pytest
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


@dataclass(frozen=True)
class Family:
    """A class of comfy.supported_models, the settings of a tiny model of it, its latents, and what its text encoder
    gives beside tokens.
    """

    supported: str
    config: Mapping[str, Any]
    latent: tuple[int, ...] = (4, 16, 16)
    extras: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    predicts: str = "flow"


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
    "qwen": Family(
        "QwenImage",
        {
            "image_model": "qwen_image",
            "patch_size": 2,
            "in_channels": 64,
            "out_channels": 16,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 12,
            "axes_dims_rope": (4, 6, 6),
        },
        (16, 1, 8, 10),
        {"attention_mask": "mask"},
    ),
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
    "wan": Family(
        "WAN21_T2V",
        {
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
        },
        (16, 1, 8, 10),
    ),
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
            "image_model": "hunyuan_video",
            "in_channels": 64,
            "out_channels": 64,
            "vec_in_dim": None,
            "context_in_dim": 12,
            "hidden_size": 32,
            "mlp_ratio": 2.0,
            "num_heads": 2,
            "depth": 1,
            "depth_single_blocks": 1,
            "axes_dim": [8, 8],
            "theta": 256,
            "patch_size": [1, 1],
            "qkv_bias": True,
            "guidance_embed": False,
            "byt5": False,
            "meanflow": False,
            "use_cond_type_embedding": False,
            "vision_in_dim": None,
            "meanflow_sum": False,
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
    "ltx": Family(
        "LTXV",
        {
            "image_model": "ltxv",
            "in_channels": 16,
            "cross_attention_dim": 32,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "caption_channels": 12,
            "num_layers": 2,
        },
        (16, 1, 8, 10),
        {"attention_mask": "mask"},
    ),
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
}
EVERY = FAMILIES | OTHERS


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers of their own generator."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _accepted(config: dict[str, Any]) -> dict[str, Any]:
    """Some settings are newer than some versions."""
    import comfy.ldm.chroma.model
    import comfy.ldm.chroma_radiance.model
    import comfy.ldm.flux.model
    import comfy.ldm.hunyuan_video.model

    newer = "txt_ids_dims" in comfy.ldm.flux.model.FluxParams.__dataclass_fields__
    if newer and config.get("image_model") == "flux":
        return config | {"txt_ids_dims": []}
    classes = {
        "chroma": comfy.ldm.chroma.model.ChromaParams,
        "chroma_radiance": comfy.ldm.chroma_radiance.model.ChromaRadianceParams,
        "hunyuan_video": comfy.ldm.hunyuan_video.model.HunyuanVideoParams,
    }
    known = classes.get(config.get("image_model", ""))
    return (
        config
        if known is None
        else {key: value for key, value in config.items() if key in {*known.__dataclass_fields__, "image_model"}}
    )


def _tiny_text_adapter(name: str) -> contextlib.AbstractContextManager[Any]:
    """Anima makes its text adapter in one size, 130 million parameters, whatever the model's settings say."""
    if name != "anima":
        return contextlib.nullcontext()
    import comfy.ldm.anima.model as anima

    sizes = {"source_dim": 12, "target_dim": 12, "model_dim": 12, "num_layers": 1, "num_heads": 2}
    return unittest.mock.patch.object(anima, "LLMAdapter", functools.partial(anima.LLMAdapter, **sizes))


def build(name: str, dtype: torch.dtype = torch.float32, cast: torch.dtype | None = None, **changes: Any) -> Any:
    """A ModelPatcher with weights of `dtype`, computed with in `cast`; skips where this ComfyUI has no such family.

    `changes` are of the family's settings.
    """
    family = EVERY[name]
    if not hasattr(comfy.supported_models, family.supported):
        pytest.skip(f"this ComfyUI has no {family.supported}")
    with torch.random.fork_rng(devices=[]), _tiny_text_adapter(name):
        config = getattr(comfy.supported_models, family.supported)(_accepted({**family.config, **changes}))
        config.set_inference_dtype(dtype, cast)
        model = config.get_model(dict(family.weights), "", device=None)
    generator = torch.Generator().manual_seed(1)
    for key, tensor in model.diffusion_model.state_dict().items():
        if tensor.is_floating_point():
            scale = 0.2 if tensor.ndim < 2 else tensor[0].numel() ** -0.5
            drawn = torch.randn(tensor.shape, generator=generator) * scale
            tensor.copy_(
                drawn + (1.0 if tensor.ndim == 1 and "norm" in key and key.endswith(("weight", "scale")) else 0.0)
            )
    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu)


def conditions(name: str, seed: int, tokens: int = 6) -> tuple[torch.Tensor, dict[str, Any]]:
    """What the text encoder of the family would give for one caption: tokens (1, T, 12) and the entries beside them."""
    made: dict[str, Any] = {}
    for number, (key, value) in enumerate(EVERY[name].extras.items()):
        masks = {
            "mask": torch.tensor([[1] * (tokens - 2) + [0] * 2]),
            "ones": torch.ones(1, tokens, dtype=torch.long),
            "ids": torch.arange(tokens) + seed,
        }
        made[key] = masks[value] if isinstance(value, str) else random(*value, seed=seed + 10 * number + 100)
    return random(1, tokens, 12, seed=seed), made


def latent(name: str, seed: int) -> torch.Tensor:
    """A latent as the family's VAE gives it, (C, h, w) or (C, 1, h, w)."""
    return random(*EVERY[name].latent, seed=seed)
