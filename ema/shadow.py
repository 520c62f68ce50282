"""A weight average and the step it stands at: begun from weights, moved after every step, swapped in for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from .schedule import EMASettings, decay_over
from .update import average_, check_pairs


@dataclass(eq=False)
class Shadow:
    """Float32 averages by name, and the number of the last training step they have seen. `update_` and `swapped` change it in place."""

    tensors: dict[str, Tensor]
    step: int = 0
    _out: bool = False

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], device: torch.device | str | None = None) -> Shadow:
        """An average that starts as a float32 copy of `weights` (on `device`, else where each tensor is)."""
        return cls({name: w.detach().to(device or w.device, torch.float32, copy=True) for name, w in weights.items()})

    def update_(self, weights: Mapping[str, Tensor], settings: EMASettings, step: int, total_steps: int) -> bool:
        """Take in the weights after training step `step` (1 is the first), every `interval` steps; whether it did."""
        if step != self.step + 1:
            raise ValueError(f"The average stands at step {self.step}: it can take step {self.step + 1}, not {step}.")
        due = step % settings.interval == 0
        if due:
            average_(self.tensors, weights, decay_over(settings, step, total_steps))
        self.step = step
        return due

    @contextmanager
    def swapped(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Exchange the live `weights` and the average in place for the block, one tensor at a time; refuses nesting."""
        if self._out:
            raise RuntimeError("The weight average is swapped in already: leave that block first.")
        check_pairs(self.tensors, weights)
        self._out = True
        _exchange_(self.tensors, weights)
        try:
            yield
        finally:
            _exchange_(self.tensors, weights)
            self._out = False


@torch.no_grad()
def _exchange_(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    for name, tensor in left.items():
        held = tensor.clone()
        tensor.copy_(right[name])
        right[name].copy_(held)
