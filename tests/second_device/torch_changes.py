"""What torch has for CUDA alone, or for no device made in Python: changed in torch's Python part."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import _device_constructors

from .memory import NAME, is_on_device, is_pinned, pin
from .torch_module import Generator, SecondModule


def apply() -> None:
    """Change torch; there is no way back."""
    importlib.import_module("torch._dynamo")  # it looks for torch's own functions
    _device_constructors()  # torch remembers its own functions: those below call them
    torch.Generator = Generator  # type: ignore[misc]
    SecondModule.default_generators = (Generator(NAME),)
    _let_data_cross()
    _pin_memory()
    _copy_storages()


def _let_data_cross() -> None:
    """`tensor.data = other` keeps the tensor object where `other` is on the other device; so does Module.to."""
    own = torch.Tensor.data
    own_question = torch._has_compatible_shallow_copy_type

    def compatible(tensor: Tensor, other: Tensor) -> bool:
        return _crosses(tensor, other) or own_question(tensor, other)

    def set_data(tensor: Tensor, other: Tensor) -> None:
        if not _crosses(tensor, other):
            own.__set__(tensor, other)
            return
        moved, gradient = other.detach(), tensor.grad
        if tensor.requires_grad:
            moved.requires_grad_()
        torch._C._swap_tensor_impl(tensor, moved)
        if gradient is not None:  # torch refuses one on another device
            tensor.grad = gradient.to(other.device)

    torch.Tensor.data = property(own.__get__, set_data)  # type: ignore[assignment]
    torch._has_compatible_shallow_copy_type = compatible


def _crosses(tensor: Tensor, other: Tensor) -> bool:
    return is_on_device(tensor) != is_on_device(other)


def _pin_memory() -> None:
    """Pinned memory is ordinary memory that the device knows of."""
    own_empty = torch.empty
    own_is_pinned = torch.Tensor.is_pinned

    def empty(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        made = own_empty(*size, **options)
        if pin_memory:
            return pin(made)
        return made

    def pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
        if is_on_device(tensor):
            raise RuntimeError(f"cannot pin a tensor of {tensor.device}: only dense CPU tensors can be pinned")
        if is_pinned(tensor):
            return tensor
        return pin(tensor.clone())

    def asked(tensor: Tensor, device: Any = None) -> bool:
        return is_pinned(tensor) or own_is_pinned(tensor)

    torch.empty = empty  # type: ignore[assignment]
    torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign]
    torch.Tensor.is_pinned = asked  # type: ignore[method-assign]


def _copy_storages() -> None:
    """Storages of the device are copied through tensors, for copy.deepcopy."""
    own = torch.UntypedStorage.clone

    def clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        if storage.device.type != NAME:
            return own(storage)
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return whole.clone().untyped_storage()

    torch.UntypedStorage.clone = clone  # type: ignore[method-assign]
