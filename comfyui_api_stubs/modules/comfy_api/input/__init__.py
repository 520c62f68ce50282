"""Older packs' names for the types of values on sockets (ComfyUI's comfy_api.input)."""

from comfy_api.latest._input import *  # noqa: F403
