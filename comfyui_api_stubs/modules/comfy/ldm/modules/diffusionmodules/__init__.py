"""Part of the embedded host's `comfy` package: diffusionmodules."""
