"""Makes ComfyUI models trainable that change activations in place, which the backward pass may still need.

`x += y` and `out=` make new tensors instead. For calls such as `x.addcmul_(y, z)`, what is needed is copied first: the
first step finds out which networks do so.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import pairwise
from types import CodeType, FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from .plain_kernels import needs_gradient

if TYPE_CHECKING:
    from ..training.memory.saved_tensors import CopiesWhereNeeded

_OUT_OF_PLACE: dict[Callable[..., Any], Callable[..., torch.Tensor]] = {
    torch.Tensor.add_: torch.add,
    torch.Tensor.sub_: torch.sub,
    torch.Tensor.mul_: torch.mul,
    torch.Tensor.div_: torch.div,
}


class AvoidInplaceOps(TorchFunctionMode):
    """A mode in which in-place operations that autograd refuses make new tensors instead.

    If gradients are on, `x += y` (-=, *=, /=) of a tensor with a gradient binds x to a new tensor of the same type. So
    does `x = torch.add(y, z, out=w)` (language models of newer ComfyUIs reuse their input like that). A call whose
    result is thrown away is left alone, and so is `x.add_(y)`: there the change itself may be what is wanted. Which of
    them the caller wrote is read from its bytecode.
    """

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if error is None:
            return
        from ..training.memory.saved_tensors import CHANGED, refuses_change

        if refuses_change(error):
            raise RuntimeError(f"{CHANGED}: Graft cannot train it with this version of ComfyUI. {error}") from error

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if kwargs and kwargs.get("out") is not None:
            return _call_without_out(func, args, dict(kwargs), _caller(sys._getframe(1)))
        out_of_place = _OUT_OF_PLACE.get(func)
        if out_of_place is None or kwargs or len(args) != 2 or not torch.is_grad_enabled():
            return func(*args, **(kwargs or {}))
        target, other = args
        if needs_gradient(target, other) and _is_augmented_assignment(_caller(sys._getframe(1))):
            return out_of_place(target, other).to(target.dtype)
        return func(*args)


def copy_where_needed(network: torch.nn.Module) -> CopiesWhereNeeded:
    """A context in which what gradients need is copied before the network changes it by a call, if it does."""
    from ..training.memory.saved_tensors import CopiesWhereNeeded

    return CopiesWhereNeeded(network, _step_of)


def _step_of(kwargs: Mapping[str, Any]) -> int | None:
    """The training step that ComfyUI's arguments of a network belong to."""
    from ..patches.token_downsampling.unet import TRAINING

    options = kwargs.get("transformer_options") or {}
    step: int | None = options.get(TRAINING, {}).get("step")
    return step


def _call_without_out(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> Any:
    """Runs a call with `out=`. With gradients on and the result in use, it returns a new tensor of the same type."""
    out = kwargs["out"]
    if not torch.is_grad_enabled() or not isinstance(out, torch.Tensor) or not needs_gradient(*args, *kwargs.values()):
        return func(*args, **kwargs)
    if frame.f_lasti in _unused_calls(frame.f_code):
        return func(*args, **kwargs)
    del kwargs["out"]
    return func(*args, **kwargs).to(out.dtype)


def _caller(frame: FrameType) -> FrameType:
    """The model's frame of a call that function modes entered later have handed on."""
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _is_augmented_assignment(frame: FrameType) -> bool:
    """Whether the frame is at `x += y` or a similar statement, not at a call."""
    return frame.f_lasti in _augmented_assignments(frame.f_code)


@lru_cache(maxsize=4096)
def _augmented_assignments(code: CodeType) -> frozenset[int]:
    """Offsets of a function's augmented assignments: INPLACE_ADD and its like, or since Python 3.11 BINARY_OP of
    `+=`.
    """
    offsets = set()
    for instruction in dis.get_instructions(code):
        before_3_11 = instruction.opname.startswith("INPLACE_")
        if before_3_11 or (instruction.opname == "BINARY_OP" and instruction.argrepr.endswith("=")):
            offsets.add(instruction.offset)
    return frozenset(offsets)


@lru_cache(maxsize=4096)
def _unused_calls(code: CodeType) -> frozenset[int]:
    """Offsets of a function's calls whose result nobody uses."""
    offsets = set()
    for call, following in pairwise(dis.get_instructions(code)):
        if following.opname == "POP_TOP":
            offsets.add(call.offset)
    return frozenset(offsets)
