"""A conditioning as ComfyUI's condition objects, which a network's forward pass takes. They are kept for the next time
that a caption or a picture comes up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from ..training.data.batches import ImageConditioning
from ..training.data.dataset import Conditioning
from ..training.data.parts import ENTRY
from .comfyui_objects import BaseModel
from .latents import dimensions_of
from .network_state import record_running_modules

# On the device; captions that vary by draw, and pictures with latents of their own, would fill it otherwise.
KEPT_CONDITIONS, KEPT_BYTES = 64, 512 * 2**20

CONTROLS = {"reference_latents": "reference latents", "concat_latent_image": "concatenated latents"}

_PICTURE_OR_NONE = ("HunyuanVideo15",)  # ComfyUI's classes of models with and without a picture beside the noise


class Conditions:
    """The condition objects of one model for one picture at a time."""

    def __init__(self, model: BaseModel, device: torch.device) -> None:
        self.model, self.device = model, device
        self._kept: OrderedDict[tuple[Any, ...], tuple[Conditioning, dict[str, Any]]] = OrderedDict()
        self._bytes = 0
        self._checked: set[str] = set()

    def get(self, conditioning: Conditioning, x: torch.Tensor) -> dict[str, Any]:
        """Those for noisy latents of this size, made only where they are not kept."""
        if conditioning.context.requires_grad:  # for this step only
            return self.make(conditioning, x)
        key = (id(conditioning), tuple(x.shape[1:]))
        if key not in self._kept:
            with record_running_modules(self.model.diffusion_model) as layers:
                condition = self.make(conditioning, x)
            if layers:  # as LTX-2's text connectors: they may be trained
                return condition
            # The conditioning is kept too, so that no other gets its id.
            self._check_controls(conditioning, x, condition)
            self._kept[key] = (conditioning, condition)
            self._bytes += _bytes(condition)
            while len(self._kept) > 1 and (len(self._kept) > KEPT_CONDITIONS or self._bytes > KEPT_BYTES):
                self._bytes -= _bytes(self._kept.popitem(last=False)[1][1])
        self._kept.move_to_end(key)
        return self._kept[key][1]

    def _check_controls(self, conditioning: Conditioning, x: torch.Tensor, conditions: Mapping[str, Any]) -> None:
        """Raise ValueError when an image brings control pictures and the network gets nothing of them; asked once for
        each kind.
        """
        if not isinstance(conditioning, ImageConditioning) or conditioning.of_caption is None:
            return
        names = [name for name in CONTROLS if name in conditioning.of_image and name not in self._checked]
        if not names:
            return
        without = {name: value for name, value in conditioning.extras.items() if name not in names}
        if _are_same(conditions, self.make(Conditioning(conditioning.context, without), x)):
            raise ValueError(
                f"{type(self.model).__name__} takes no {' and '.join(CONTROLS[name] for name in names)}, so the control"
                " pictures would do nothing. Choose another way of control pictures in Dataset, or load a model that"
                " takes them."
            )
        self._checked.update(names)

    def make(self, conditioning: Conditioning, x: torch.Tensor) -> dict[str, Any]:
        """New condition objects, on the device."""
        noise = torch.zeros(1, *x.shape[1:], device=self.device)
        sizes: dict[str, Any] = {"width": None, "height": x.shape[2] * 8}  # of sound, as ComfyUI says it
        if x.ndim > 3:
            sizes = {"width": x.shape[-1] * 8, "height": x.shape[-2] * 8}
        # Guidance 1: a guidance-distilled model must predict the training images without guidance.
        params = {**sizes, "prompt_type": "positive", "guidance": 1.0, **conditioning.extras}
        params.update(
            cross_attn=conditioning.context.to(self.device, torch.float32),
            device=self.device,
            noise=noise,
            latent_image=noise,
            latent_shapes=[(1, *shape) for shape in conditioning.extras.get(ENTRY, ())] or [noise.shape],
        )
        for name, value in params.items():
            params[name] = _copy_to(value, self.device)
        conditions = self.model.extra_conds(**params)
        for name, condition in conditions.items():
            conditions[name] = condition.process_cond(batch_size=1, device=self.device, area=None)
        return conditions


def empty_noise(model: BaseModel, device: torch.device) -> torch.Tensor:
    """Zeros in the place of small noisy latents: (1, C, 16, 16), of one frame (1, C, 1, 16, 16), of sound alone
    (1, C, 16).
    """
    sides = {1: (16,), 3: (1, 16, 16)}.get(dimensions_of(model), (16, 16))
    return torch.zeros(1, model.latent_format.latent_channels, *sides, device=device)


def takes_picture(model: BaseModel) -> bool:
    """Whether the network needs a picture beside the noise, so that an image without one is worth a word.

    ComfyUI gives it an empty one where there is none. Kandinsky 5 gets nothing but that, and HunyuanVideo 1.5 gets it
    for text to video too, with the same network as for image to video.
    """
    if type(model).__name__ in _PICTURE_OR_NONE or dimensions_of(model) == 1:
        return False
    noise = empty_noise(model, torch.device("cpu"))
    given = {"noise": noise, "latent_image": noise, "device": noise.device}
    if model.concat_cond(**given) is None:
        return False
    picture = torch.full_like(noise, 3.0)
    mask = torch.zeros_like(noise[:, :1])  # inpainting models look at no picture without one
    for asked in (given, {**given, "concat_mask": mask}):
        if not torch.equal(model.concat_cond(**asked), model.concat_cond(**asked, concat_latent_image=picture)):
            return True
    return False


def can_concat(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Whether ComfyUI can put the conditions of two pictures into one batch."""
    if left is right:
        return True
    return left.keys() == right.keys() and all(left[name].can_concat(right[name]) for name in left)


def _copy_to(value: Any, device: torch.device) -> Any:
    """Tensors on the device, those in lists and mappings too: reference latents are a list. They are copies, because
    some models change them in place.
    """
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True)
    if type(value) in (list, tuple):
        return type(value)(_copy_to(entry, device) for entry in value)
    if type(value) is dict:
        return {key: _copy_to(entry, device) for key, entry in value.items()}
    return value


def _are_same(conditions: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    if conditions.keys() != others.keys():
        return False
    return all(_is_same(value.cond, others[name].cond) for name, value in conditions.items())


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return value.shape == other.shape and torch.equal(value, other)
    if isinstance(value, list | tuple) and isinstance(other, list | tuple):
        return len(value) == len(other) and all(map(_is_same, value, other))
    return bool(value == other)


def _bytes(conditions: Mapping[str, Any]) -> int:
    return sum(_bytes_of(getattr(condition, "cond", None)) for condition in conditions.values())


def _bytes_of(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, list | tuple):
        return sum(map(_bytes_of, value))
    return 0
