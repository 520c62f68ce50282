"""Running workflow JSON without a browser, on a real ComfyUI or the embedded host."""
