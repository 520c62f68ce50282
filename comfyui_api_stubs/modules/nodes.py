"""The node table, loading of packs, and the core nodes that workflows need, under ComfyUI's ids
with ComfyUI's inputs.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import logging
import os
import sys
import traceback
import uuid
from collections.abc import Mapping
from typing import Any, ClassVar

import comfy.model_management
import comfy.sample
import comfy.samplers
import comfy.sd
import comfy.utils
import folder_paths
import latent_preview
import node_helpers
import torch
from comfy.cli_args import args
from comfy_api.latest import ComfyExtension, io

MAX_RESOLUTION = 16384
SEED = ("INT", {"default": 0, "min": 0, "max": 0xFFFFFFFFFFFFFFFF, "control_after_generate": True})
STEPS = ("INT", {"default": 20, "min": 1, "max": 10000})
CFG = ("FLOAT", {"default": 8.0, "min": 0.0, "max": 100.0, "step": 0.1, "round": 0.01})
STRENGTH = ("FLOAT", {"default": 1.0, "min": -100.0, "max": 100.0, "step": 0.01})
_PICTURE_FORMATS = ("PNG", "JPEG", "WEBP", "AVIF", "GIF", "BMP", "TIFF")  # all others are refused: EPS starts a program


def before_node_execution() -> None:
    """Called before each node: raises when the run was interrupted."""
    comfy.model_management.throw_exception_if_processing_interrupted()


def interrupt_processing(value: bool = True) -> None:
    """Ask the running workflow to stop (or take that back)."""
    comfy.model_management.interrupt_current_processing(value)


# --- conditioning -----------------------------------------------------------------------------------------------------


class CLIPTextEncode:
    @classmethod
    def INPUT_TYPES(s) -> dict:
        return {"required": {"text": ("STRING", {"multiline": True, "dynamicPrompts": True}), "clip": ("CLIP", {})}}

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "encode"
    CATEGORY = "conditioning"
    DESCRIPTION = "Encodes a text so that it can guide the model."

    def encode(self, clip: Any, text: str) -> tuple:
        if clip is None:
            raise RuntimeError("CLIPTextEncode: the clip input is None; the loader it comes from has no text encoder")
        return (clip.encode_from_tokens_scheduled(clip.tokenize(text)),)


class CLIPSetLastLayer:
    @classmethod
    def INPUT_TYPES(s) -> dict:
        return {
            "required": {
                "clip": ("CLIP",),
                "stop_at_clip_layer": ("INT", {"default": -1, "min": -24, "max": -1, "step": 1}),
            }
        }

    RETURN_TYPES = ("CLIP",)
    FUNCTION = "set_last_layer"
    CATEGORY = "conditioning"

    def set_last_layer(self, clip: Any, stop_at_clip_layer: int) -> tuple:
        clip = clip.clone()
        clip.clip_layer(stop_at_clip_layer)
        return (clip,)


class ConditioningCombine:
    @classmethod
    def INPUT_TYPES(s) -> dict:
        return {"required": {"conditioning_1": ("CONDITIONING",), "conditioning_2": ("CONDITIONING",)}}

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "combine"
    CATEGORY = "conditioning"

    def combine(self, conditioning_1: list, conditioning_2: list) -> tuple:
        return (conditioning_1 + conditioning_2,)


class ConditioningZeroOut:
    @classmethod
    def INPUT_TYPES(s) -> dict:
        return {"required": {"conditioning": ("CONDITIONING",)}}

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "zero_out"
    CATEGORY = "advanced/conditioning"

    def zero_out(self, conditioning: list) -> tuple:
        silent = []
        for tensor, settings in conditioning:
            pooled = settings.get("pooled_output")
            changed = {} if pooled is None else {"pooled_output": torch.zeros_like(pooled)}
            silent.append([torch.zeros_like(tensor), {**settings, **changed}])
        return (silent,)


# --- latents ----------------------------------------------------------------------------------------------------------


class VAEDecode:
    @classmethod
    def INPUT_TYPES(s) -> dict:
        return {"required": {"samples": ("LATENT", {}), "vae": ("VAE", {})}}

    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "decode"
    CATEGORY = "latent"
    DESCRIPTION = "Turns latents into pictures."

    def decode(self, vae: Any, samples: dict) -> tuple:
        images = vae.decode(samples["samples"])
        return (images.flatten(0, 1) if images.ndim == 5 else images,)


class VAEEncode:
    @classmethod
    def INPUT_TYPES(s) -> dict:
        return {"required": {"pixels": ("IMAGE",), "vae": ("VAE",)}}

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "encode"
    CATEGORY = "latent"

    def encode(self, vae: Any, pixels: torch.Tensor) -> tuple:
        return ({"samples": vae.encode(pixels[..., :3])},)


class EmptyLatentImage:
    def __init__(self) -> None:
        self.device = comfy.model_management.intermediate_device()

    @classmethod
    def INPUT_TYPES(s) -> dict:
        side = {"default": 512, "min": 16, "max": MAX_RESOLUTION, "step": 8}
        return {
            "required": {
                "width": ("INT", dict(side)),
                "height": ("INT", dict(side)),
                "batch_size": ("INT", {"default": 1, "min": 1, "max": 4096}),
            }
        }

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "generate"
    CATEGORY = "latent"
    DESCRIPTION = "A batch of empty latents to start sampling from."

    def generate(self, width: int, height: int, batch_size: int = 1) -> tuple:
        return ({"samples": torch.zeros([batch_size, 4, height // 8, width // 8], device=self.device)},)


class LatentFromBatch:
    @classmethod
    def INPUT_TYPES(s) -> dict:
        return {
            "required": {
                "samples": ("LATENT",),
                "batch_index": ("INT", {"default": 0, "min": 0, "max": 63}),
                "length": ("INT", {"default": 1, "min": 1, "max": 64}),
            }
        }

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "frombatch"
    CATEGORY = "latent/batch"

    def frombatch(self, samples: dict, batch_index: int, length: int) -> tuple:
        count = samples["samples"].shape[0]
        start = min(batch_index, count - 1)
        chosen = slice(start, min(start + length, count))
        picked = {**samples, "samples": samples["samples"][chosen].clone()}
        if "noise_mask" in samples:
            picked["noise_mask"] = _as_many(samples["noise_mask"], count)[chosen].clone()
        picked["batch_index"] = list(samples.get("batch_index", range(count)))[chosen]
        return (picked,)


def _as_many(masks: torch.Tensor, count: int) -> torch.Tensor:
    """Masks (M, …) repeated until there are `count`; a single one stays one when sliced as many."""
    return masks[torch.arange(count) % masks.shape[0]]


class RepeatLatentBatch:
    @classmethod
    def INPUT_TYPES(s) -> dict:
        return {"required": {"samples": ("LATENT",), "amount": ("INT", {"default": 1, "min": 1, "max": 64})}}

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "repeat"
    CATEGORY = "latent/batch"

    def repeat(self, samples: dict, amount: int) -> tuple:
        repeated = dict(samples)
        repeated["samples"] = samples["samples"].repeat(amount, *[1] * (samples["samples"].ndim - 1))
        masks = samples.get("noise_mask")
        if masks is not None and masks.shape[0] > 1:
            repeated["noise_mask"] = masks.repeat(amount, *[1] * (masks.ndim - 1))
        if "batch_index" in samples:
            indices = samples["batch_index"]
            offset = max(indices) - min(indices) + 1
            repeated["batch_index"] = [index + turn * offset for turn in range(amount) for index in indices]
        return (repeated,)


class SetLatentNoiseMask:
    @classmethod
    def INPUT_TYPES(s) -> dict:
        return {"required": {"samples": ("LATENT",), "mask": ("MASK",)}}

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "set_mask"
    CATEGORY = "latent/inpaint"

    def set_mask(self, samples: dict, mask: torch.Tensor) -> tuple:
        return ({**samples, "noise_mask": mask.reshape(-1, 1, *mask.shape[-2:])},)


# --- sampling ---------------------------------------------------------------------------------------------------------


def common_ksampler(
    model: Any,
    seed: int,
    steps: int,
    cfg: float,
    sampler_name: str,
    scheduler: str,
    positive: list,
    negative: list,
    latent: dict,
    denoise: float = 1.0,
    disable_noise: bool = False,
    start_step: int | None = None,
    last_step: int | None = None,
    force_full_denoise: bool = False,
) -> tuple:
    """Noise from the seed (or none), then sampling; the latent's other entries are kept."""
    image = comfy.sample.fix_empty_latent_channels(model, latent["samples"])
    if disable_noise:
        noise = torch.zeros(image.size(), dtype=image.dtype, device="cpu")
    else:
        noise = comfy.sample.prepare_noise(image, seed, latent.get("batch_index"))
    samples = comfy.sample.sample(
        model,
        noise,
        steps,
        cfg,
        sampler_name,
        scheduler,
        positive,
        negative,
        image,
        denoise=denoise,
        disable_noise=disable_noise,
        start_step=start_step,
        last_step=last_step,
        force_full_denoise=force_full_denoise,
        noise_mask=latent.get("noise_mask"),
        callback=latent_preview.prepare_callback(model, steps),
        disable_pbar=not comfy.utils.PROGRESS_BAR_ENABLED,
        seed=seed,
    )
    return ({**latent, "samples": samples},)


