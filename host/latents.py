"""LATENTs in the shape that ComfyUI samples them in, and which of them a model takes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..training.data.dataset import Dataset, DatasetImage
from .comfyui_objects import BaseModel, Latents, Model, Vae

_NOT_SHOWN = (
    "Train Step: preview every N steps is above 0, and the latent is of sound, which previews do not show. Set preview"
    " every N steps to 0, and listen to the MODEL of this node with KSampler and VAE Decode Audio."
)
_TAKEN = {1: "sound, over time alone", 2: "pictures", 3: "pictures or clips"}


def dimensions_of(model: BaseModel) -> int:
    """How many dimensions a model's latents have beside their channels: 1 of sound alone, 2 of pictures, 3 of clips.
    ACE-Step 1 has its sound in 2.
    """
    dimensions: int = getattr(model.latent_format, "latent_dimensions", 2)
    return dimensions


def check_previewable(latent: Mapping[str, Any]) -> None:
    """Raise ValueError for a LATENT of sound alone; that of ACE-Step 1 only says so where it is an empty one."""
    samples = latent["samples"]
    if not is_nested(samples) and (samples.ndim == 3 or latent.get("type") == "audio"):
        raise ValueError(_NOT_SHOWN)


def decode(vae: Vae, latents: Latents) -> Tensor:
    """The pictures (B, h, w, 3) of latents; of video with sound the video's frames. ValueError for sound alone."""
    if is_nested(latents):
        latents = latents.unbind()[0]
    pictures: Tensor = vae.decode(latents)
    if pictures.ndim < 4:  # (B, T, channels)
        raise ValueError(_NOT_SHOWN)
    return pictures.reshape(-1, *pictures.shape[-3:])


def is_empty(latents: Latents) -> bool:
    """Whether latents hold no picture, as those of ComfyUI's empty latents."""
    return not any(int(torch.count_nonzero(one)) for one in (latents.unbind() if is_nested(latents) else [latents]))


def at_size(latent: Mapping[str, Any], vae: Vae, width: int, height: int) -> Mapping[str, Any]:
    """An empty LATENT for pictures of another size in pixels; 0 keeps a side as it is. Of video with sound that of the
    video.
    """
    if not width and not height:
        return latent
    factor = int(vae.spacial_compression_encode())
    samples = latent["samples"]
    sound = []
    if is_nested(samples):
        samples, *sound = samples.unbind()
    own = latent.get("downscale_ratio_spacial") or factor
    sides = [
        max(1, (pixels or int(side * own)) // factor)
        for pixels, side in zip((height, width), samples.shape[-2:], strict=True)
    ]
    resized = torch.zeros(*samples.shape[:-2], *sides, dtype=samples.dtype, device=samples.device)
    if sound:
        resized = type(latent["samples"])([resized, *sound])
    kept = {key: value for key, value in latent.items() if key != "downscale_ratio_spacial"}
    return {**kept, "samples": resized}


def draw_noise(latents: Latents, generator: torch.Generator) -> Latents:
    """Noise for latents; of video with sound for both in turn, as ComfyUI draws it."""
    if is_nested(latents):
        return type(latents)([draw_noise(one, generator) for one in latents.unbind()])
    return torch.randn(latents.shape, generator=generator, dtype=latents.dtype)


def is_nested(latents: Latents) -> bool:
    """Whether these are video and its sound, ComfyUI's NestedTensor."""
    return bool(getattr(latents, "is_nested", False))


def check_dataset(model: BaseModel, dataset: Dataset, node: str) -> None:
    """Raise ValueError that names an image whose latents a model does not take. `node` is where the two meet."""
    images = dataset.images + dataset.held_out
    if dataset.regularization is not None:
        images += dataset.regularization.images
    names: dict[tuple[int, ...], DatasetImage] = {}
    for image in images:
        names.setdefault(image.size, image)
    for image in names.values():
        if image.parts:
            _check_sound(model, image, node)
        _check_shape(model, image.name, image.shape, node)


def _check_sound(model: BaseModel, image: DatasetImage, node: str) -> None:
    """Raise ValueError when a model does not take the sound beside the video of an image."""
    network, (channels, _, frequencies) = model.diffusion_model, image.parts[1]
    taken = getattr(network, "num_audio_channels", None), getattr(network, "audio_frequency_bins", None)
    if taken == (channels, frequencies):
        return
    takes = "takes no sound beside its video"
    if None not in taken:
        takes = f"takes sound of {taken[0]} channels and {taken[1]} frequencies beside its video"
    raise ValueError(
        f"{node}: {type(model).__name__} {takes}, and {image.name} has sound of {channels} channels and {frequencies}"
        " frequencies beside it. Load LTX-2, encode the sound with its audio VAE, or take the video's latent alone,"
        " from LTXVSeparateAVLatent."
    )


def _check_shape(model: BaseModel, name: str, shape: Sequence[int], node: str) -> None:
    dimensions, channels = dimensions_of(model), model.latent_format.latent_channels
    is_sound = len(shape) == 2
    if is_sound == (dimensions == 1) and shape[0] == channels:
        return
    kind = "sound" if is_sound else "a picture or a clip"
    raise ValueError(
        f"{node}: {type(model).__name__} takes latents of {_TAKEN[dimensions]}, with {channels} channels, and {name}"
        f" has one of {kind}, with {shape[0]}: its shape is {tuple(shape)}. Encode with the VAE that belongs to the"
        " model, or load the model that belongs to these latents."
    )


def prepare_latent(patcher: Model, latent: Mapping[str, Any]) -> Tensor:
    """The samples (B, C, [frames,] h, w), of sound (B, C, T), that ComfyUI starts from.

    An empty LATENT takes the model's channels and, on newer hosts, its size.
    """
    import comfy.sample

    fix = comfy.sample.fix_empty_latent_channels
    ratios = [latent.get("downscale_ratio_spacial"), latent.get("downscale_ratio_temporal")]
    return fix(patcher, latent["samples"], *ratios[: len(inspect.signature(fix).parameters) - 2])
