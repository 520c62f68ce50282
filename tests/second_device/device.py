"""A second device in pure Python, which refuses to compute with tensors of the CPU: it finds tensors on the wrong
device without a GPU.

Its tensors lie in the CPU's memory and say `second:0`. As on CUDA, tensors without dimensions may be mixed, and copies
and indexing may cross. It cannot run checkpointing, autocast or offloading, and `Module.to` makes new Parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

NAME = "second"
torch.utils.backend_registration._setup_privateuseone_for_python_backend(NAME)
DEVICE = torch.device(NAME, 0)
CPU = torch.device("cpu")

_aten = torch.ops.aten
_CROSSING = {_aten._to_copy.default, _aten.copy_.default, _aten.index.Tensor, _aten.index_put_.default}


class MixedDevices(RuntimeError):
    """An operation was given tensors of both devices."""


class SecondTensor(torch.Tensor):
    """A tensor of the second device; `host` has its numbers."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> SecondTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=DEVICE,
        )

    def __init__(self, host: torch.Tensor) -> None:
        self.host = host

    def __repr__(self, **_: Any) -> str:
        return f"SecondTensor({self.host!r})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Torch's protocol of tensors made of others."""
        return ["host"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> SecondTensor:
        return SecondTensor(parts["host"])

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(op, args, kwargs or {})


def _compute(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation on the tensors' numbers; its results are on the device where CUDA would have them."""
    if "has_compatible_shallow_copy" in str(op):
        return False
    leaves = tree_leaves((args, kwargs))
    _refuse_mixed(op, leaves)
    lands_here = _lands_here(op, args, kwargs, leaves)
    host_kwargs = tree_map(_on_host, kwargs)
    host_kwargs.pop("pin_memory", None)
    result = op(*tree_map(_on_host, args), **host_kwargs)
    if _writes_to_first(op) and isinstance(args[0], torch.Tensor):
        return args[0]
    if op is _aten._local_scalar_dense.default or not lands_here:
        return result
    return tree_map(_on_second, result)


def _refuse_mixed(op: Any, leaves: list[Any]) -> None:
    foreign = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.device == CPU and leaf.dim()]
    if foreign and op not in _CROSSING:
        shapes = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in foreign)
        raise MixedDevices(f"{op}: {shapes} of the CPU among tensors of the second device")


def _lands_here(op: Any, args: Any, kwargs: dict[str, Any], leaves: list[Any]) -> bool:
    """Whether the results are on the second device: the device that was asked for, else that of the tensors."""
    asked = kwargs.get("device")
    for leaf in leaves:
        if asked is None and isinstance(leaf, torch.device):
            asked = leaf
    if asked is not None:
        return torch.device(asked).type == NAME
    return op is not _aten.copy_.default or isinstance(args[0], SecondTensor)


def _writes_to_first(op: Any) -> bool:
    arguments = op._schema.arguments
    return bool(op._schema.is_mutable and arguments and arguments[0].is_write)


def _on_host(value: Any) -> Any:
    if isinstance(value, SecondTensor):
        return value.host
    if isinstance(value, torch.device):
        return CPU
    return value


def _on_second(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return SecondTensor(value)
    return value


_fallback = torch.library.Library("_", "IMPL")
_fallback.fallback(lambda op, *args, **kwargs: _compute(op, args, kwargs), "PrivateUse1")
