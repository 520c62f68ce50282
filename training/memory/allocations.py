"""Counts the memory of a computation that has none: tensors on PyTorch's meta device, each for what it would take."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ...patches.core.slots import Slot, slots, swap_all
from . import meta_results
from .meta_results import META

_AS_NUMBER = torch.ops.aten._local_scalar_dense.default
_TO_COPY = torch.ops.aten._to_copy.default
_EMPTY_LIKE = torch.ops.aten.empty_like.default
_COPY = torch.ops.aten.copy_.default


class Allocations(TorchDispatchMode):
    """While it is entered, every new tensor on the meta device counts for the part that `as_part` names.

    Numbers that are read from the device are 1, and what is copied from it to the host has no values.
    """

    def __init__(self) -> None:
        super().__init__()
        self._part = ""
        self._alive: dict[int, tuple[str, int]] = {}  # storage: its part and bytes
        self.now: dict[str, int] = defaultdict(int)
        self.total = self.peak = 0
        self.at_peak: dict[str, int] = {}

    @contextmanager
    def count_as(self, part: str) -> Iterator[None]:
        """A context in which new memory belongs to a part."""
        before, self._part = self._part, part
        try:
            yield
        finally:
            self._part = before

    def forget_peak(self) -> None:
        """The peak is what lives now."""
        self.peak, self.at_peak = self.total, dict(self.now)

    def count(self, tensor: Tensor, part: str) -> None:
        """The memory of a tensor belongs to a part from now on."""
        if tensor.device != META:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            old, size = self._alive[key]
            self.now[old] -= size
            self._alive[key] = part, size
            self.now[part] += size
            return
        size = storage.nbytes()
        self._alive[key] = part, size
        self.now[part] += size
        self.total += size
        weakref.finalize(storage, self._free, key)
        if self.total > self.peak:
            self.forget_peak()

    def _free(self, key: int) -> None:
        part, size = self._alive.pop(key)
        self.now[part] -= size
        self.total -= size

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = self._read(func, args, kwargs or {})
        if found is None:
            found = meta_results.remember_result(func, args, kwargs or {})
        for tensor in (found,) if isinstance(found, Tensor) else tree_leaves(found):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._alive:
                self.count(tensor, self._part)
        return found

    def _read(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What an operation gives that would read from the meta device; None for all others."""
        if func is _AS_NUMBER and args[0].device == META:
            return torch.ones((), dtype=args[0].dtype).item()
        if func is _TO_COPY and args[0].device == META:
            device = torch.device(kwargs.get("device") or META)
            if device != META:
                return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=device)
        if func is _EMPTY_LIKE and args[0].device == META:
            device = torch.device(kwargs.get("device") or META)
            if device != META:  # what the step would move there may not fit into this host's memory
                return torch.zeros((), dtype=kwargs.get("dtype") or args[0].dtype).expand(args[0].shape)
        if func is _COPY and args[1].device == META and args[0].device != META:
            return args[0]
        return None


class _FlashAttention(torch.autograd.Function):
    """Keeps what a fused attention kernel keeps: its input, its output and one number for each row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class FusedAttention(TorchFunctionMode):
    """PyTorch's attention on the meta device, as the fused kernels of CPU and CUDA allocate it."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        values = dict(kwargs or {})
        if func is functional.scaled_dot_product_attention:
            query, key, value = _first_three(args, values)
            if query.device == META:
                return _FlashAttention.apply(query, key, value)
        return func(*args, **values)


def _first_three(args: Sequence[Any], values: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    given = [*args, *(values[name] for name in ("query", "key", "value")[len(args) :])]
    return given[0], given[1], given[2]


_IN_HALF = {
    functional.linear,
    functional.conv1d,
    functional.conv2d,
    functional.conv3d,
    functional.scaled_dot_product_attention,
    torch.matmul,
    torch.bmm,
    torch.baddbmm,
    torch.addmm,
    torch.einsum,
    Tensor.matmul,
    Tensor.__matmul__,
    Tensor.bmm,
}
_IN_FULL = {
    functional.layer_norm,
    functional.group_norm,
    functional.softmax,
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    torch.softmax,
    torch.exp,
    torch.pow,
    torch.norm,
    Tensor.softmax,
    Tensor.exp,
    Tensor.pow,
    Tensor.norm,
}


class AutocastOnMeta(TorchFunctionMode):
    """CUDA's autocast for the meta device, which has none: products in `dtype`, norms and losses in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        dtype = None
        if func in _IN_HALF:
            dtype = self._dtype
        elif func in _IN_FULL:
            dtype = torch.float32
        if dtype is None:
            return func(*args, **(kwargs or {}))
        return func(*_cast(args, dtype), **_cast(dict(kwargs or {}), dtype))


def _cast(values: Any, dtype: torch.dtype) -> Any:
    def cast(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point() and value.device == META:
            return value.to(dtype)
        return value

    return tree_map(cast, values)


@contextmanager
def on_meta(module: torch.nn.Module, count: Callable[[Tensor], None] | None = None) -> Iterator[None]:
    """A context in which every parameter and buffer of `module` is a tensor on the meta device; `count` sees each."""

    def moved(slot: Slot) -> Tensor:
        tensor = _move_to_meta(slot.tensor)
        if count is not None:
            count(tensor)
        return tensor

    with swap_all(slots(module.modules()), moved):
        yield


@contextmanager
def off_meta(module: torch.nn.Module) -> Iterator[None]:
    """A context in which what `module` has on the meta device lies in host memory, where it takes none either: the
    weights of a model of which only the header was read, for a plan that leaves them there.
    """
    with swap_all(slots(module.modules()), lambda slot: _move_off_meta(slot.tensor)):
        yield


def _move_off_meta(tensor: Tensor) -> Tensor | None:
    if not tensor.is_meta:
        return None
    on_host = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(on_host, requires_grad=False)
    return on_host


def _move_to_meta(tensor: Tensor) -> Tensor:
    on_device = tensor.detach().to(META)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(on_device, requires_grad=False)
    return on_device
