"""Graft: patch, average and train diffusion models in a graph. A ComfyUI node pack (V3 schema)."""

WEB_DIRECTORY = "./web"


async def comfy_entrypoint():
    """What ComfyUI calls to load the pack: returns the extension that lists every node."""
    from .nodes import extension

    return extension()
