"""How the losses of a step's micro-batches are read from the device: each at once, or all together at the end."""

from __future__ import annotations

import math
from typing import Protocol

from torch import Tensor

from ..distributed import fsdp, process_group
from .workspace import Workspace


class LossReader(Protocol):
    """Takes the losses of a step: `begin_part` before each micro-batch, then `take` for each of its passes."""

    part_loss: float
    """The loss of the micro-batch so far, as far as it is read."""

    def begin_part(self) -> None:
        """A micro-batch begins."""

    def take(self, loss: Tensor) -> bool:
        """Takes the loss of a pass, a tensor without dimensions; returns whether to go backward."""


class ReadAtOnce:
    """Waits for each loss: what follows depends on whether it is finite (on other ranks, a loss scale, a tensor that
    moves within the backward pass).
    """

    def __init__(self, work: Workspace) -> None:
        self._group, self.part_loss = work.group, 0.0

    def begin_part(self) -> None:
        self.part_loss = 0.0

    def take(self, loss: Tensor) -> bool:
        self.part_loss += float(loss)
        may_go_backward = self._may_go_backward()
        if not may_go_backward and math.isfinite(self.part_loss):
            self.part_loss = math.nan  # another rank's is not finite
        return may_go_backward

    def _may_go_backward(self) -> bool:
        """Whether the loss is finite; ranks that shard a model run the backward pass together or not at all."""
        is_finite = math.isfinite(self.part_loss)
        if not isinstance(self._group, process_group.ProcessGroup) or not self._group.shard:
            return is_finite
        doing = "backward" if is_finite else fsdp.NOT_FINITE
        return fsdp.NOT_FINITE not in fsdp.check_same_pass(self._group, doing)


class ReadLater:
    """Keeps the losses on the device, so that one process waits for it once a step, together with the norm."""

    def __init__(self) -> None:
        self.part_loss = 0.0
        self._parts: list[list[Tensor]] = []

    def begin_part(self) -> None:
        self._parts.append([])

    def take(self, loss: Tensor) -> bool:
        self._parts[-1].append(loss)
        return True

    @property
    def losses(self) -> list[Tensor]:
        """All losses in their order."""
        return [loss for part in self._parts for loss in part]

    def add_up(self, numbers: list[float]) -> float:
        """The loss of the step of `losses` as numbers, added in the order of `ReadAtOnce`: part by part."""
        total, left = 0.0, iter(numbers)
        for part in self._parts:
            total += sum((next(left) for _ in part), 0.0)
        return total


def reads_later(work: Workspace) -> bool:
    """Whether nothing depends on the loss before the gradients are complete, so that the step waits only once."""
    is_alone = not isinstance(work.group, process_group.ProcessGroup)
    return is_alone and not work.stepper.early and work.loss_scale is None
