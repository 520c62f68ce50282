"""The device that a model trains on, and how much memory training could have there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import comfy.model_management
import torch

from ..training.recipes.facts import Device

EVERYTHING = 1e30  # bytes: more than any device has


def unload_others(patchers: Sequence[Any]) -> None:
    """Take every other model off the devices of these, such as the text encoder and VAE that Dataset has used: ComfyUI
    counts what a model's inference needs when it makes room, and training needs more.
    """
    management = comfy.model_management
    networks = {id(patcher.model) for patcher in patchers}
    for device in {patcher.load_device for patcher in patchers}:
        if device.type == "cpu":
            continue  # a model on the CPU takes the same memory when it is unloaded
        kept = [loaded for loaded in management.current_loaded_models if id(loaded.real_model()) in networks]
        management.free_memory(EVERYTHING, device, kept)


def training_device(patcher: Any) -> Device:
    """A model's device. Free is what ComfyUI reports, with what its loaded models would give back when it unloads them.

    On the CPU the model's weights are in that memory already, so they count as free too.
    """
    device = patcher.load_device
    free = int(comfy.model_management.get_free_memory(device))
    if device.type == "cpu":
        free += int(patcher.model_size())
    else:
        for loaded in comfy.model_management.current_loaded_models:
            if loaded.device == device and loaded.model is not None:
                free += int(loaded.model.loaded_size())
    bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
    return Device(device.type, str(comfy.model_management.get_torch_device_name(device)), free, bf16)
