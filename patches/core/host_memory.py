"""Host memory that a device copies from and to while it computes: pinned within a budget, and given back.

Memory is pinned where it lies. PyTorch's own pinned memory is rounded up to powers of two and stays taken until the
process ends, and when the system refuses it PyTorch reports CUDA as out of memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device
PAGE = 4096  # bytes: two pieces of pinned memory share no page


def has_streams(device: torch.device) -> bool:
    """Whether a device copies to pinned memory while it computes, in streams as CUDA's.

    MPS has streams since torch 2.15, but shares its memory with the host and pins none.
    """
    return device.type not in ("cpu", "mps") and hasattr(getattr(torch, device.type, None), "Stream")


class PinnedMemory:
    """What this process has pinned through here. `limit` is how many bytes it may pin (None: what the system gives),
    `missing` how many bytes were not pinned since `begin_anew`, as that was too little or the system refused.
    """

    def __init__(self) -> None:
        self.limit: int | None = None
        self.missing = self.used = 0
        self._sizes: dict[int, int] = {}  # by address
        self._was_refused = False  # and nothing was given back since
        self._lock = threading.RLock()  # memory is freed on any thread

    def register(self, address: int, size: int, device: torch.device) -> bool:
        """Pin memory where it lies, for copies to a device; returns whether it is."""
        with self._lock:
            runtime = _runtime(device)
            if runtime is None or not self._has_room(size):
                self.missing += size
                return False
            if int(runtime.cudaHostRegister(address, size, PORTABLE)) != 0:
                self.missing += size
                self._note_refusal(device)
                return False
            self._sizes[address] = size
            self.used += size
            return True

    def unregister(self, address: int, device: torch.device) -> None:
        """No longer pin memory. Every copy from and to it must have ended."""
        with self._lock:
            self.used -= self._sizes.pop(address)
            self._was_refused = False
            if int(_runtime(device).cudaHostUnregister(address)) != 0:
                _forget_error(device)

    def ask_torch(self, make: Callable[[], Tensor], size: int, device: torch.device) -> Tensor | None:
        """The tensor in pinned memory that PyTorch makes; None where there is no more."""
        if not self._has_room(size):
            return None
        try:
            return make()
        except RuntimeError:  # "CUDA error: out of memory", though it is the host's that there is no more of
            self._note_refusal(device)
            return None

    def begin_anew(self) -> None:
        """Count anew what could not be pinned, and ask the system again where it has refused."""
        self.missing, self._was_refused = 0, False

    @property
    def note(self) -> str:
        """A sentence for a report about memory that is not pinned; empty without, and where none is to be."""
        if not self.missing or self.limit == 0:
            return ""
        return (
            f"{self.missing / 2**30:.1f} GB of CPU memory could not be pinned, so steps wait for copies from and to it"
        )

    def _has_room(self, size: int) -> bool:
        return not self._was_refused and (self.limit is None or self.used + size <= self.limit)

    def _note_refusal(self, device: torch.device) -> None:
        self._was_refused = True
        _forget_error(device)


pinned = PinnedMemory()


def empty_on_host(like: Tensor, device: torch.device | None = None) -> Tensor:
    """Host memory for a tensor, as torch.empty_like gives it: pinned, while the budget allows, if a `device` (the
    tensor's, if None) copies from and to it beside its computations. It is pinned until the tensor ends.
    """
    device = device or like.device
    if not has_streams(device) or not like.nbytes:
        return torch.empty_like(like, device="cpu")
    return shape_like(bytes_on_host(like.nbytes, device), like)


def bytes_on_host(size: int, device: torch.device) -> Tensor:
    """`size` bytes of host memory as uint8, pinned for a device while the budget allows."""
    if _runtime(device) is None:
        made = pinned.ask_torch(lambda: torch.empty(size, dtype=torch.uint8, pin_memory=True), size, device)
        if made is not None:
            return made
        pinned.missing += size
        return torch.empty(size, dtype=torch.uint8)
    pages = -(-size // PAGE) * PAGE
    whole = torch.empty(pages + PAGE, dtype=torch.uint8)
    first = -whole.data_ptr() % PAGE
    place = whole[first : first + size]
    if pinned.register(place.data_ptr(), pages, device):
        finalize(whole.untyped_storage(), _give_back, place.data_ptr(), device).atexit = False
    return place


def shape_like(place: Tensor, like: Tensor) -> Tensor:
    """The tensor in the first bytes of `place` that has the shape, the type and the strides of torch.empty_like."""
    strides = torch.empty_like(like, device="meta").stride()
    return place[: like.nbytes].view(like.dtype).as_strided(like.shape, strides)


def pin_copy(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor in pinned memory, which PyTorch takes again and again; as it is where there is no more."""
    copy = pinned.ask_torch(tensor.pin_memory, tensor.nbytes, device)
    return tensor if copy is None else copy


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device, without waiting for its copy where memory can be pinned for it."""
    if has_streams(device) and tensor.device.type == "cpu":
        tensor = pin_copy(tensor, device)
    return tensor.to(device, non_blocking=True)


def _give_back(address: int, device: torch.device) -> None:
    getattr(torch, device.type).synchronize(device)
    pinned.unregister(address, device)


def _runtime(device: torch.device) -> Any:
    """What pins memory where it lies; None where a device has no such thing."""
    module = getattr(torch, device.type)
    if not hasattr(module, "cudart"):
        return None
    return module.cudart()


def _forget_error(device: torch.device) -> None:
    """CUDA names what it has refused once more, at the next operation."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device).add_(1)
        getattr(torch, device.type).synchronize(device)
