"""The device that a model trains on: how much memory training could have there, and which type it computes in."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import comfy.cli_args
import comfy.model_management
import torch

from ..patches.core.host_memory import pinned
from ..training.recipes.facts import Device
from .comfyui_objects import Model

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


def unload(patcher: Any) -> None:
    """Take one model off its device; all others stay."""
    management = comfy.model_management
    if patcher.load_device.type != "cpu":
        kept = [loaded for loaded in management.current_loaded_models if loaded.real_model() is not patcher.model]
        management.free_memory(EVERYTHING, patcher.load_device, kept)


def training_device(patcher: Model) -> Device:
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
    name = str(comfy.model_management.get_torch_device_name(device))
    return Device(device.type, name, free, half_type(device) == torch.bfloat16)


def limit_pinned_memory() -> None:
    """Let Graft pin what ComfyUI would pin in all, less what it has pinned: on Windows 40% of the memory, as the system
    pins no more than half.

    Nothing with --disable-pinned-memory. Where ComfyUI has no limit, as older ones, it is that of 0.33 without swap.
    """
    management = comfy.model_management
    limit = getattr(management, "MAX_PINNED_MEMORY", 0)
    memory = management.get_total_memory(torch.device("cpu"))
    if getattr(comfy.cli_args.args, "disable_pinned_memory", False):
        limit = 0
    elif sys.platform == "win32":
        limit = 0.4 * memory
    elif limit <= 0:
        limit = max(0.4 * memory, min(0.9 * memory, memory - 16 * 2**30))
    pinned.limit = max(0, int(limit) - getattr(management, "TOTAL_PINNED_MEMORY", 0))


def half_type(device: torch.device) -> torch.dtype | None:
    """The half precision that training precision auto means on a device: bf16 on a card that computes it, fp16 on one
    that would only emulate it (RTX 20xx and earlier, RDNA 2 and earlier). None on all others: the model's own types.
    """
    if device.type != "cuda":
        return None
    if torch.version.hip:  # torch says that each of these cards has bf16
        has_bf16 = comfy.model_management.should_use_bf16(device)
    else:
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    if has_bf16:
        return torch.bfloat16
    return torch.float16
