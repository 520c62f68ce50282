"""Builds the demo model from the host's own classes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from ..storage.safetensors import load_safetensors


def demo_unet(device: Any = None) -> Any:
    """The demo's UNet, float32, in the host's own class, weights not set; used to create a model's first weights."""
    return _demo_base_model(device).diffusion_model


def demo_model(path: str) -> tuple[Any, Any, Any]:
    """(MODEL, CLIP, VAE) from the demo's safetensors file, in the host's own classes. Raises ValueError if its keys do
    not fit.
    """
    return demo_patcher(path), demo_clip(path), _demo_module().PixelVAE()


def demo_patcher(path: str, disable_dynamic: bool = False) -> Any:
    """The demo's MODEL, loaded as the host loads every other: with dynamic VRAM where that is on, unless
    `disable_dynamic`.
    """
    import comfy.model_management
    import comfy.model_patcher

    kind = comfy.model_patcher.ModelPatcher
    if not disable_dynamic:
        kind = getattr(comfy.model_patcher, "CoreModelPatcher", kind)
    offload = comfy.model_management.unet_offload_device()
    model = _demo_base_model(offload)
    patcher = kind(model, load_device=comfy.model_management.get_torch_device(), offload_device=offload)
    _load_exactly(model.diffusion_model, path, "model.diffusion_model.")
    return _register_rebuild(patcher, demo_patcher, path)


def demo_vae(damage: float = 0.0) -> Any:
    """The demo's VAE with weights, to be trained; `damage` spoils its decoder."""
    import comfy.model_management as management
    import comfy.model_patcher

    from . import vae

    network = vae.DemoAutoencoder().eval().requires_grad_(False)
    vae.initialize_(network, damage)
    patcher = comfy.model_patcher.ModelPatcher(
        network, load_device=management.get_torch_device(), offload_device=management.unet_offload_device()
    )
    return vae.DemoVAE(network, patcher, lambda patcher: management.load_models_gpu([patcher]))


def demo_clip(path: str, disable_dynamic: bool = False) -> Any:
    """The demo's CLIP: the host's CLIP object around the small text encoder, float32; `disable_dynamic` as for the
    MODEL.
    """
    import comfy.ops
    import comfy.sd

    from . import tokenizer

    target = SimpleNamespace(
        params={"operations": comfy.ops.manual_cast}, clip=_demo_module().TextEncoder, tokenizer=tokenizer.WordTokenizer
    )
    options: dict[str, Any] = {"model_options": {"dtype": torch.float32}}
    if disable_dynamic:  # which only a host with dynamic VRAM says
        options["disable_dynamic"] = True
    clip = comfy.sd.CLIP(target, **options)
    _load_exactly(clip.cond_stage_model, path, "text.")
    _register_rebuild(clip.patcher, demo_clip_patcher, path)
    return clip


def demo_clip_patcher(path: str, disable_dynamic: bool = False) -> Any:
    """The patcher of the demo's CLIP, loaded again; a host calls this to get a second, unchanged copy."""
    return demo_clip(path, disable_dynamic).patcher


def _demo_module() -> Any:
    from . import model

    return model


def _demo_base_model(device: Any) -> Any:
    """ComfyUI's BaseModel of the demo: flow matching without shift, its latents used as they are."""
    import comfy.latent_formats
    import comfy.model_base
    import comfy.supported_models_base

    class DemoLatent(comfy.latent_formats.LatentFormat):
        latent_channels = _demo_module().LATENT_CHANNELS

        def __init__(self) -> None:
            self.latent_rgb_factors = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]

    class DemoConfig(comfy.supported_models_base.BASE):
        unet_config: ClassVar[dict] = {}
        unet_extra_config: ClassVar[dict] = {}
        sampling_settings: ClassVar[dict] = {"shift": 1.0, "multiplier": 1000}
        latent_format = DemoLatent
        memory_usage_factor = 0.5

    config = DemoConfig(copy.deepcopy(_demo_module().UNET_CONFIG))
    config.set_inference_dtype(torch.float32, None)
    return comfy.model_base.BaseModel(config, comfy.model_base.ModelType.FLOW, device=device)


def _load_exactly(module: torch.nn.Module, path: str, prefix: str) -> None:
    """Load the file's tensors under `prefix` into a module; the error lists all missing or unexpected keys and wrong
    shapes.
    """
    tensors = {
        key[len(prefix) :]: tensor for key, tensor in load_safetensors(path)[0].items() if key.startswith(prefix)
    }
    try:
        module.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        raise ValueError(f"{path} is not the demo model (keys {prefix}*): {error}") from error


def _register_rebuild(patcher: Any, factory: Callable[..., Any], path: str) -> Any:
    """Tell the host how to build a second copy of a model, if it can (`cached_patcher_init`, ComfyUI 0.33). Returns the
    patcher.
    """
    if hasattr(patcher, "cached_patcher_init"):
        patcher.cached_patcher_init = (factory, (path,))
    return patcher
