"""How trainers name a LoRA's tensors; one file per format, listed in registry.py."""
