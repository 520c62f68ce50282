"""Loads diffusion models and wraps text encoders (ComfyUI's `comfy.sd`); whole checkpoints need a real ComfyUI."""

import logging

import comfy.hooks
import comfy.lora
import comfy.lora_convert
import comfy.model_patcher
import comfy.utils

from . import model_detection, model_management


def load_lora_for_models(model, clip, lora, strength_model, strength_clip):
    """(patcher, clip) clones with a LoRA's patches; keys that fit neither are logged."""
    key_map: dict = {}
    if model is not None:
        key_map = comfy.lora.model_lora_keys_unet(model.model, key_map)
    if clip is not None:
        key_map = comfy.lora.model_lora_keys_clip(clip.cond_stage_model, key_map)
    loaded = comfy.lora.load_lora(comfy.lora_convert.convert_lora(lora), key_map)
    new_model, new_clip = (None if part is None else part.clone() for part in (model, clip))
    taken = set()
    for part, strength in ((new_model, strength_model), (new_clip, strength_clip)):
        if part is not None:
            taken.update(part.add_patches(loaded, strength))
    for key in loaded:
        if key not in taken:
            logging.warning("NOT LOADED %s", key)
    return new_model, new_clip


class CLIP:
    """A tokenizer and a text encoder with its patcher."""

    def __init__(
        self,
        target=None,
        embedding_directory=None,
        no_init=False,
        tokenizer_data=None,
        parameters=0,
        model_options=None,
    ):
        if no_init:
            return
        options = {} if model_options is None else model_options
        load_device = options.get("load_device", model_management.text_encoder_device())
        offload_device = options.get("offload_device", model_management.text_encoder_offload_device())
        dtype = options.get("dtype") or model_management.text_encoder_dtype(load_device)
        size = parameters * model_management.dtype_size(dtype)
        device = options.get(
            "initial_device", model_management.text_encoder_initial_device(load_device, offload_device, size)
        )
        self.cond_stage_model = target.clip(**target.params, dtype=dtype, device=device, model_options=options)
        self.tokenizer = target.tokenizer(
            embedding_directory=embedding_directory, tokenizer_data={} if tokenizer_data is None else tokenizer_data
        )
        self.patcher = comfy.model_patcher.ModelPatcher(
            self.cond_stage_model, load_device=load_device, offload_device=offload_device
        )
        self.patcher.hook_mode, self.patcher.is_clip = comfy.hooks.EnumHookMode.MinVram, True
        self.apply_hooks_to_conds, self.layer_idx, self.use_clip_schedule, self.tokenizer_options = (
            None,
            None,
            False,
            {},
        )

    def clone(self):
        """A CLIP of the same text encoder with a clone of the patcher."""
        n = CLIP(no_init=True)
        n.patcher, n.cond_stage_model, n.tokenizer = self.patcher.clone(), self.cond_stage_model, self.tokenizer
        n.layer_idx, n.tokenizer_options = self.layer_idx, dict(self.tokenizer_options)
        n.use_clip_schedule, n.apply_hooks_to_conds = self.use_clip_schedule, self.apply_hooks_to_conds
        return n

    def add_patches(self, patches, strength_patch=1.0, strength_model=1.0):
        """Add weight patches to the patcher."""
        return self.patcher.add_patches(patches, strength_patch, strength_model)

    def get_key_patches(self):
        """The patcher's weights and patches."""
        return self.patcher.get_key_patches()

    def clip_layer(self, layer_idx):
        """Take hidden states of that layer (-1 the last)."""
        self.layer_idx = layer_idx

    def tokenize(self, text, return_word_ids=False, **kwargs):
        """Tokens with weights, in the tokenizer's format."""
        options = {**self.tokenizer_options, **kwargs.get("tokenizer_options", {})}
        if options:
            kwargs["tokenizer_options"] = options
        return self.tokenizer.tokenize_with_weights(text, return_word_ids, **kwargs)

    def add_hooks_to_dict(self, pooled_dict):
        """The dict with the hooks that conditionings of this CLIP carry."""
        if self.apply_hooks_to_conds:
            pooled_dict["hooks"] = self.apply_hooks_to_conds
        return pooled_dict

    def encode_from_tokens(self, tokens, return_pooled=False, return_dict=False):
        """Hidden states (B, N, C); with return_pooled (hidden states, pooled), with return_dict a dict of all that was
        encoded.
        """
        encoder = self.cond_stage_model
        encoder.reset_clip_options()
        if self.layer_idx is not None:
            encoder.set_clip_options({"layer": self.layer_idx})
        if return_pooled == "unprojected":
            encoder.set_clip_options({"projected_pooled": False})
        self.load_model()
        cond, pooled, *more = encoder.encode_token_weights(tokens)
        if return_dict:
            return self.add_hooks_to_dict({"cond": cond, "pooled_output": pooled, **(more[0] if more else {})})
        return (cond, pooled) if return_pooled else cond

    def encode_from_tokens_scheduled(self, tokens, unprojected=False, add_dict=None, show_pbar=True):
        """A CONDITIONING: [[hidden states, {"pooled_output": …, **add_dict}]]."""
        if self.use_clip_schedule:
            comfy.hooks.refuse(self.patcher.forced_hooks)
        encoded = self.encode_from_tokens(
            tokens, return_pooled="unprojected" if unprojected else True, return_dict=True
        )
        return [[encoded.pop("cond"), {**encoded, **(add_dict or {})}]]

    def encode(self, text):
        """Hidden states of a text."""
        return self.encode_from_tokens(self.tokenize(text))

    def load_sd(self, sd, full_model=False):
        """Load weights; returns (missing, unexpected)."""
        return (
            self.cond_stage_model.load_state_dict(sd, strict=False) if full_model else self.cond_stage_model.load_sd(sd)
        )

    def get_sd(self):
        """The weights and the tokenizer's data."""
        return {**self.cond_stage_model.state_dict(), **self.tokenizer.state_dict()}

    def load_model(self):
        """Put the text encoder on its device; returns the patcher."""
        model_management.load_model_gpu(self.patcher)
        return self.patcher


