"""Pins the weights of layers where they lie, so that a device copies from them while it computes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ...patches.core.host_memory import has_streams, pinned
from ...patches.core.slots import stored_tensors
from .offload import SMALL


class Pins:
    """The host memory that is pinned for copies to `device`, each tensor's once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: dict[int, torch.UntypedStorage] = {}  # by the address that was pinned: it must not be freed

    def pin(self, tensors: Iterable[Tensor]) -> None:
        """Pin what is in ordinary host memory. Small tensors are left: their copies are not waited for anyway."""
        if not has_streams(self._device):
            return
        for tensor in tensors:
            for part in stored_tensors(tensor):
                if part.device.type == "cpu" and part.nbytes >= SMALL and not part.is_pinned():
                    self._pin(part)

    def _pin(self, tensor: Tensor) -> None:
        if not tensor.is_contiguous():
            pinned.missing += tensor.nbytes
        elif pinned.register(tensor.data_ptr(), tensor.nbytes, self._device):
            self._storages[tensor.data_ptr()] = tensor.untyped_storage()

    def release(self) -> None:
        """The memory is as before. Every copy from it must have ended."""
        for address in self._storages:
            pinned.unregister(address, self._device)
        self._storages.clear()
