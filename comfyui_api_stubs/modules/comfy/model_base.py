"""A diffusion model with its noise levels, latent format and conditioning (ComfyUI's `comfy.model_base`)."""

import enum
import math

import torch

import comfy.conds
import comfy.latent_formats
import comfy.model_management
import comfy.model_sampling
import comfy.ops
import comfy.patcher_extension
import comfy.utils
from comfy.ldm.modules.diffusionmodules.openaimodel import Timestep, UNetModel


class ModelType(enum.Enum):
    """What a model predicts and on which noise levels."""

    EPS = 1
    V_PREDICTION = 2
    V_PREDICTION_EDM = 3
    STABLE_CASCADE = 4
    EDM = 5
    FLOW = 6
    V_PREDICTION_CONTINUOUS = 7
    FLUX = 8
    IMG_TO_IMG = 9
    FLOW_COSMOS = 10


_SAMPLING = {
    ModelType.EPS: (comfy.model_sampling.ModelSamplingDiscrete, comfy.model_sampling.EPS),
    ModelType.V_PREDICTION: (comfy.model_sampling.ModelSamplingDiscrete, comfy.model_sampling.V_PREDICTION),
    ModelType.FLOW: (comfy.model_sampling.ModelSamplingDiscreteFlow, comfy.model_sampling.CONST),
}


def model_sampling(model_config, model_type):
    """The noise levels and prediction of a model type, as one module."""
    if model_type not in _SAMPLING:
        raise NotImplementedError(
            f"model type {model_type.name} needs a real ComfyUI; the embedded host knows EPS, V_PREDICTION and FLOW"
        )

    both = type("ModelSampling", _SAMPLING[model_type], {"__doc__": "Noise levels and prediction."})
    return both(model_config)


def convert_tensor(extra, dtype, device):
    """A conditioning value on the device, floats as dtype; what is not a tensor stays as it is."""
    if isinstance(extra, list):
        return [convert_tensor(item, dtype, device) for item in extra]
    if not hasattr(extra, "dtype"):
        return extra
    return comfy.model_management.cast_to_device(
        extra, device, None if extra.dtype in (torch.int, torch.long) else dtype
    )


