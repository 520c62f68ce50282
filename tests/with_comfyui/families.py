"""One tiny, randomly initialized model of every family that training knows, of ComfyUI's own classes, with captions it
understands.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import unittest.mock
from collections.abc import Mapping
from typing import Any

import comfy.model_patcher
import comfy.supported_models
import comfyui_version
import pytest
import torch
from graft_nodes.training.data.dataset import Conditioning
from graft_nodes.training.data.parts import ENTRY, Parts, pack_parts
from tiny_families import EVERY, Family


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers of their own generator."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def accepted(config: dict[str, Any]) -> dict[str, Any]:
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


# Parts that ComfyUI makes in one size, whatever the model's settings say: {family: (module, class, sizes)}.
_IN_ONE_SIZE = {
    "anima": (
        "comfy.ldm.anima.model",
        "LLMAdapter",
        {"source_dim": 12, "target_dim": 12, "model_dim": 12, "num_layers": 1, "num_heads": 2},
    ),
    "ace-step": (
        "comfy.ldm.ace.model",
        "LyricEncoder",
        {"output_size": 16, "attention_heads": 2, "linear_units": 24, "num_blocks": 1},
    ),
}


def _tiny_parts(name: str) -> contextlib.AbstractContextManager[Any]:
    if name not in _IN_ONE_SIZE:
        return contextlib.nullcontext()
    path, kind, sizes = _IN_ONE_SIZE[name]
    module = importlib.import_module(path)
    return unittest.mock.patch.object(module, kind, functools.partial(getattr(module, kind), **sizes))


def _config(name: str, changes: Mapping[str, Any]) -> Any:
    family = EVERY[name]
    kind = getattr(comfy.supported_models, family.supported)
    if family.extra_config:
        kind = type(family.supported, (kind,), {"unet_extra_config": {**kind.unet_extra_config, **family.extra_config}})
    return kind(accepted({**family.config, **changes}))


def build(name: str, dtype: torch.dtype = torch.float32, cast: torch.dtype | None = None, **changes: Any) -> Any:
    """A ModelPatcher with weights of `dtype`, computed with in `cast`; skips where this ComfyUI has no such family.

    `changes` are of the family's settings.
    """
    family = EVERY[name]
    if not hasattr(comfy.supported_models, family.supported):
        pytest.skip(f"this ComfyUI has no {family.supported}")
    with torch.random.fork_rng(devices=[]), _tiny_parts(name):
        config = _config(name, changes)
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
    model.eval()  # as newer ComfyUIs do
    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu)


def masks_text_of_lumina() -> bool:
    """Whether this ComfyUI samples Lumina 2 with text of which tokens are masked: 0.8.0 hands a mask of integers to
    PyTorch's attention, which takes none. Text that is not padded has no masked tokens.
    """
    return comfyui_version.__version__ != "0.8.0"


def connects_text_of_ltx_2() -> bool:
    """Whether the text connectors of LTX-2 are in its network; in ComfyUI 0.8.0 they are in the text encoder."""
    import comfy.ldm.lightricks.av_model

    return hasattr(comfy.ldm.lightricks.av_model.LTXAVModel, "preprocess_text_embeds")


def _text_of(name: str) -> Family:
    """The family with what this ComfyUI's text encoder gives for it."""
    family = EVERY[name]
    if name == "lumina2" and not masks_text_of_lumina():
        return dataclasses.replace(family, extras={"attention_mask": "ones"})
    if family.supported == "LTXAV" and not connects_text_of_ltx_2():
        return dataclasses.replace(family, extras={}, text=2 * family.text)  # tokens for the picture and for the sound
    return family


def conditions(name: str, seed: int, tokens: int = 6) -> tuple[torch.Tensor, dict[str, Any]]:
    """What the text encoder of the family would give for one caption: tokens (1, T, C) and the entries beside them."""
    named = {
        "mask": torch.tensor([[1] * (tokens - 2) + [0] * 2]),
        "ones": torch.ones(1, tokens, dtype=torch.long),
        "ids": torch.arange(tokens) + seed,
        "words": torch.tensor([[9 + seed, 8, 7, 151673]]),  # the last one stands for the noise level
        "lyrics": torch.arange(5).unsqueeze(0) + seed,
        "yes": True,
        "nothing": None,
    }
    family = _text_of(name)
    made: dict[str, Any] = {}
    for number, (key, value) in enumerate(family.extras.items()):
        drawn = seed + 10 * number + 100
        if isinstance(value, str):
            made[key] = named[value]
        elif isinstance(value, list):
            made[key] = [random(*shape, seed=drawn + place) for place, shape in enumerate(value)]
        else:
            made[key] = random(*value, seed=drawn)
    return random(1, tokens, family.text, seed=seed), made


def parts_of(name: str, frames: int | None = None) -> Parts:
    """The shapes of a family's video, of so many frames, and of its sound; () where latents have one part."""
    family = EVERY[name]
    if not family.sound:
        return ()
    return _with_frames(family.latent, frames), family.sound


def _with_frames(shape: tuple[int, ...], frames: int | None) -> tuple[int, ...]:
    return shape if frames is None else (shape[0], frames, *shape[2:])


def latents(name: str, seed: int, count: int = 1, frames: int | None = None) -> torch.Tensor:
    """A batch of a family's latents, of clips of so many frames; those of video with its sound packed."""
    if parts := parts_of(name, frames):
        return pack_parts([random(count, *shape, seed=seed + 50 * number) for number, shape in enumerate(parts)])
    return random(count, *_with_frames(EVERY[name].latent, frames), seed=seed)


def conditioning(context: torch.Tensor, extras: Mapping[str, Any], parts: Parts = ()) -> Conditioning:
    """A caption as a batch has it: with the shapes of the parts of its latents."""
    return Conditioning(context, {**extras, ENTRY: parts} if parts else extras)


def latent(name: str, seed: int) -> torch.Tensor:
    """A latent as the family's VAE gives it, (C, h, w) or (C, 1, h, w)."""
    return random(*EVERY[name].latent, seed=seed)
