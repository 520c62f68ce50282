"""Forwards of the host under autograd: `x += y` or `out=` would overwrite what the backward pass may need, so new
tensors are made.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import pairwise
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_NEW: dict[Callable[..., Any], Callable[..., torch.Tensor]] = {
    torch.Tensor.add_: torch.add,
    torch.Tensor.sub_: torch.sub,
    torch.Tensor.mul_: torch.mul,
    torch.Tensor.div_: torch.div,
}
_REFUSED = "modified by an inplace operation"  # autograd's words
_SAID = "The model changes activations in place that its gradients need"


class NoAssignmentInPlace(TorchFunctionMode):
    """While it is entered and gradients are on, `x += y` (-=, *=, /=) on what has a gradient binds x to a new tensor of
    the same type.

    `x = torch.add(y, z, out=w)`, which autograd refuses, does so too (language models of newer hosts reuse their input
    like that). A call whose result is thrown away is left alone, and so is `x.add_(y)`: there the change itself may be
    what is wanted.
    """

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if isinstance(error, RuntimeError) and _REFUSED in str(error) and not str(error).startswith(_SAID):
            raise RuntimeError(
                f"{_SAID}, so this version of the host cannot train it; a newer one may. {error}"
            ) from error

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if kwargs and kwargs.get("out") is not None:
            return _without_out(func, args, dict(kwargs), sys._getframe(1))
        new = _NEW.get(func)
        if new is None or kwargs or len(args) != 2 or not torch.is_grad_enabled():
            return func(*args, **(kwargs or {}))
        target, other = args
        graded = target.requires_grad or (isinstance(other, torch.Tensor) and other.requires_grad)
        if not graded or not _assigns(sys._getframe(1)):
            return func(*args)
        return new(target, other).to(target.dtype)


def _without_out(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> Any:
    """A call with `out=`: a new tensor of its type where gradients are asked for and the caller goes on with the
    result.
    """
    out = kwargs["out"]
    tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
    graded = torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
    if not graded or not isinstance(out, torch.Tensor) or frame.f_lasti in _thrown_away(frame.f_code):
        return func(*args, **kwargs)
    del kwargs["out"]
    return func(*args, **kwargs).to(out.dtype)


def _assigns(frame: FrameType) -> bool:
    """Whether the frame is at an augmented assignment, not at a call."""
    return frame.f_lasti in _assignments(frame.f_code)


@lru_cache(maxsize=4096)
def _assignments(code: CodeType) -> frozenset[int]:
    """Offsets of a function's augmented assignments: INPLACE_ADD and its like, or since Python 3.11
    BINARY_OP of `+=`.
    """
    found = (
        one for one in dis.get_instructions(code) if one.opname.startswith("INPLACE_") or one.opname == "BINARY_OP"
    )
    return frozenset(one.offset for one in found if one.opname != "BINARY_OP" or one.argrepr.endswith("="))


@lru_cache(maxsize=4096)
def _thrown_away(code: CodeType) -> frozenset[int]:
    """Offsets of a function's calls whose result nobody takes."""
    every = list(dis.get_instructions(code))
    return frozenset(call.offset for call, after in pairwise(every) if after.opname == "POP_TOP")
