"""The device that a model trains on, and how much memory training could have there."""

from __future__ import annotations

from typing import Any

import comfy.model_management
import torch

from ..training.recipes.facts import Device


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
