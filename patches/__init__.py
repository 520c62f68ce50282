"""The patching core: token downsampling, LoRA formats, stacks, weight ledger and activation-side adapters. Plain
PyTorch.
"""