class KSampler:
    @classmethod
    def INPUT_TYPES(s) -> dict:
        return {
            "required": {
                "model": ("MODEL", {}),
                "seed": SEED,
                "steps": STEPS,
                "cfg": CFG,
                "sampler_name": (comfy.samplers.KSampler.SAMPLERS, {}),
                "scheduler": (comfy.samplers.KSampler.SCHEDULERS, {}),
                "positive": ("CONDITIONING", {}),
                "negative": ("CONDITIONING", {}),
                "latent_image": ("LATENT", {}),
                "denoise": ("FLOAT", {"default": 1.0, "min": 0.0, "max": 1.0, "step": 0.01}),
            }
        }

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "sample"
    CATEGORY = "sampling"
    DESCRIPTION = "Denoises a latent with the model, guided by what is wanted and what is not."

    def sample(
        self,
        model: Any,
        seed: int,
        steps: int,
        cfg: float,
        sampler_name: str,
        scheduler: str,
        positive: list,
        negative: list,
        latent_image: dict,
        denoise: float = 1.0,
    ) -> tuple:
        return common_ksampler(
            model, seed, steps, cfg, sampler_name, scheduler, positive, negative, latent_image, denoise=denoise
        )


class KSamplerAdvanced:
    @classmethod
    def INPUT_TYPES(s) -> dict:
        return {
            "required": {
                "model": ("MODEL",),
                "add_noise": (["enable", "disable"],),
                "noise_seed": SEED,
                "steps": STEPS,
                "cfg": CFG,
                "sampler_name": (comfy.samplers.KSampler.SAMPLERS,),
                "scheduler": (comfy.samplers.KSampler.SCHEDULERS,),
                "positive": ("CONDITIONING",),
                "negative": ("CONDITIONING",),
                "latent_image": ("LATENT",),
                "start_at_step": ("INT", {"default": 0, "min": 0, "max": 10000}),
                "end_at_step": ("INT", {"default": 10000, "min": 0, "max": 10000}),
                "return_with_leftover_noise": (["disable", "enable"],),
            }
        }

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "sample"
    CATEGORY = "sampling"

    def sample(
        self,
        model: Any,
        add_noise: str,
        noise_seed: int,
        steps: int,
        cfg: float,
        sampler_name: str,
        scheduler: str,
        positive: list,
        negative: list,
        latent_image: dict,
        start_at_step: int,
        end_at_step: int,
        return_with_leftover_noise: str,
        denoise: float = 1.0,
    ) -> tuple:
        return common_ksampler(
            model,
            noise_seed,
            steps,
            cfg,
            sampler_name,
            scheduler,
            positive,
            negative,
            latent_image,
            denoise=denoise,
            disable_noise=add_noise == "disable",
            start_step=start_at_step,
            last_step=end_at_step,
            force_full_denoise=return_with_leftover_noise == "disable",
        )


