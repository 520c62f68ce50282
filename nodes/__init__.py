"""The nodes that the graph editor sees, one file a subject; each file ends in NODES."""

from comfy_api.latest import ComfyExtension, io

from .. import host
from . import (
    apply_todo,
    averages,
    dataset,
    demo,
    diffusers_folder,
    lora,
    merging,
    picture_losses,
    plot,
    previews,
    recipe,
    slider,
    state,
    training,
    training_settings,
    vae,
)

_FILES = (
    apply_todo,
    lora,
    merging,
    dataset,
    slider,
    recipe,
    training_settings,
    training,
    previews,
    vae,
    state,
    averages,
    picture_losses,
    plot,
    diffusers_folder,
    demo,
)
NODES: list[type[io.ComfyNode]] = [node for file in _FILES for node in file.NODES]


class GraftExtension(ComfyExtension):
    """Lists Graft's nodes for ComfyUI's loader."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return NODES


def extension() -> ComfyExtension:
    """The extension object that `comfy_entrypoint` hands to ComfyUI; the routes that the panels ask are registered with
    it.
    """
    host.routes.register()
    return GraftExtension()
