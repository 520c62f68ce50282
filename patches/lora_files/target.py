"""Where a layer of a LoRA file is applied."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ..patching.fuse import Slice


class Target(NamedTuple):
    """Where a layer is applied: the space ("model" or "clip") and the weight.

    For a fused weight also the part, and the row permutation of the host. `more` are the targets of further rows: of a
    layer that the file has in one and the model in several weights.
    """

    model: str
    weight: str
    part: Slice | None = None
    function: Callable[[Tensor], Tensor] | None = None
    more: tuple[Target, ...] = ()

    @property
    def pieces(self) -> tuple[Target, ...]:
        """The target of each weight, in the order of the file's rows."""
        return (self._replace(more=()), *self.more)