# --- loaders ----------------------------------------------------------------------------------------------------------


class CheckpointLoaderSimple:
    @classmethod
    def INPUT_TYPES(s) -> dict:
        return {"required": {"ckpt_name": (folder_paths.get_filename_list("checkpoints"), {})}}

    RETURN_TYPES = ("MODEL", "CLIP", "VAE")
    FUNCTION = "load_checkpoint"
    CATEGORY = "loaders"
    DESCRIPTION = "Loads a checkpoint. Text encoders and VAEs of published models need a real ComfyUI."

    def load_checkpoint(self, ckpt_name: str) -> tuple:
        path = folder_paths.get_full_path_or_raise("checkpoints", ckpt_name)
        loaded = comfy.sd.load_checkpoint_guess_config(
            path,
            output_vae=True,
            output_clip=True,
            embedding_directory=folder_paths.get_folder_paths("embeddings"),
        )
        return tuple(loaded[:3])


class UNETLoader:
    @classmethod
    def INPUT_TYPES(s) -> dict:
        return {
            "required": {
                "unet_name": (folder_paths.get_filename_list("diffusion_models"),),
                "weight_dtype": (["default", "fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2"],),
            }
        }

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "load_unet"
    CATEGORY = "advanced/loaders"

    def load_unet(self, unet_name: str, weight_dtype: str) -> tuple:
        if weight_dtype != "default":
            raise ValueError(
                f"UNETLoader: the embedded host has no weight_dtype {weight_dtype}; use default, or a real ComfyUI"
            )
        path = folder_paths.get_full_path_or_raise("diffusion_models", unet_name)
        return (comfy.sd.load_diffusion_model(path, model_options={}),)


