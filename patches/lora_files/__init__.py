"""LoRA files: opening, parsing, layer names, saving, merging and averaging."""
