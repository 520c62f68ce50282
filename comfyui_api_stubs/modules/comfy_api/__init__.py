"""The public node API of ComfyUI 0.33.0."""