NEEDS_COMFYUI = "The embedded host shows it, so that workflows with it open here; it needs a real ComfyUI to run."
CLIP_TYPES = (
    "stable_diffusion",
    "stable_cascade",
    "sd3",
    "stable_audio",
    "mochi",
    "ltxv",
    "pixart",
    "cosmos",
    "lumina2",
    "wan",
    "hidream",
    "chroma",
    "ace",
    "omnigen2",
    "qwen_image",
    "hunyuan_image",
    "krea2",
)
DUAL_CLIP_TYPES = ("sdxl", "sd3", "flux", "hunyuan_video", "hidream", "hunyuan_image")
CLIP_DEVICE = (["default", "cpu"], {"advanced": True})


def _needs_comfyui(node: str, file: str) -> ValueError:
    return ValueError(
        f"{node}: the embedded host loads no text encoders and VAEs of published models ({file}); run this workflow in"
        " a real ComfyUI (`python -m graft_nodes run --comfyui FOLDER`)"
    )


class CLIPLoader:
    @classmethod
    def INPUT_TYPES(s) -> dict:
        return {
            "required": {
                "clip_name": (folder_paths.get_filename_list("text_encoders"),),
                "type": (list(CLIP_TYPES),),
            },
            "optional": {"device": CLIP_DEVICE},
        }

    RETURN_TYPES = ("CLIP",)
    FUNCTION = "load_clip"
    CATEGORY = "advanced/loaders"
    DESCRIPTION = NEEDS_COMFYUI

    def load_clip(self, clip_name: str, type: str = "stable_diffusion", device: str = "default") -> tuple:
        raise _needs_comfyui("CLIPLoader", clip_name)


class DualCLIPLoader:
    @classmethod
    def INPUT_TYPES(s) -> dict:
        return {
            "required": {
                "clip_name1": (folder_paths.get_filename_list("text_encoders"),),
                "clip_name2": (folder_paths.get_filename_list("text_encoders"),),
                "type": (list(DUAL_CLIP_TYPES),),
            },
            "optional": {"device": CLIP_DEVICE},
        }

    RETURN_TYPES = ("CLIP",)
    FUNCTION = "load_clip"
    CATEGORY = "advanced/loaders"
    DESCRIPTION = NEEDS_COMFYUI

    def load_clip(self, clip_name1: str, clip_name2: str, type: str, device: str = "default") -> tuple:
        raise _needs_comfyui("DualCLIPLoader", f"{clip_name1}, {clip_name2}")


class VAELoader:
    @classmethod
    def INPUT_TYPES(s) -> dict:
        return {"required": {"vae_name": (folder_paths.get_filename_list("vae"),)}}

    RETURN_TYPES = ("VAE",)
    FUNCTION = "load_vae"
    CATEGORY = "loaders"
    DESCRIPTION = NEEDS_COMFYUI

    def load_vae(self, vae_name: str) -> tuple:
        raise _needs_comfyui("VAELoader", vae_name)


class LoraLoader:
    def __init__(self) -> None:
        self.loaded_lora: tuple[str, dict] | None = None

    @classmethod
    def INPUT_TYPES(s) -> dict:
        return {
            "required": {
                "model": ("MODEL", {}),
                "clip": ("CLIP", {}),
                "lora_name": (folder_paths.get_filename_list("loras"), {}),
                "strength_model": STRENGTH,
                "strength_clip": STRENGTH,
            }
        }

    RETURN_TYPES: tuple[str, ...] = ("MODEL", "CLIP")
    FUNCTION = "load_lora"
    CATEGORY = "loaders"
    DESCRIPTION = "Patches a model and a text encoder with a LoRA."

    def load_lora(self, model: Any, clip: Any, lora_name: str, strength_model: float, strength_clip: float) -> tuple:
        if strength_model == 0 and strength_clip == 0:
            return (model, clip)
        path = folder_paths.get_full_path_or_raise("loras", lora_name)
        if self.loaded_lora is None or self.loaded_lora[0] != path:
            self.loaded_lora = (path, comfy.utils.load_torch_file(path, safe_load=True))
        return tuple(comfy.sd.load_lora_for_models(model, clip, self.loaded_lora[1], strength_model, strength_clip))


