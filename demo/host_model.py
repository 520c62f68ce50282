"""The demo's model built of this host's own classes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from ..storage.safetensors import load_safetensors


def demo_unet(device: Any = None) -> Any:
    """A UNet of the demo's shape, of this host's own class, float32, its weights not yet set; for writing a model's
    first weights.
    """
    return _demo_base_model(device).diffusion_model


def demo_model(path: str) -> tuple[Any, Any, Any]:
    """(MODEL, CLIP, VAE) of the demo's one safetensors file, built of this host's own classes; ValueError when its keys
    do not fit.
    """
    return demo_patcher(path), demo_clip(path), _demo().PixelVAE()


def demo_patcher(path: str, disable_dynamic: bool = False) -> Any:
    """The demo's MODEL. Never a dynamic patcher: 7 MB are best held whole, so `disable_dynamic`, which hosts pass,
    changes nothing.
    """
    import comfy.model_management
    import comfy.model_patcher

    offload = comfy.model_management.unet_offload_device()
    model = _demo_base_model(offload)
    _load_exactly(model.diffusion_model, path, "model.diffusion_model.")
    patcher = comfy.model_patcher.ModelPatcher(
        model, load_device=comfy.model_management.get_torch_device(), offload_device=offload
    )
    return _rebuilt_by(patcher, demo_patcher, path)


def demo_clip(path: str) -> Any:
    """The demo's CLIP: this host's own CLIP object around the small text encoder, float32."""
    import comfy.ops
    import comfy.sd

    from . import words

    target = SimpleNamespace(
        params={"operations": comfy.ops.manual_cast}, clip=_demo().TextEncoder, tokenizer=words.WordTokenizer
    )
    clip = comfy.sd.CLIP(target, model_options={"dtype": torch.float32})
    _load_exactly(clip.cond_stage_model, path, "text.")
    _rebuilt_by(clip.patcher, demo_clip_patcher, path)
    return clip


def demo_clip_patcher(path: str, disable_dynamic: bool = False) -> Any:
    """The patcher of the demo's CLIP, read anew; what a host calls that needs a second, untouched copy."""
    return demo_clip(path).patcher


def _demo() -> Any:
    from . import model

    return model


def _demo_base_model(device: Any) -> Any:
    """ComfyUI's BaseModel of the demo: flow matching without shift, its latents used as they are."""
    import comfy.latent_formats
    import comfy.model_base
    import comfy.supported_models_base

    class DemoLatent(comfy.latent_formats.LatentFormat):
        latent_channels = _demo().LATENT_CHANNELS

        def __init__(self) -> None:
            self.latent_rgb_factors = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]

    class DemoConfig(comfy.supported_models_base.BASE):
        unet_config: ClassVar[dict] = {}
        unet_extra_config: ClassVar[dict] = {}
        sampling_settings: ClassVar[dict] = {"shift": 1.0, "multiplier": 1000}
        latent_format = DemoLatent
        memory_usage_factor = 0.5

    config = DemoConfig(copy.deepcopy(_demo().UNET_CONFIG))
    config.set_inference_dtype(torch.float32, None)
    return comfy.model_base.BaseModel(config, comfy.model_base.ModelType.FLOW, device=device)


def _load_exactly(module: torch.nn.Module, path: str, prefix: str) -> None:
    """Load the file's tensors under `prefix` into a module; every missing, unexpected or misshapen key is in the one
    error.
    """
    tensors = {
        key[len(prefix) :]: tensor for key, tensor in load_safetensors(path)[0].items() if key.startswith(prefix)
    }
    try:
        module.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        raise ValueError(f"{path} is not the demo model (keys {prefix}*): {error}") from error


def _rebuilt_by(patcher: Any, factory: Callable[..., Any], path: str) -> Any:
    """Tell hosts that can build a second copy of a model how to (`cached_patcher_init`, ComfyUI 0.33); returns the
    patcher.
    """
    if hasattr(patcher, "cached_patcher_init"):
        patcher.cached_patcher_init = (factory, (path,))
    return patcher
