"""The adapter kinds (LoRA, LoHa, LoKr, DoRA …): one file per kind, and the registry that lists them."""