class LoraLoaderModelOnly(LoraLoader):
    @classmethod
    def INPUT_TYPES(s) -> dict:
        loras = folder_paths.get_filename_list("loras")
        return {"required": {"model": ("MODEL",), "lora_name": (loras,), "strength_model": STRENGTH}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "load_lora_model_only"

    def load_lora_model_only(self, model: Any, lora_name: str, strength_model: float) -> tuple:
        return (self.load_lora(model, None, lora_name, strength_model, 0)[0],)


# --- pictures ---------------------------------------------------------------------------------------------------------


class SaveImage:
    def __init__(self) -> None:
        self.output_dir = folder_paths.get_output_directory()
        self.type = "output"
        self.prefix_append = ""
        self.compress_level = 4

    @classmethod
    def INPUT_TYPES(s) -> dict:
        return {
            "required": {"images": ("IMAGE", {}), "filename_prefix": ("STRING", {"default": "ComfyUI"})},
            "hidden": {"prompt": "PROMPT", "extra_pnginfo": "EXTRA_PNGINFO"},
        }

    RETURN_TYPES = ()
    FUNCTION = "save_images"
    OUTPUT_NODE = True
    CATEGORY = "image"
    DESCRIPTION = "Saves pictures as PNG files in the output folder, with the workflow in each."

    def save_images(
        self, images: Any, filename_prefix: str = "ComfyUI", prompt: Any = None, extra_pnginfo: dict | None = None
    ) -> dict:
        from PIL import Image
        from PIL.PngImagePlugin import PngInfo

        info = None
        if not args.disable_metadata:
            info = PngInfo()
            for key, value in {**({} if prompt is None else {"prompt": prompt}), **(extra_pnginfo or {})}.items():
                info.add_text(key, json.dumps(value))
        height, width = images[0].shape[:2]
        folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(
            filename_prefix + self.prefix_append,
            self.output_dir,
            width,
            height,
        )
        saved = []
        for number, image in enumerate(images):
            file = f"{name.replace('%batch_num%', str(number))}_{counter + number:05}_.png"
            pixels = (image.cpu().float() * 255.0).clamp(0, 255).to(torch.uint8).numpy()
            Image.fromarray(pixels).save(os.path.join(folder, file), pnginfo=info, compress_level=self.compress_level)
            saved.append({"filename": file, "subfolder": subfolder, "type": self.type})
        return {"ui": {"images": saved}}


class PreviewImage(SaveImage):
    def __init__(self) -> None:
        self.output_dir = folder_paths.get_temp_directory()
        self.type = "temp"
        self.prefix_append = f"_temp_{uuid.uuid4().hex[:5]}"
        self.compress_level = 1

    @classmethod
    def INPUT_TYPES(s) -> dict:
        return {"required": {"images": ("IMAGE",)}, "hidden": {"prompt": "PROMPT", "extra_pnginfo": "EXTRA_PNGINFO"}}


class LoadImage:
    @classmethod
    def INPUT_TYPES(s) -> dict:
        folder = folder_paths.get_input_directory()
        files = [entry.name for entry in os.scandir(folder) if entry.is_file()] if os.path.isdir(folder) else []
        return {
            "required": {
                "image": (sorted(folder_paths.filter_files_content_types(files, ["image"])), {"image_upload": True})
            }
        }

    RETURN_TYPES = ("IMAGE", "MASK")
    FUNCTION = "load_image"
    CATEGORY = "image"

    def load_image(self, image: str) -> tuple:
        from PIL import Image, ImageSequence

        path = folder_paths.get_annotated_filepath(image)
        Image.init()
        formats = [name for name in _PICTURE_FORMATS if name in Image.OPEN]
        picture = node_helpers.pillow(lambda file: Image.open(file, formats=formats), path)
        loaded = [_frame(frame) for frame in ImageSequence.Iterator(picture)]
        same = [frame for frame in loaded if frame[0].shape == loaded[0][0].shape]
        if picture.format == "MPO":
            same = same[:1]
        return (torch.stack([pixels for pixels, _ in same]), torch.stack([mask for _, mask in same]))

    @classmethod
    def IS_CHANGED(s, image: str) -> str:
        with open(folder_paths.get_annotated_filepath(image), "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()

    @classmethod
    def VALIDATE_INPUTS(s, image: str) -> bool | str:
        return folder_paths.exists_annotated_filepath(image) or f"Invalid image file: {image}"


def _frame(frame: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A Pillow picture as pixels (H, W, 3) and a mask (H, W) that is 1 where it is transparent ((64, 64) zeros without
    transparency).
    """
    import numpy
    from PIL import ImageOps

    frame = node_helpers.pillow(ImageOps.exif_transpose, frame)
    if frame.mode == "I":
        frame = frame.point(lambda value: value * (1 / 255))
    pixels = torch.from_numpy(numpy.array(frame.convert("RGB"))).float() / 255.0
    if frame.mode == "P" and "transparency" in frame.info:
        frame = frame.convert("RGBA")
    if "A" not in frame.getbands():
        return pixels, torch.zeros((64, 64))
    return pixels, 1.0 - torch.from_numpy(numpy.array(frame.getchannel("A"))).float() / 255.0


class ImageBatch:
    @classmethod
    def INPUT_TYPES(s) -> dict:
        return {"required": {"image1": ("IMAGE",), "image2": ("IMAGE",)}}

    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "batch"
    CATEGORY = "image"

    def batch(self, image1: torch.Tensor, image2: torch.Tensor) -> tuple:
        if image1.shape[1:] != image2.shape[1:]:
            height, width = image1.shape[1:3]
            image2 = comfy.utils.common_upscale(image2.movedim(-1, 1), width, height, "bilinear", "center").movedim(
                1, -1
            )
        return (torch.cat((image1, image2)),)


class ImageScale:
    upscale_methods: ClassVar = ["nearest-exact", "bilinear", "area", "bicubic", "lanczos"]
    crop_methods: ClassVar = ["disabled", "center"]

    @classmethod
    def INPUT_TYPES(s) -> dict:
        size = ("INT", {"default": 512, "min": 0, "max": MAX_RESOLUTION, "step": 1})
        return {
            "required": {
                "image": ("IMAGE",),
                "upscale_method": (s.upscale_methods,),
                "width": size,
                "height": size,
                "crop": (s.crop_methods,),
            }
        }

    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "upscale"
    CATEGORY = "image/upscaling"

    def upscale(self, image: torch.Tensor, upscale_method: str, width: int, height: int, crop: str) -> tuple:
        """The pictures in this size; a side of 0 follows from the other one, and two of 0 change nothing."""
        if width == height == 0:
            return (image,)
        own_height, own_width = image.shape[1:3]
        width = width or max(1, round(own_width * height / own_height))
        height = height or max(1, round(own_height * width / own_width))
        scaled = comfy.utils.common_upscale(image.movedim(-1, 1), width, height, upscale_method, crop)
        return (scaled.movedim(1, -1),)


class ImageInvert:
    @classmethod
    def INPUT_TYPES(s) -> dict:
        return {"required": {"image": ("IMAGE",)}}

    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "invert"
    CATEGORY = "image"

    def invert(self, image: torch.Tensor) -> tuple:
        return (1.0 - image,)


class EmptyImage:
    @classmethod
    def INPUT_TYPES(s) -> dict:
        side = {"default": 512, "min": 1, "max": MAX_RESOLUTION, "step": 1}
        return {
            "required": {
                "width": ("INT", dict(side)),
                "height": ("INT", dict(side)),
                "batch_size": ("INT", {"default": 1, "min": 1, "max": 4096}),
                "color": ("INT", {"default": 0, "min": 0, "max": 0xFFFFFF, "step": 1, "display": "color"}),
            }
        }

    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "generate"
    CATEGORY = "image"

    def generate(self, width: int, height: int, batch_size: int = 1, color: int = 0) -> tuple:
        channels = torch.tensor([color >> 16 & 0xFF, color >> 8 & 0xFF, color & 0xFF]) / 0xFF
        return (channels.expand(batch_size, height, width, 3).clone(),)


class PreviewAny:
    @classmethod
    def INPUT_TYPES(s) -> dict:
        return {"required": {"source": ("*", {})}}

    RETURN_TYPES = ()
    FUNCTION = "main"
    OUTPUT_NODE = True
    CATEGORY = "utils"

    def main(self, source: Any = None) -> dict:
        text = source if isinstance(source, str) else str(source)
        if isinstance(source, (list, tuple, dict)):
            try:
                text = json.dumps(source)
            except (TypeError, ValueError):  # it holds something that JSON has no form for
                text = str(source)
        return {"ui": {"text": (text,)}}


class RebatchImages(io.ComfyNode):
    """Cuts a list of batches into batches of one size."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            "RebatchImages",
            display_name="Rebatch Images",
            category="image/batch",
            is_input_list=True,
            inputs=[io.Image.Input("images"), io.Int.Input("batch_size", default=1, min=1, max=4096)],
            outputs=[io.Image.Output(is_output_list=True)],
        )

    @classmethod
    def execute(cls, images: list[torch.Tensor], batch_size: list[int]) -> io.NodeOutput:
        single = [image for batch in images for image in batch.split(1)]
        size = batch_size[0]
        return io.NodeOutput([torch.cat(single[start : start + size]) for start in range(0, len(single), size)])


# --- primitives -------------------------------------------------------------------------------------------------------


class _Primitive(io.ComfyNode):
    """A node that gives the value of its one widget; SOCKET and TITLE say which."""

    SOCKET: Any
    NODE_ID: str
    TITLE: str

    @classmethod
    def widget(cls) -> io.Input:
        return cls.SOCKET.Input("value")

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id=cls.NODE_ID,
            display_name=cls.TITLE,
            category="utils/primitive",
            inputs=[cls.widget()],
            outputs=[cls.SOCKET.Output()],
        )

    @classmethod
    def execute(cls, value: Any) -> io.NodeOutput:
        return io.NodeOutput(value)


class PrimitiveString(_Primitive):
    SOCKET, NODE_ID, TITLE = io.String, "PrimitiveString", "String"


class PrimitiveStringMultiline(_Primitive):
    SOCKET, NODE_ID, TITLE = io.String, "PrimitiveStringMultiline", "String (Multiline)"

    @classmethod
    def widget(cls) -> io.Input:
        return io.String.Input("value", multiline=True)


class PrimitiveInt(_Primitive):
    SOCKET, NODE_ID, TITLE = io.Int, "PrimitiveInt", "Int"

    @classmethod
    def widget(cls) -> io.Input:
        return io.Int.Input("value", min=-sys.maxsize, max=sys.maxsize, control_after_generate=True)


class PrimitiveFloat(_Primitive):
    SOCKET, NODE_ID, TITLE = io.Float, "PrimitiveFloat", "Float"

    @classmethod
    def widget(cls) -> io.Input:
        return io.Float.Input("value", min=-sys.maxsize, max=sys.maxsize)


class PrimitiveBoolean(_Primitive):
    SOCKET, NODE_ID, TITLE = io.Boolean, "PrimitiveBoolean", "Boolean"


# --- the table --------------------------------------------------------------------------------------------------------

_CORE: tuple[tuple[type, str], ...] = (
    (KSampler, "KSampler"),
    (KSamplerAdvanced, "KSampler (Advanced)"),
    (CheckpointLoaderSimple, "Load Checkpoint"),
    (UNETLoader, "Load Diffusion Model"),
    (CLIPLoader, "Load CLIP"),
    (DualCLIPLoader, "DualCLIPLoader"),
    (VAELoader, "Load VAE"),
    (LoraLoader, "Load LoRA"),
    (LoraLoaderModelOnly, "LoraLoaderModelOnly"),
    (CLIPTextEncode, "CLIP Text Encode (Prompt)"),
    (CLIPSetLastLayer, "CLIP Set Last Layer"),
    (ConditioningCombine, "Conditioning (Combine)"),
    (ConditioningZeroOut, "ConditioningZeroOut"),
    (VAEDecode, "VAE Decode"),
    (VAEEncode, "VAE Encode"),
    (EmptyLatentImage, "Empty Latent Image"),
    (LatentFromBatch, "Latent From Batch"),
    (RepeatLatentBatch, "Repeat Latent Batch"),
    (SetLatentNoiseMask, "Set Latent Noise Mask"),
    (SaveImage, "Save Image"),
    (PreviewImage, "Preview Image"),
    (LoadImage, "Load Image"),
    (ImageBatch, "Batch Images"),
    (ImageScale, "Upscale Image"),
    (ImageInvert, "Invert Image"),
    (EmptyImage, "EmptyImage"),
)
NODE_CLASS_MAPPINGS: dict[str, Any] = {cls.__name__: cls for cls, _ in _CORE}
NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {cls.__name__: title for cls, title in _CORE}
EXTENSION_WEB_DIRS: dict[str, str] = {}
LOADED_MODULE_DIRS: dict[str, str] = {}


def get_module_name(module_path: str) -> str:
    """A pack's name: its folder's, or its file's without the extension."""
    name = os.path.basename(os.path.normpath(module_path))
    return os.path.splitext(name)[0] if os.path.isfile(module_path) else name


def _register(node_id: str, node_class: Any, display_name: str | None, ignore: set[str], module: str) -> None:
    if node_id not in ignore:
        NODE_CLASS_MAPPINGS[node_id] = node_class
        node_class.RELATIVE_PYTHON_MODULE = module
    if display_name is not None:
        NODE_DISPLAY_NAME_MAPPINGS[node_id] = display_name


async def _register_all(module: Any, ignore: set[str], relative: str) -> None:
    """Enter a pack's nodes into the table: its NODE_CLASS_MAPPINGS, or what its comfy_entrypoint lists."""
    if getattr(module, "NODE_CLASS_MAPPINGS", None) is not None:
        titles = getattr(module, "NODE_DISPLAY_NAME_MAPPINGS", None) or {}
        if not isinstance(module.NODE_CLASS_MAPPINGS, Mapping):
            kind = type(module.NODE_CLASS_MAPPINGS).__name__
            raise TypeError(f"its NODE_CLASS_MAPPINGS is a {kind}, and must be a dict of node classes by id")
        for node_id, node_class in module.NODE_CLASS_MAPPINGS.items():
            _register(node_id, node_class, titles.get(node_id), ignore, relative)
        return
    if not callable(getattr(module, "comfy_entrypoint", None)):
        raise TypeError("it has neither NODE_CLASS_MAPPINGS nor a function comfy_entrypoint")
    extension = module.comfy_entrypoint()
    extension = await extension if inspect.isawaitable(extension) else extension
    if not isinstance(extension, ComfyExtension):
        raise TypeError(f"its comfy_entrypoint returned {type(extension).__name__}, not a ComfyExtension")
    await extension.on_load()
    listed = await extension.get_node_list()
    if not isinstance(listed, list):
        raise TypeError(f"its get_node_list returned {type(listed).__name__}, not a list")
    for node_class in listed:
        try:
            schema = node_class.GET_SCHEMA()
        except Exception as error:
            name = getattr(node_class, "__name__", repr(node_class))
            raise TypeError(f"node class {name}: {type(error).__name__}: {error}") from error
        _register(schema.node_id, node_class, schema.display_name, ignore, relative)


async def load_custom_node(module_path: str, ignore: set[str] = set(), module_parent: str = "custom_nodes") -> bool:  # noqa: B006
    """Import a pack (a folder or a .py file) and enter its nodes, except the ids in `ignore`; False, with a log entry,
    when that fails.
    """
    path = os.path.abspath(module_path)
    source, folder = (
        (path, os.path.dirname(path)) if os.path.isfile(path) else (os.path.join(path, "__init__.py"), path)
    )
    sys_name = os.path.splitext(path)[0] if os.path.isfile(path) else path.replace(".", "_x_")
    name = get_module_name(path)
    try:
        spec = importlib.util.spec_from_file_location(sys_name, source)
        if spec is None or spec.loader is None:
            raise ImportError(f"{source} is not a Python module")
        module = importlib.util.module_from_spec(spec)
        sys.modules[sys_name] = module
        spec.loader.exec_module(module)
        LOADED_MODULE_DIRS[name] = folder
        web = getattr(module, "WEB_DIRECTORY", None)
        if web is not None and os.path.isdir(os.path.join(folder, web)):
            EXTENSION_WEB_DIRS[name] = os.path.abspath(os.path.join(folder, web))
        await _register_all(module, ignore, f"{module_parent}.{name}")
    except Exception as error:  # noqa: BLE001  (a pack's own code: whatever it raises, the host goes on without the pack)
        logging.warning("%s", traceback.format_exc())
        logging.warning("Cannot import %s module for custom nodes: %s", module_path, error)
        return False
    return True


async def init_builtin_extra_nodes() -> list[str]:
    """Enter the core nodes that ComfyUI keeps apart; returns what could not be imported, which is nothing here."""
    NODE_CLASS_MAPPINGS.update(PreviewAny=PreviewAny)
    NODE_DISPLAY_NAME_MAPPINGS.update(PreviewAny="Preview Any")
    for primitive in (PrimitiveString, PrimitiveStringMultiline, PrimitiveInt, PrimitiveFloat, PrimitiveBoolean):
        schema = primitive.GET_SCHEMA()
        _register(schema.node_id, primitive, schema.display_name, set(), "comfy_extras.nodes_primitive")
    _register("RebatchImages", RebatchImages, "Rebatch Images", set(), "comfy_extras.nodes_rebatch")
    from comfy_extras import nodes_clip_sdxl, nodes_latent

    encode, batch = nodes_clip_sdxl.CLIPTextEncodeSDXL, nodes_latent.LatentBatch
    _register("CLIPTextEncodeSDXL", encode, "CLIP Text Encode (SDXL)", set(), "comfy_extras.nodes_clip_sdxl")
    _register("LatentBatch", batch, "Batch Latents", set(), "comfy_extras.nodes_latent")
    return []


async def init_external_custom_nodes() -> None:
    """Load every pack in the custom_nodes folders."""
    present = set(NODE_CLASS_MAPPINGS)
    for folder in folder_paths.get_folder_paths("custom_nodes"):
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name) if os.path.isdir(folder) else []:
            is_pack = entry.is_dir() or entry.name.endswith(".py")
            if is_pack and entry.name != "__pycache__" and not entry.name.endswith(".disabled"):
                await load_custom_node(entry.path, present)


async def init_extra_nodes(init_custom_nodes: bool = True, init_api_nodes: bool = True) -> list[str]:
    """Load all nodes beyond the basic ones; there are no API nodes here. Returns the files that could
    not be imported.
    """
    failed = await init_builtin_extra_nodes()
    if init_custom_nodes:
        await init_external_custom_nodes()
    return failed
