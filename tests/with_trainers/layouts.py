"""Tiny models of each family with ComfyUI's classes, and the same weights in diffusers' layout, by diffusers' own
conversion of checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import diffusers
from diffusers.loaders import single_file_utils
from torch import Tensor, nn

from .trainers.widths import narrowed

State = Mapping[str, Tensor]
PREFIX = "diffusion_model."
UNET = {  # SDXL's blocks, with a tenth of its width and fewer transformer blocks
    "model_channels": 32,
    "num_res_blocks": [2, 2, 2],
    "channel_mult": [1, 2, 4],
    "transformer_depth": [0, 0, 1, 1, 2, 2],
    "transformer_depth_output": [0, 0, 0, 1, 1, 1, 2, 2, 2],
    "transformer_depth_middle": 2,
    "num_head_channels": 32,
}
DIFFUSERS_UNET = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "block_out_channels": (32, 64, 128),
    "layers_per_block": 2,
    "transformer_layers_per_block": (1, 1, 2),
    "attention_head_dim": (1, 2, 4),
    "cross_attention_dim": 12,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
FLUX_WIDTH = 32
REAL_FLUX_WIDTH = 3072


@dataclass(frozen=True)
class Layout:
    """A family: its tiny model, the class and settings of diffusers' model, and the conversion of its checkpoints."""

    title: str
    family: str  # of with_comfyui/tiny_families.py
    model: str
    settings: Mapping[str, Any]
    to_diffusers: Callable[[dict[str, Tensor]], State]
    changes: Mapping[str, Any] = field(default_factory=dict)
    resized: Callable[[nn.Module], None] = lambda model: None  # parts that diffusers makes in one size

    def diffusers_model(self, state: State) -> nn.Module:
        """diffusers' model with the weights of ComfyUI's."""
        model = getattr(diffusers, self.model)(**self.settings)
        self.resized(model)
        return filled(model, self.to_diffusers(dict(state)))


def filled(model: nn.Module, state: State) -> nn.Module:
    """A model with the given weights; buffers that are computed may be missing."""
    missing, unexpected = model.load_state_dict(state, strict=False)
    parameters = {name for name, _ in model.named_parameters()}
    assert not unexpected and not parameters.intersection(missing), (unexpected[:8], missing[:8])
    return model.float().requires_grad_(False).eval()


def _unet(state: dict[str, Tensor]) -> State:
    named = {f"model.{PREFIX}{name}": tensor for name, tensor in state.items()}
    config = {**DIFFUSERS_UNET, "class_embed_type": None}
    return single_file_utils.convert_ldm_unet_checkpoint(named, config)


def _flux(state: dict[str, Tensor]) -> State:
    """diffusers' conversion, for a model that is not as wide as the real one."""
    state = {re.sub(r"(query|key)_norm\.weight$", r"\1_norm.scale", name): tensor for name, tensor in state.items()}
    convert = single_file_utils.convert_flux_transformer_checkpoint_to_diffusers
    return narrowed(convert, {REAL_FLUX_WIDTH: FLUX_WIDTH})(state)


def _narrow_timesteps(model: nn.Module) -> None:
    from diffusers.models.transformers.transformer_z_image import TimestepEmbedder

    model.t_embedder = TimestepEmbedder(256, mid_size=256)


def _same(state: dict[str, Tensor]) -> State:
    return state


LAYOUTS = {
    "sdxl": Layout("SDXL", "sdxl", "UNet2DConditionModel", DIFFUSERS_UNET, _unet, UNET),
    "sd3": Layout(
        "SD 3.5",
        "sd3",
        "SD3Transformer2DModel",
        {
            "num_layers": 2,
            "num_attention_heads": 2,
            "attention_head_dim": 64,
            "joint_attention_dim": 12,
            "caption_projection_dim": 128,
            "pooled_projection_dim": 8,
            "in_channels": 16,
            "out_channels": 16,
            "sample_size": 16,
            "pos_embed_max_size": 16,
            "qk_norm": "rms_norm",
            "dual_attention_layers": (0,),
        },
        single_file_utils.convert_sd3_transformer_checkpoint_to_diffusers,
    ),
    "flux": Layout(
        "Flux.1",
        "flux",
        "FluxTransformer2DModel",
        {
            "in_channels": 64,
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 12,
            "pooled_projection_dim": 8,
            "guidance_embeds": True,
            "axes_dims_rope": (4, 6, 6),
        },
        _flux,
        {"depth": 2, "depth_single_blocks": 2, "mlp_ratio": 4.0, "hidden_size": FLUX_WIDTH},
    ),
    "wan": Layout(
        "Wan 2.1",
        "wan",
        "WanTransformer3DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 18,
            "in_channels": 16,
            "out_channels": 16,
            "text_dim": 12,
            "freq_dim": 16,
            "ffn_dim": 32,
            "num_layers": 2,
            "cross_attn_norm": True,
        },
        single_file_utils.convert_wan_transformer_to_diffusers,
    ),
    "qwen": Layout(
        "Qwen-Image",
        "qwen",
        "QwenImageTransformer2DModel",
        {
            "patch_size": 2,
            "in_channels": 64,
            "out_channels": 16,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 12,
            "axes_dims_rope": (4, 6, 6),
        },
        _same,
    ),
    "z-image": Layout(
        "Z-Image",
        "z-image",
        "ZImageTransformer2DModel",
        {
            "in_channels": 16,
            "dim": 256,
            "n_layers": 2,
            "n_refiner_layers": 1,
            "n_heads": 16,
            "n_kv_heads": 16,
            "cap_feat_dim": 12,
            "axes_dims": [4, 6, 6],
            "axes_lens": [64, 64, 64],
        },
        single_file_utils.convert_z_image_transformer_checkpoint_to_diffusers,
        {"ffn_dim_multiplier": 8 / 3, "multiple_of": 1},
        _narrow_timesteps,
    ),
}


def comfyui_model(layout: Layout, changes: Mapping[str, Any] | None = None) -> Any:
    """A ModelPatcher of ComfyUI's tiny model, with random weights of their own generator.

    `changes` are of its settings, instead of the layout's.
    """
    import families

    return families.build(layout.family, **(layout.changes if changes is None else changes))


def weights(patcher: Any) -> dict[str, Tensor]:
    """A copy of the diffusion model's tensors in float64."""
    state = patcher.model.diffusion_model.state_dict()
    return {name: tensor.detach().clone().double() for name, tensor in state.items() if tensor.is_floating_point()}
