"""Both experts of a pair that are trained in one run, as Wan 2.2 14B: two training states side by side.

The experts share no weights, so each has its own state: what it learns is what it would learn in a run of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .state import TrainState


@dataclass(frozen=True)
class ExpertPair:
    """The training states of the high noise and the low noise expert."""

    high: TrainState
    low: TrainState

    @property
    def states(self) -> tuple[TrainState, TrainState]:
        """Both states, in the order in which a sampler uses the experts."""
        return self.high, self.low


def single(state: Any, node: str) -> TrainState:
    """The state, for a node that works on one. Raises ValueError for that of a pair."""
    if isinstance(state, ExpertPair):
        raise ValueError(
            f"{node}: this training state is of a pair of experts. Put Split Expert Pair in front, and connect the"
            " training state of one of them."
        )
    return state
