"""Putting LoRA stacks on weights and activations, and taking them off again."""
