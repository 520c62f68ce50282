"""Older packs' name for videos (ComfyUI's comfy_api.input.video_types)."""

from comfy_api.latest._input import VideoInput

__all__ = ["VideoInput"]
