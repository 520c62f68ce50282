"""The model families the embedded host loads: Stable Diffusion 1.x, 2.x and XL UNets."""

# ruff: noqa: RUF012 - class attributes are ComfyUI's way of declaring a family

from typing import Any

import torch

from . import latent_formats, model_base, supported_models_base


class SD15(supported_models_base.BASE):
    """Stable Diffusion 1.x."""

    unet_config = {
        "context_dim": 768,
        "model_channels": 320,
        "use_linear_in_transformer": False,
        "adm_in_channels": None,
        "use_temporal_attention": False,
    }
    unet_extra_config = {"num_heads": 8, "num_head_channels": -1}
    latent_format = latent_formats.SD15
    memory_usage_factor = 1.0


class SD20(supported_models_base.BASE):
    """Stable Diffusion 2.x."""

    unet_config = {
        "context_dim": 1024,
        "model_channels": 320,
        "use_linear_in_transformer": True,
        "adm_in_channels": None,
        "use_temporal_attention": False,
    }
    unet_extra_config: dict[str, Any] = {"num_heads": -1, "num_head_channels": 64, "attn_precision": torch.float32}
    latent_format = latent_formats.SD15
    memory_usage_factor = 1.0

    def model_type(self, state_dict, prefix=""):
        """V prediction shows in one bias, which spreads wider in SD 2.x's v models than in its eps models."""
        bias = state_dict.get(f"{prefix}output_blocks.11.1.transformer_blocks.0.norm1.bias")
        if self.unet_config["in_channels"] == 4 and bias is not None and torch.std(bias, unbiased=False) > 0.09:
            return model_base.ModelType.V_PREDICTION
        return model_base.ModelType.EPS


class SDXL(supported_models_base.BASE):
    """Stable Diffusion XL base."""

    unet_config = {
        "model_channels": 320,
        "use_linear_in_transformer": True,
        "transformer_depth": [0, 0, 2, 2, 10, 10],
        "context_dim": 2048,
        "adm_in_channels": 2816,
        "use_temporal_attention": False,
    }
    latent_format = latent_formats.SDXL
    memory_usage_factor = 0.8

    def model_type(self, state_dict, prefix=""):
        """V prediction when the file says so."""
        if "edm_mean" in state_dict or "edm_vpred.sigma_max" in state_dict:
            raise NotImplementedError("EDM variants of SDXL (Playground 2.5, CosXL) need a real ComfyUI")
        if "v_pred" not in state_dict:
            return model_base.ModelType.EPS
        self.sampling_settings["zsnr"] = "ztsnr" in state_dict
        return model_base.ModelType.V_PREDICTION

    def get_model(self, state_dict, prefix="", device=None):
        """The model, without its weights."""
        return self._finish(model_base.SDXL(self, model_type=self.model_type(state_dict, prefix), device=device))


models = [SD15, SD20, SDXL]
