"""Older packs' names for what videos are made of (ComfyUI's comfy_api.util)."""

from comfy_api.latest._util import VideoCodec, VideoComponents, VideoContainer

__all__ = ["VideoCodec", "VideoComponents", "VideoContainer"]
