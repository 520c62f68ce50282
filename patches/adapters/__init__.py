"""The adapter kinds (LoRA, LoHa, LoKr, DoRA …): one file a kind, and the registry that lists them."""
