"""Part of the embedded host's `comfy` package: k_diffusion."""
