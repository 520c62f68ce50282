"""What a LoRA stack does, measured before anything is sampled: the effect of each block, and conflicts."""
