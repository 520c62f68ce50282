"""Whole copies of models that ComfyUI pages in and out (dynamic VRAM), for training: gradients cannot go through
weights whose pages leave between the forward pass and the backward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..patches.core.slots import Swap, find_slot
from ..patches.models.layers import why_not_plain
from ..training.memory.allocations import META
from .comfyui_objects import Clip, Model

_MODEL_TYPE = "_comfy_model_dtype"  # after a parameter's name: the type that its layer was built with
_OF_PAGING = ("dynamic_vbars", "dynamic_pins", "dynamic_patchers")  # what ComfyUI leaves on a VAE that it loads again

_copies: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()  # a patcher of each paged model's whole copy


def is_paged(patcher: Model) -> bool:
    """Whether ComfyUI pages the weights of a MODEL in and out."""
    return bool(getattr(patcher, "is_dynamic", bool)())


def whole_model(patcher: Model) -> Model:
    """A patcher like this one whose weights stay where they are loaded, in the types that the model computes with. One
    that is not paged is returned as it is.

    The first call for a model reads its file again. The copy stays in host memory for as long as the model does.
    ValueError if ComfyUI does not know how to load the model again.
    """
    if not is_paged(patcher):
        return patcher
    copy = _copies.get(patcher.model)
    if copy is None:
        copy = _copies[patcher.model] = _load_again(patcher)
    copy.load_device = patcher.load_device
    clone = patcher.clone(disable_dynamic=True, model_override=copy.get_clone_model_override())
    clone.parent = copy  # through which ComfyUI unloads the copy once the clone has ended
    clone.size = 0  # to be counted again: the paged model's is in the types of its file
    clone.is_injected = False  # what the paged model carries now is not on the copy
    return clone


def whole_clip(clip: Clip) -> Clip:
    """A CLIP like this one with the whole copy of its text encoder; see `whole_model`."""
    if not is_paged(clip.patcher):
        return clip
    clone = clip.clone()
    clone.patcher = whole_model(clip.patcher)
    clone.cond_stage_model = clone.patcher.model
    return clone


@contextlib.contextmanager
def set_types(patcher: Model) -> Iterator[None]:
    """A context in which the weights of a paged model that are of another type than its whole copy's are tensors of
    that type on the meta device: to count its memory without loading it.
    """
    shapes: dict[tuple[int, torch.dtype], nn.Parameter] = {}
    with contextlib.ExitStack() as stack:
        if is_paged(patcher):
            for module, name, parameter, dtype in _find_other_types(patcher.model):
                empty = torch.empty(parameter.shape, dtype=dtype, device=META)
                shape = shapes.setdefault((id(parameter), dtype), nn.Parameter(empty, requires_grad=False))
                stack.callback(Swap(find_slot(module, name), shape).leave)
        yield


def _load_again(patcher: Model) -> Model:
    import comfy.model_patcher

    if getattr(patcher, "cached_patcher_init", None) is None:
        raise ValueError(
            f"ComfyUI moves the weights of this model ({type(patcher.model).__name__}) in and out of VRAM (dynamic"
            " VRAM), and the node that loaded it did not tell ComfyUI how to load it again as a whole, which training"
            " needs. Load it with ComfyUI's own loaders (Load Checkpoint, Load Diffusion Model, Load CLIP, Load VAE),"
            " or start ComfyUI with --disable-dynamic-vram."
        )
    model = patcher.clone(disable_dynamic=True).model
    for name in _OF_PAGING:
        model.__dict__.pop(name, None)
    with torch.no_grad():
        _cast_(model)
    return comfy.model_patcher.ModelPatcher(model, patcher.load_device, patcher.offload_device)


def _cast_(model: nn.Module) -> None:
    """Give every weight and buffer the type that its layer was built with: layers that wait for their weights take
    those of the file as they are.
    """
    casts: dict[tuple[int, torch.dtype], nn.Parameter] = {}  # tied weights stay tied
    for module, name, parameter, dtype in _find_other_types(model):
        key = id(parameter), dtype
        if key not in casts:
            casts[key] = nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
        setattr(module, name, casts[key])
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(getattr(module, f"{name}{_MODEL_TYPE}", buffer.dtype)))


def _find_other_types(model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter, torch.dtype]]:
    """(module, name, parameter, type that its layer was built with) of each plain weight that has another type."""
    found = []
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            dtype = getattr(module, f"{name}{_MODEL_TYPE}", None) or parameter.dtype
            if parameter.dtype != dtype and why_not_plain(module, name, coarse=True) is None:
                found.append((module, name, parameter, dtype))
    return found
