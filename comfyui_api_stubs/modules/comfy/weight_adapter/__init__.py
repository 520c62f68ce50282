"""Adapters that change a weight (ComfyUI's `comfy.weight_adapter`); the embedded host has LoRA and LoCon."""

from .base import WeightAdapterBase, WeightAdapterTrainBase
from .lora import LoRAAdapter

adapters = [LoRAAdapter]
adapter_maps = {"LoRA": LoRAAdapter}

__all__ = ["LoRAAdapter", "WeightAdapterBase", "WeightAdapterTrainBase", "adapter_maps", "adapters"]
