"""Puts models of the open ComfyUI, the real one or the embedded one, on a device; everything else stays on the CPU."""

from __future__ import annotations

import torch

CPU = torch.device("cpu")
FREE = 8 * 2**30  # bytes that ComfyUI is told are free


def put_models_on(device: torch.device) -> None:
    """The model computes on a device, and waits in the CPU's memory."""
    import comfy.model_management as management

    management.get_torch_device = lambda: device
    for name in ("should_use_fp16", "should_use_bf16"):
        setattr(management, name, lambda *_, **__: False)
    for name in ("unet_offload_device", "text_encoder_device", "text_encoder_offload_device", "intermediate_device"):
        setattr(management, name, lambda: CPU)
    management.get_free_memory = free_memory


def free_memory(device: object = None, torch_free_too: bool = False) -> int | tuple[int, int]:
    """Enough for any test."""
    if torch_free_too:
        return FREE, FREE
    return FREE
