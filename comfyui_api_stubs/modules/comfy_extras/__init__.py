"""The core nodes that ComfyUI keeps apart and other packs import: a few of them."""
