"""Random draws of training: each has its own generator, seeded by (seed, step, purpose), never the global one."""

from __future__ import annotations

import torch

from ..storage.digest import sha256


def generator(seed: int, step: int, purpose: str, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator that depends only on its arguments and is the same in every process.

    Args:
        seed: the run's.
        step: the step that it draws for.
        purpose: what it draws; another purpose draws other numbers.
        device: where it draws; another device draws other numbers.
    """
    digest = sha256(f"graft draw {seed} {step} {purpose}".encode()).digest()
    if torch.device(device).type == "meta":  # which has no generator, and nothing to draw
        device = "cpu"
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
