"""Older packs' names for pictures, sound, masks and latents (ComfyUI's comfy_api.input.basic_types)."""

from comfy_api.latest._input import AudioInput, ImageInput, LatentInput, MaskInput

__all__ = ["AudioInput", "ImageInput", "LatentInput", "MaskInput"]
