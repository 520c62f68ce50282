"""Applies LoRA stacks to weights and activations, and removes them again."""