class BaseModel(torch.nn.Module):
    """A diffusion model, its noise levels and its latent format."""

    def __init__(self, model_config, model_type=ModelType.EPS, device=None, unet_model=UNetModel):
        super().__init__()
        unet_config = model_config.unet_config
        self.latent_format, self.model_config = model_config.latent_format, model_config
        self.manual_cast_dtype, self.device, self.current_patcher = model_config.manual_cast_dtype, device, None
        if not unet_config.get("disable_unet_model_creation", False):
            operations = model_config.custom_operations
            if operations is None:
                operations = comfy.ops.pick_operations(unet_config.get("dtype"), self.manual_cast_dtype)
            self.diffusion_model = unet_model(**unet_config, device=device, operations=operations)
            self.diffusion_model.requires_grad_(False).eval()
        self.model_type = model_type
        self.model_sampling = model_sampling(model_config, model_type)
        self.adm_channels = unet_config.get("adm_in_channels") or 0
        self.concat_keys: tuple[str, ...] = ()
        self.memory_usage_factor = model_config.memory_usage_factor
        self.memory_usage_factor_conds, self.memory_usage_shape_process = (), {}

    def apply_model(self, x, t, c_concat=None, c_crossattn=None, control=None, transformer_options=None, **kwargs):
        """The denoised latent (B, C, H, W) of a noisy one at noise levels t (B,), through the apply_model wrappers."""
        options = {} if transformer_options is None else transformer_options
        return comfy.patcher_extension.WrapperExecutor.new_class_executor(
            self._apply_model,
            self,
            comfy.patcher_extension.get_all_wrappers(comfy.patcher_extension.WrappersMP.APPLY_MODEL, options),
        ).execute(x, t, c_concat, c_crossattn, control, options, **kwargs)

    def _apply_model(self, x, t, c_concat=None, c_crossattn=None, control=None, transformer_options=None, **kwargs):
        sigma, dtype, device = t, self._compute_dtype(), x.device
        noisy = self.model_sampling.calculate_input(sigma, x)
        if c_concat is not None:
            noisy = torch.cat([noisy, comfy.model_management.cast_to_device(c_concat, device, noisy.dtype)], dim=1)
        timestep = self.model_sampling.timestep(sigma).float()
        context = convert_tensor(c_crossattn, dtype, device)
        extra = {name: convert_tensor(value, dtype, device) for name, value in kwargs.items()}
        timestep = self.process_timestep(timestep, x=x, **extra)
        options = {} if transformer_options is None else transformer_options
        output = self.diffusion_model(
            noisy.to(dtype), timestep, context=context, control=control, transformer_options=options, **extra
        )
        return self.model_sampling.calculate_denoised(sigma, output.float(), x)

    def process_timestep(self, timestep, **kwargs):
        """The timestep as the model is told."""
        return timestep

    def get_dtype(self):
        """The type the weights are stored in."""
        return self.diffusion_model.dtype

    def _compute_dtype(self):
        """The type the model computes in."""
        return self.get_dtype() if self.manual_cast_dtype is None else self.manual_cast_dtype

    def encode_adm(self, **kwargs):
        """The vector conditioning, None without one."""
        return None

    def concat_cond(self, **kwargs):
        """The latents concatenated to the input (inpainting models), None without any."""
        if len(self.concat_keys) == 0:
            return None
        noise, device = kwargs["noise"], kwargs["device"]
        mask = kwargs.get("concat_mask", kwargs.get("denoise_mask"))
        latent = kwargs.get("concat_latent_image")
        latent = kwargs["latent_image"] if latent is None else self.process_latent_in(latent)
        size = noise.shape[-1], noise.shape[-2]
        if latent.shape[1:] != noise.shape[1:]:
            latent = comfy.utils.common_upscale(latent, *size, "bilinear", "center")
        latent = comfy.utils.resize_to_batch_size(latent, noise.shape[0])
        if mask is None:
            mask, latent = torch.ones_like(noise)[:, :1], self.blank_inpaint_image_like(noise)
        else:
            mask = mask[:, :1] if mask.ndim == noise.ndim else mask
            mask = mask.reshape((-1, 1, *mask.shape[-2:]))
            if mask.shape[-2:] != noise.shape[-2:]:
                mask = comfy.utils.common_upscale(mask, *size, "bilinear", "center")
            mask = comfy.utils.resize_to_batch_size(mask.round(), noise.shape[0])
        parts = {"mask": mask, "masked_image": latent, "mask_inverted": 1.0 - mask}
        return torch.cat([parts[key].to(device) for key in self.concat_keys], dim=1)

    def extra_conds(self, **kwargs):
        """{argument of apply_model: conditioning} from one entry of a CONDITIONING."""
        found = {
            "c_concat": (comfy.conds.CONDNoiseShape, self.concat_cond(**kwargs)),
            "y": (comfy.conds.CONDRegular, self.encode_adm(**kwargs)),
            "c_crossattn": (comfy.conds.CONDCrossAttn, kwargs.get("cross_attn")),
            "crossattn_controlnet": (comfy.conds.CONDCrossAttn, kwargs.get("cross_attn_controlnet")),
        }
        if kwargs.get("noise_concat") is not None:
            found["c_concat"] = (comfy.conds.CONDNoiseShape, kwargs["noise_concat"])
        return {name: kind(value) for name, (kind, value) in found.items() if value is not None}

    def load_model_weights(self, sd, unet_prefix=""):
        """Take the UNet's weights out of `sd`; every key of the model must be there, and no other."""
        state = comfy.utils.state_dict_prefix_replace(sd, {unet_prefix: ""}, filter_keys=True)
        state = self.model_config.process_unet_state_dict(state)
        missing, unexpected = self.diffusion_model.load_state_dict(state, strict=False)
        if missing:
            raise ValueError(
                f"{len(missing)} weights are missing from the diffusion model, such as {', '.join(sorted(missing)[:3])}"
            )
        sd.update({unet_prefix + key: state[key] for key in unexpected})
        return self

    def process_latent_in(self, latent):
        """From the VAE's scale to the model's."""
        return self.latent_format.process_in(latent)

    def process_latent_out(self, latent):
        """From the model's scale to the VAE's."""
        return self.latent_format.process_out(latent)

    def state_dict_for_saving(self, clip_state_dict=None, vae_state_dict=None, clip_vision_state_dict=None):
        """The UNet's state dict under a checkpoint's prefix, plus text encoder and VAE."""
        state = self.model_config.process_unet_state_dict_for_saving(self.diffusion_model.state_dict())
        if self.model_type == ModelType.V_PREDICTION:
            state["v_pred"] = torch.tensor([])
        for part, process in (
            (clip_state_dict, self.model_config.process_clip_state_dict_for_saving),
            (vae_state_dict, self.model_config.process_vae_state_dict_for_saving),
        ):
            if part is not None:
                state.update(process(part))
        return state

    def set_inpaint(self):
        """Make this an inpainting model: mask and masked latent are concatenated to the input."""
        self.concat_keys = ("mask", "masked_image")

        def blank_inpaint_image_like(latent_image):
            blank = torch.tensor([0.8223, -0.6876, 0.6364, 0.1380])  # mid-grey as SD's VAE encodes it
            return blank.to(latent_image)[None, :, None, None].expand_as(latent_image).clone()

        self.blank_inpaint_image_like = blank_inpaint_image_like

    def scale_latent_inpaint(self, sigma, noise, latent_image, **kwargs):
        """The kept part of an inpainted latent at a noise level."""
        sigma = sigma.reshape(sigma.shape[0], *(1 for _ in noise.shape[1:]))
        return self.model_sampling.noise_scaling(sigma, noise, latent_image)

    def memory_required(self, input_shape, cond_shapes=None):
        """A rough number of bytes that one forward takes."""
        area = input_shape[0] * math.prod(input_shape[2:])
        if comfy.model_management.pytorch_attention_flash_attention():
            size = comfy.model_management.dtype_size(self._compute_dtype())
            return area * size * 0.01 * self.memory_usage_factor * 2**20
        return area * 0.15 * self.memory_usage_factor * 2**20


class SDXL(BaseModel):
    """Stable Diffusion XL: pooled text and six sizes as vector conditioning."""

    def __init__(self, model_config, model_type=ModelType.EPS, device=None):
        super().__init__(model_config, model_type, device=device)
        self.embedder = Timestep(256)

    def encode_adm(self, **kwargs):
        """(B, 2816): pooled text, then height, width, crop and target size as sinusoids."""
        if "unclip_conditioning" in kwargs:
            raise NotImplementedError("unCLIP conditioning needs a real ComfyUI")
        pooled, width, height = kwargs["pooled_output"], kwargs.get("width", 768), kwargs.get("height", 768)
        sizes = [
            height,
            width,
            kwargs.get("crop_h", 0),
            kwargs.get("crop_w", 0),
            kwargs.get("target_height", height),
            kwargs.get("target_width", width),
        ]
        embedded = self.embedder(torch.tensor(sizes, dtype=torch.float32)).flatten().expand(pooled.shape[0], -1)
        return torch.cat((pooled.to(embedded.device), embedded), dim=1)
