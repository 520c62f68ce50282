"""Renames LoRA files of other model families; the embedded host's families need none."""


def convert_lora(sd):
    """The state dict as it is."""
    return sd