class VAE:
    """ComfyUI's VAEs: the embedded host has none, and subclasses bring their own."""

    def __init__(self, sd=None, device=None, config=None, dtype=None, metadata=None):
        raise NotImplementedError("loading a VAE needs a real ComfyUI; the embedded host has the demo model's only")


_OTHER_PARTS = ("first_stage_model.", "cond_stage_model.", "conditioner.embedders.", "text_encoders.", "vae.")


def load_checkpoint_guess_config(
    ckpt_path,
    output_vae=True,
    output_clip=True,
    output_clipvision=False,
    embedding_directory=None,
    output_model=True,
    model_options=None,
    te_model_options=None,
):
    """(patcher, None, None, None) of a file that holds a diffusion model alone; a whole checkpoint is refused."""
    sd = comfy.utils.load_torch_file(ckpt_path)
    other = sum(key.startswith(_OTHER_PARTS) for key in sd)
    if other:
        raise RuntimeError(
            f"{ckpt_path} is a full checkpoint ({other} weights of a text encoder and VAE); the embedded host loads "
            "diffusion models only: run this workflow on a real ComfyUI (--comfyui DIR or COMFYUI_PATH)"
        )
    return _known(load_diffusion_model_state_dict(sd, model_options=model_options), ckpt_path), None, None, None


def _known(patcher, path):
    if patcher is None:
        hint = "; its name says it is a LoRA: use a LoRA node" if "lora" in str(path).lower() else ""
        raise RuntimeError(
            f"{path} is not a diffusion model that the embedded host knows (UNets of Stable Diffusion 1.x, 2.x or XL"
            f" in ComfyUI's key layout){hint}"
        )
    return patcher


def load_diffusion_model_state_dict(sd, model_options=None):
    """A patcher of a UNet's state dict, with or without a checkpoint's prefix; None when the family is unknown. Empties
    `sd`.
    """
    options = {} if model_options is None else model_options
    unet = (
        comfy.utils.state_dict_prefix_replace(
            sd, {model_detection.unet_prefix_from_state_dict(sd): ""}, filter_keys=True
        )
        or sd
    )
    model_config = model_detection.model_config_from_unet(unet, "")
    if model_config is None:
        return None
    supported, load_device = list(model_config.supported_inference_dtypes), model_management.get_torch_device()
    dtype = options.get("dtype") or model_management.unet_dtype(
        model_params=comfy.utils.calculate_parameters(unet),
        supported_dtypes=supported,
        weight_dtype=comfy.utils.weight_dtype(unet),
    )
    model_config.set_inference_dtype(dtype, model_management.unet_manual_cast(dtype, load_device, supported))
    model_config.custom_operations = options.get("custom_operations", model_config.custom_operations)
    offload_device = model_management.unet_offload_device()
    model = model_config.get_model(unet | {key: sd[key] for key in ("v_pred", "ztsnr") if key in sd}, "").to(
        offload_device
    )
    model.load_model_weights(unet, "")
    left_over = sorted(key for key in unet if key not in ("v_pred", "ztsnr"))
    if left_over:
        logging.info("left over keys in diffusion model: %s", left_over)
    return comfy.model_patcher.ModelPatcher(model, load_device=load_device, offload_device=offload_device)


def load_diffusion_model(unet_path, model_options=None):
    """A patcher of a diffusion model's file."""
    return _known(
        load_diffusion_model_state_dict(comfy.utils.load_torch_file(unet_path), model_options=model_options), unet_path
    )
