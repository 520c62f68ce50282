"""How ComfyUI looks at a graph while it executes it."""
