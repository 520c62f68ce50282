"""What a model family is made of (ComfyUI's `comfy.supported_models_base`)."""

from typing import Any

import torch

from . import latent_formats, model_base, utils


class ClipTarget:
    """The classes of a tokenizer and a text encoder, and arguments of the latter."""

    def __init__(self, tokenizer, clip):
        self.tokenizer, self.clip, self.params = tokenizer, clip, {}


class BASE:
    """A model family: how its UNet is recognised, built, scaled and saved."""

    unet_config: dict[str, Any] = {}  # noqa: RUF012 - class attributes are ComfyUI's way of declaring a family
    unet_extra_config: dict[str, Any] = {"num_heads": -1, "num_head_channels": 64}  # noqa: RUF012
    required_keys: dict[str, Any] = {}  # noqa: RUF012
    clip_prefix: list[str] = []  # noqa: RUF012
    clip_vision_prefix = None
    noise_aug_config = None
    sampling_settings: dict[str, Any] = {}  # noqa: RUF012
    latent_format: Any = latent_formats.LatentFormat
    vae_key_prefix = ["first_stage_model."]  # noqa: RUF012
    text_encoder_key_prefix = ["cond_stage_model."]  # noqa: RUF012
    supported_inference_dtypes = [torch.float16, torch.bfloat16, torch.float32]  # noqa: RUF012
    memory_usage_factor = 2.0
    manual_cast_dtype = None
    custom_operations = None
    scaled_fp8 = None
    optimizations = {"fp8": False}  # noqa: RUF012

    def __init__(self, unet_config):
        self.unet_config = {**unet_config, **self.unet_extra_config}
        self.sampling_settings = dict(self.sampling_settings)
        self.latent_format = self.latent_format()
        self.optimizations = dict(self.optimizations)

    @classmethod
    def matches(cls, unet_config, state_dict=None):
        """Whether a UNet of that configuration is of this family."""
        fits = all(key in unet_config and unet_config[key] == value for key, value in cls.unet_config.items())
        return fits and (state_dict is None or all(key in state_dict for key in cls.required_keys))

    def model_type(self, state_dict, prefix=""):
        """What the model predicts."""
        return model_base.ModelType.EPS

    def inpaint_model(self):
        """Whether mask and masked latent are concatenated to the input."""
        return self.unet_config["in_channels"] > 4

    def get_model(self, state_dict, prefix="", device=None):
        """The model, without its weights."""
        return self._finish(model_base.BaseModel(self, model_type=self.model_type(state_dict, prefix), device=device))

    def _finish(self, model):
        if self.inpaint_model():
            model.set_inpaint()
        return model

    def process_unet_state_dict(self, state_dict):
        """Weights as the model takes them."""
        return state_dict

    def process_unet_state_dict_for_saving(self, state_dict):
        """Weights as a checkpoint names them."""
        return utils.state_dict_prefix_replace(state_dict, {"": "model.diffusion_model."})

    def process_clip_state_dict_for_saving(self, state_dict):
        """Text encoder weights as a checkpoint names them."""
        return utils.state_dict_prefix_replace(state_dict, {"": self.text_encoder_key_prefix[0]})

    def process_vae_state_dict_for_saving(self, state_dict):
        """VAE weights as a checkpoint names them."""
        return utils.state_dict_prefix_replace(state_dict, {"": self.vae_key_prefix[0]})

    def set_inference_dtype(self, dtype, manual_cast_dtype):
        """Say in which type weights are stored, and in which the model computes if in another."""
        self.unet_config["dtype"] = dtype
        self.manual_cast_dtype = manual_cast_dtype
