"""Saving memory while training: checkpointing and offload."""
