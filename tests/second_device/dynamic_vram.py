"""ComfyUI's dynamic VRAM on the second device: ComfyUI 0.33's own patcher, layers and casts, with the part of
comfy-aimdo that needs a GPU's driver stood in for.

A weight has its page on the device only while a layer computes with it: as soon as the layer has let go of it, the page
leaves, which a GPU's may at any time, and its bytes become NaN. What autograd kept of a weight is NaN then. Host memory
is never pinned. `reads` names each model file that was read, in order.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
from typing import Any

import torch

from .memory import on_device, on_host
from .streams import NOT_YET

LEAST = 16 * 1024 + 1  # bytes: ComfyUI pages larger modules, and all of these models' are to be paged

reads: list[str] = []
_faults = itertools.count(1)


class Pages:
    """Stands for comfy_aimdo.model_vbar.ModelVBAR: the pages of one model."""

    def __init__(self, size: int, device: int, pageout_callback: Any = None) -> None:
        self._allocated = 0
        self._resident: dict[int, torch.Tensor] = {}
        self._holds: dict[int, int] = {}

    def alloc(self, size: int) -> tuple[Pages, int, int]:
        """A place for so many bytes."""
        place = (self, self._allocated, size)
        self._allocated += size
        return place

    def fault(self, place: int, size: int) -> bytes:
        """Brings a page to the device, without contents, and holds it; its signature is the same while it stays."""
        if place not in self._resident:
            self._resident[place] = on_device(torch.full((size,), NOT_YET, dtype=torch.uint8))
        self._holds[place] = self._holds.get(place, 0) + 1
        return next(_faults).to_bytes(8, "little")

    def unpin(self, place: int, size: int) -> None:
        """Lets go of a page; it leaves with the last hold."""
        if place not in self._resident:
            return  # ComfyUI lets go of pages that nothing holds too
        self._holds[place] -= 1
        if not self._holds[place]:
            on_host(self._resident.pop(place)).fill_(NOT_YET)

    def tensor(self, place: int) -> torch.Tensor:
        """The bytes of a page."""
        return self._resident[place]

    def loaded_size(self) -> int:
        """Bytes on the device."""
        return sum(page.numel() for page in self._resident.values())

    def free_memory(self, size: float) -> int:
        """Frees nothing: what may leave has left."""
        return 0

    def prioritize(self, *_: Any) -> None:
        """All pages leave alike."""


class HostBuffer:
    """Stands for comfy_aimdo.host_buffer.HostBuffer: there is no pinned memory."""

    size = 0

    def __init__(self, *_: Any) -> None:
        """It never holds anything."""

    def extend(self, *_: Any, **__: Any) -> int:
        """Refuses, as a system does that has no more memory to pin."""
        raise RuntimeError("the test bed pins no memory")

    def truncate(self, *_: Any, **__: Any) -> None:
        """Nothing is in it."""


class File:
    """Stands for comfy_aimdo.model_mmap.ModelMMAP: a model's file in memory."""

    def __init__(self, path: str) -> None:
        reads.append(os.fspath(path))
        with open(path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._first = ctypes.c_ubyte.from_buffer(self._map)

    def get(self) -> int:
        """The address of the file's first byte."""
        return ctypes.addressof(self._first)

    def get_file_handle(self) -> File:
        """What `read_file_to_device` takes."""
        return self

    def bounce(self) -> bool:
        """The pages of a file that is mapped need no care."""
        return True


def _read_file_to_device(file: File, offset: int, size: int, stream: int, place: int, *_: Any, **__: Any) -> None:
    ctypes.memmove(place, file.get() + offset, size)


def _fault(place: tuple[Pages, int, int]) -> bytes:
    pages, *where = place
    return pages.fault(*where)


def _unpin(place: tuple[Pages, int, int] | None) -> None:
    if place is not None:
        pages, *where = place
        pages.unpin(*where)


def switch_on(device: torch.device) -> None:
    """ComfyUI loads models on the device with dynamic VRAM from now on. RuntimeError if this ComfyUI has none."""
    import comfy.memory_management
    import comfy.model_management
    import comfy.model_patcher

    kind = getattr(comfy.model_patcher, "ModelPatcherDynamic", None)
    if kind is None:
        raise RuntimeError("GRAFT_TEST_DYNAMIC needs a ComfyUI with dynamic VRAM: name one in GRAFT_TEST_COMFYUI.")
    import comfy_aimdo.host_buffer
    import comfy_aimdo.model_mmap
    import comfy_aimdo.model_vbar
    import comfy_aimdo.torch

    comfy_aimdo.host_buffer.HostBuffer = HostBuffer
    comfy_aimdo.host_buffer.read_file_to_device = _read_file_to_device
    comfy_aimdo.model_mmap.ModelMMAP = File
    comfy_aimdo.model_vbar.ModelVBAR = Pages
    comfy_aimdo.model_vbar.vbar_fault = _fault
    comfy_aimdo.model_vbar.vbar_unpin = _unpin
    comfy_aimdo.model_vbar.vbar_signature_compare = lambda one, other: one is not None and one == other
    comfy_aimdo.torch.aimdo_to_tensor = lambda place, _: place[0].tensor(place[1])
    comfy.model_patcher.CoreModelPatcher = kind
    comfy.memory_management.aimdo_enabled = True
    comfy.model_management.text_encoder_device = lambda: device
    load_list = kind._load_list

    def every_module(self: Any, *args: Any, **options: Any) -> list[tuple[Any, ...]]:
        entries = load_list(self, *args, **options)
        return [(*entry[:-4], max(entry[-4], LEAST), *entry[-3:]) for entry in entries]

    kind._load_list = every_module
