"""Autocast on the second device: the operations that CUDA's autocast casts, as far as models use them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .memory import NAME, is_on_device

_KEY = "AutocastPrivateUse1"
_LOWER = (
    "matmul",
    "mm",
    "bmm",
    "addmm",
    "addbmm",
    "baddbmm",
    "linear",
    "conv1d",
    "conv2d",
    "conv3d",
    "scaled_dot_product_attention",
)
_FLOAT32 = (
    "layer_norm",
    "group_norm",
    "softmax.int",
    "log_softmax.int",
    "mse_loss",
    "exp",
    "log",
    "pow.Tensor_Scalar",
    "rsqrt",
    "cumsum",
    "norm.Scalar",
    "norm.ScalarOpt_dim",
)
_WIDEST = ("cat", "stack", "addcmul", "addcdiv", "bilinear", "dot")


def register() -> list[Any]:
    """Register the casts; they last as long as the libraries that this returns."""
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, _KEY)  # other operations take their tensors as they are
    aten = torch.library.Library("aten", "IMPL")
    for names, dtype_for in ((_LOWER, _lower), (_FLOAT32, _float32), (_WIDEST, _widest)):
        for name in names:
            aten.impl(name, _cast_kernel(_overload(name), dtype_for), _KEY)
    return [everything, aten]


def _overload(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _lower(tensors: list[Tensor]) -> torch.dtype:
    return torch.get_autocast_dtype(NAME)


def _float32(tensors: list[Tensor]) -> torch.dtype:
    return torch.float32


def _widest(tensors: list[Tensor]) -> torch.dtype:
    widest = torch.get_autocast_dtype(NAME)
    for tensor in tensors:
        widest = torch.promote_types(widest, tensor.dtype)
    return widest


def _cast_kernel(op: Any, dtype_for: Any) -> Any:
    """An operation that casts its floating point tensors first."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if _is_cast(leaf)]
        dtype = dtype_for(tensors)

        def cast(value: Any) -> Any:
            if _is_cast(value):
                return value.to(dtype)
            return value

        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))):
            return op(*tree_map(cast, args), **tree_map(cast, kwargs))

    return kernel


def _is_cast(value: Any) -> bool:
    return is_on_device(value) and value.is_floating_point() and value.dtype != torch.float64
