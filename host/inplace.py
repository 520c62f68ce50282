"""Forwards of the host under autograd: `x += y` of a transformer would overwrite what the backward pass needs, so it makes a new tensor."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_NEW: dict[Callable[..., Any], Callable[..., torch.Tensor]] = {
    torch.Tensor.add_: torch.add, torch.Tensor.sub_: torch.sub, torch.Tensor.mul_: torch.mul, torch.Tensor.div_: torch.div,
}  # fmt: skip


class NoAssignmentInPlace(TorchFunctionMode):
    """While it is entered and gradients are on, `x += y` (-=, *=, /=) on what has a gradient binds x to a new tensor of the same type.

    A call such as `x.add_(y)` is left alone: its result may be thrown away, and then the change itself is what is wanted.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.backward:  # a checkpointed forward runs again in there, and without this mode its gradients would be wrong
            given = dict(kwargs or {})
            with self:
                return torch.autograd.backward(*args, given.pop("gradient", None), **given)
        new = _NEW.get(func)
        if new is None or kwargs or len(args) != 2 or not torch.is_grad_enabled():
            return func(*args, **(kwargs or {}))
        target, other = args
        graded = target.requires_grad or (isinstance(other, torch.Tensor) and other.requires_grad)
        if not graded or not _assigns(sys._getframe(1)):
            return func(*args)
        return new(target, other).to(target.dtype)


def _assigns(frame: FrameType) -> bool:
    """Whether the frame is at an augmented assignment, not at a call."""
    return frame.f_lasti in _assignments(frame.f_code)


@lru_cache(maxsize=4096)
def _assignments(code: CodeType) -> frozenset[int]:
    """Offsets of a function's augmented assignments: INPLACE_ADD and its like, or since Python 3.11 BINARY_OP of `+=`."""
    found = (one for one in dis.get_instructions(code) if one.opname.startswith("INPLACE_") or one.opname == "BINARY_OP")
    return frozenset(one.offset for one in found if one.opname != "BINARY_OP" or one.argrepr.endswith("="))
