"""The embedded host's `comfy` package: model, patcher and sampling API under ComfyUI's own names."""
