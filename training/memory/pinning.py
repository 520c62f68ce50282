"""Pins host memory where it lies, so that a device copies from it while it computes.

PyTorch's `pin_memory` would make a second copy, and its allocator rounds each tensor up to a power of two.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ...ema.host_offload import has_streams
from ...patches.core.slots import stored_tensors
from .offload import SMALL

PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device


class Pins:
    """The host memory that is pinned for copies to `device`, each tensor's once. `missing` counts the bytes that are
    not, because the device or the system refuses.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._runtime: Any = None
        if has_streams(device) and hasattr(getattr(torch, device.type), "cudart"):
            self._runtime = getattr(torch, device.type).cudart()
        self._storages: dict[int, torch.UntypedStorage] = {}  # by the address that was pinned: it must not be freed
        self.missing = 0

    def pin(self, tensors: Iterable[Tensor]) -> None:
        """Pin what is in ordinary host memory. Small tensors are left: their copies are not waited for anyway."""
        if not has_streams(self._device):
            return
        for tensor in tensors:
            for part in stored_tensors(tensor):
                if part.device.type == "cpu" and part.nbytes >= SMALL and not part.is_pinned():
                    self._pin(part)

    @property
    def note(self) -> str:
        """A sentence for the report about memory that is not pinned; empty without."""
        if not self.missing:
            return ""
        return (
            f"offload to CPU memory: {self.missing / 2**30:.1f} GB of the layers could not be pinned, so steps wait for"
            " their copies"
        )

    def _pin(self, tensor: Tensor) -> None:
        if self._runtime is None or not tensor.is_contiguous():
            self.missing += tensor.nbytes
            return
        address = tensor.data_ptr()
        if int(self._runtime.cudaHostRegister(address, tensor.nbytes, PORTABLE)) == 0:
            self._storages[address] = tensor.untyped_storage()
            return
        self.missing += tensor.nbytes
        self._runtime = None  # what is left would be refused, too
        _forget_error(self._device)

    def release(self) -> None:
        """The memory is as before. Every copy from it must have ended."""
        if not self._storages:
            return
        runtime = getattr(torch, self._device.type).cudart()
        for address in self._storages:
            if int(runtime.cudaHostUnregister(address)) != 0:
                _forget_error(self._device)
        self._storages.clear()


def _forget_error(device: torch.device) -> None:
    """CUDA names what it has refused once more, at the next operation."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device).add_(1)
        getattr(torch, device.type).synchronize(device)
