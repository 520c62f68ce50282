"""Ranks by noise level (T-LoRA, arXiv 2507.05964): how many of an adapter's ranks work at a timestep, and the timesteps
of the forward pass that runs now.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

TIMESTEPS = 1000  # how the authors count noise: 0 is none, 1000 is nothing else


@dataclass(frozen=True)
class RankMask:
    """All `rank` ranks work on a picture without noise, and `min_rank` on noise alone; `exponent` bends what is
    between.
    """

    rank: int
    min_rank: int
    exponent: float = 1.0

    def ranks_at(self, timesteps: Tensor) -> Tensor:
        """How many ranks work at timesteps t (T-LoRA, arXiv 2507.05964):

            int(((1000 - t) / 1000) ** exponent * (rank - min_rank)) + min_rank

        It is computed in float32 and in the authors' order, because a rounding decides about a rank.

        Args:
            timesteps: (B,), from 0 (no noise) to 1000.

        Returns:
            Whole numbers (B,).
        """
        share = ((TIMESTEPS - timesteps.float()) / TIMESTEPS).clamp(0.0, 1.0)
        return (share**self.exponent * (self.rank - self.min_rank)).to(torch.int64) + self.min_rank

    def at(self, timesteps: Tensor) -> Tensor:
        """Which ranks work at timesteps.

        Args:
            timesteps: (B,), from 0 (no noise) to 1000.

        Returns:
            Booleans (B, rank).
        """
        numbers = torch.arange(self.rank, device=timesteps.device)
        return numbers < self.ranks_at(timesteps).unsqueeze(1)


_thread = threading.local()  # the timesteps of the forward pass that a thread is in


def current_timesteps() -> Tensor | None:
    """The timesteps (B,) of the forward pass that this thread is in; None where nothing told them."""
    return getattr(_thread, "timesteps", None)


@contextmanager
def set_timesteps(timesteps: Tensor | None) -> Iterator[None]:
    """A context for a forward pass of a model at timesteps.

    Gradient checkpointing enters it again when it runs a block again: backward passes have threads of their own.

    Args:
        timesteps: (B,), from 0 (no noise) to 1000; None where they are not known.
    """
    before = current_timesteps()
    _thread.timesteps = timesteps
    try:
        yield
    finally:
        _thread.timesteps = before


def timesteps_of_rows(timesteps: Tensor, rows: int) -> Tensor:
    """Timesteps (B,) for a layer that gets `rows` rows: those of one picture lie side by side.

    Raises ValueError if the rows cannot be told apart by picture.
    """
    pictures = timesteps.shape[0]
    if pictures == 1 or rows == pictures:
        return timesteps
    if rows % pictures == 0:
        return timesteps.repeat_interleave(rows // pictures)
    raise ValueError(
        f"adapter type tlora: a layer got {rows} rows for {pictures} pictures, so their noise levels cannot be told"
        " apart: set batch size to 1, or leave that layer out with the layer filter"
    )
