"""Older packs' names for videos from files and tensors (ComfyUI's comfy_api.input_impl)."""

from comfy_api.latest._input_impl import *  # noqa: F403
