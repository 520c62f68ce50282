"""Frozen weights in the type that a step computes in.

Autocast casts a layer's weight at each use, and autograd keeps every cast weight until the backward pass: a second copy
of the whole model. Cast once, there is one copy.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...patches.core.calls import around
from ...patches.core.slots import Slot, Swap, find_slot
from ...patches.models.layers import casts_weights, is_changed_by_host, is_conv, why_not_plain
from .quantized_base.format import product_type

_SHARED = ("cpu", "mps")  # kinds of devices that compute in main memory, where a second copy would save nothing


@contextmanager
def cast_weights(
    module: nn.Module, dtype: torch.dtype, trained: Container[str] = (), in_main_memory: bool = False
) -> Iterator[int]:
    """A context in which the frozen linear layers and convolutions of a model compute in one type under autocast with
    one copy of their weights. Afterwards the model is as before, with the same Parameter objects.

    Those of another 16 or 32 bit type are cast, and their own values wait in host memory. What a host's layers unpack
    to the type of their input (fp8) is unpacked to `dtype` at once, not to float32 first. Norms that a host casts so
    compute with their own weights, as those that it does not cast.

    Args:
        module: the model.
        dtype: the type that autocast computes in.
        trained: parameters, by name, that are left alone.
        in_main_memory: whether the model computes there: there is no memory beside it, and weights stay as they are.

    Yields:
        How many weights are cast.
    """
    casts: dict[int, nn.Parameter] = {}  # by the identity of what is cast: layers may share a weight
    with ExitStack() as stack:
        for path, layer in list(module.named_modules()):
            if isinstance(layer, (nn.GroupNorm, nn.LayerNorm)) and casts_weights(layer):
                stack.callback(around(layer, "input", _with_float32_input).leave)
            if not (isinstance(layer, nn.Linear) or is_conv(layer)):
                continue
            if casts_weights(layer):
                stack.callback(around(layer, "input", _with_cast_input).leave)
            if in_main_memory:
                continue
            for name in ("weight", "bias"):
                if f"{path}.{name}" not in trained and _is_of_other_type(layer, name, dtype):
                    _cast_(find_slot(layer, name), dtype, casts, stack)
        yield len(casts)


def _with_cast_input(layer: nn.Module, inner: Callable[..., Any], x: Any, *more: Any, **named: Any) -> Any:
    if isinstance(x, Tensor) and x.is_floating_point():
        x = x.to(product_type(x))
    return inner(x, *more, **named)


def _with_float32_input(_: nn.Module, inner: Callable[..., Any], x: Any, *more: Any, **named: Any) -> Any:
    """A norm computes in float32 under autocast: its weights are cast to that, not rounded to the type of its input."""
    return inner(x.float(), *more, **named)


def _is_of_other_type(layer: nn.Module, name: str, dtype: torch.dtype) -> bool:
    parameter = getattr(layer, name, None)
    if parameter is None or parameter.dtype == dtype or parameter.device.type in _SHARED:
        return False
    return why_not_plain(layer, name) is None and not is_changed_by_host(layer, name)


@torch.no_grad()
def _cast_(slot: Slot, dtype: torch.dtype, casts: dict[int, nn.Parameter], undo: ExitStack) -> None:
    own = slot.tensor
    if id(own) not in casts:
        cast = nn.Parameter(torch.empty(own.shape, dtype=dtype, device=own.device), requires_grad=False)
        cast.copy_(own)
        casts[id(own)] = cast
        values = torch.empty_like(own, device="cpu").copy_(own)
        with torch.inference_mode(own.is_inference()):
            own.data = torch.empty(0, dtype=own.dtype, device=own.device)  # frees its memory
        undo.callback(_fill_, own, values, cast)
    undo.callback(Swap(slot, casts[id(own)]).leave)


@torch.no_grad()
def _fill_(own: nn.Parameter, values: Tensor, cast: nn.Parameter) -> None:
    """Gives a parameter its values back, where the cast one is now: the host may have moved the model."""
    device = cast.device
    cast.data = torch.empty(0, dtype=cast.dtype, device=device)
    with torch.inference_mode(own.is_inference()):
        own.data = torch.empty_like(values, device=device).copy_(values)
