"""The public node API of ComfyUI, as far as Graft's nodes use it."""
