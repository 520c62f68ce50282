"""The ways in which trainers name a LoRA's tensors; one file a format, listed in registry.py."""
