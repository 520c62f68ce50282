"""Offloading to host memory: optimizer state between steps, activations until the backward pass, and weights."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn

from ...patches.core.host_memory import bytes_on_host, empty_on_host, has_streams, shape_like, upload
from ...patches.core.slots import Slot, SlotKey, is_made_of_others, slots, stored_tensors, swap_all
from .saved_tensors import KeptTensor, storage_address

SMALL = 1 << 16  # bytes: copying smaller tensors costs more than it saves


def is_on_device(tensor: Tensor) -> bool:
    """Whether a tensor is in device memory, which is scarce."""
    return tensor.device.type != "cpu"


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor from host memory on `device`; to CUDA through pinned memory, without waiting for the copy."""
    dtype = dtype or tensor.dtype
    if has_streams(device) and tensor.device.type == "cpu":
        return upload(tensor, device).to(dtype)
    return tensor.to(device, dtype)


class Parking:
    """Keeps optimizer states in host memory between steps.

    Copies run in the device's own order; `wait` before the host reads.
    """

    def __init__(self) -> None:
        self._places: dict[tuple[int, str], Tensor] = {}
        self._waiting: set[torch.device] = set()

    def park(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the state to host memory, which is allocated once for each tensor."""
        for parameter, state in optimizer.state.items():
            for slot, value in state.items():
                if isinstance(value, Tensor) and value.ndim and is_on_device(value):
                    key = id(parameter), slot
                    if key not in self._places:
                        self._places[key] = empty_on_host(value)
                    self._waiting.add(value.device)
                    state[slot] = self._places[key].copy_(value, non_blocking=True)

    def fetch(self, optimizer: torch.optim.Optimizer, devices: Sequence[torch.device]) -> None:
        """Brings parked state back to the parameters' devices; `devices` are listed in the order of the optimizer's
        groups.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter, device in zip(parameters, devices, strict=True):
            state = optimizer.state.get(parameter, {})
            for slot, value in state.items():
                parked = self._places.get((id(parameter), slot))
                if parked is not None and parked is value:
                    state[slot] = torch.empty_like(parked, device=device).copy_(parked, non_blocking=True)

    def wait(self) -> None:
        """Waits until every copy to host memory is done."""
        for device in self._waiting:
            if has_streams(device):
                getattr(torch, device.type).synchronize(device)
        self._waiting.clear()


class HostPlaces:
    """Host memory for tensors of a device, which is taken again and again. All copies from and to it are in the order
    of one stream.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, like: Tensor) -> Tensor:
        """The smallest free place that has room for a tensor, as uint8; where all are smaller, a new one in place of
        the largest.
        """
        fitting = [place for place in self._free if place.nbytes >= like.nbytes]
        if not fitting and self._free:
            _remove(self._free, max(self._free, key=_size))
        if not fitting:
            return bytes_on_host(like.nbytes, like.device)
        return _remove(self._free, min(fitting, key=_size))

    def give_back(self, place: Tensor) -> None:
        """Copies that are queued later may use it."""
        self._free.append(place)


def _size(place: Tensor) -> int:
    return place.nbytes


def _remove(places: list[Tensor], place: Tensor) -> Tensor:
    return places.pop(next(number for number, one in enumerate(places) if one is place))


class _OnHost:
    """A copy of a device's tensor in host memory. It comes back as it lay: another layout may give other last bits."""

    def __init__(self, tensor: Tensor, places: HostPlaces) -> None:
        self._device, self._shape = tensor.device, tensor.shape
        for dimension, stride in enumerate(tensor.stride()):
            if stride == 0:  # expanded: the same numbers again and again
                tensor = tensor.narrow(dimension, 0, 1)
        self._strides = tensor.stride()
        if has_streams(self._device):
            place = places.take(tensor)
            finalize(self, places.give_back, place).atexit = False
            host = shape_like(place, tensor)
        else:
            host = empty_on_host(tensor)
        self._host = host.copy_(tensor, non_blocking=True)

    def value(self) -> Tensor:
        """The tensor on its device again."""
        host = self._host
        back = torch.empty_strided(host.shape, self._strides, dtype=host.dtype, device=self._device)
        return back.copy_(host, non_blocking=True).expand(self._shape)


@contextmanager
def activations_on_host(module: nn.Module) -> Iterator[None]:
    """For the block what autograd keeps of the forward passes is in host memory until the backward pass asks for it.

    Parameters and buffers of `module`, which stay where they are anyway, quantized weights and small tensors are kept
    as they are.
    """

    def pack(tensor: Tensor) -> Any:
        if not weight_storages:  # at the first use: by then the trained tensors are in the module
            for weight in (*module.parameters(), *module.buffers()):
                weight_storages.update(map(storage_address, stored_tensors(weight)))
        if is_made_of_others(tensor) or tensor.nbytes < SMALL or not is_on_device(tensor):
            return KeptTensor(tensor.detach())
        if storage_address(tensor) in weight_storages:
            return KeptTensor(tensor.detach())
        return _OnHost(tensor, places)

    def unpack(packed: Any) -> Tensor:
        return packed.value()

    weight_storages: set[int] = set()
    places = HostPlaces()
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def is_on_other_device(tensor: Tensor, device: torch.device) -> bool:
    """Whether a layer's tensor must be copied to `device` before the layer computes."""
    return tensor.device != device


@contextmanager
def weights_on(parts: Sequence[nn.Module], device: torch.device, staying: Container[SlotKey] = ()) -> Iterator[None]:
    """A context in which the weights and buffers of `parts` are on `device`, except those in the slots of `staying`;
    the original tensors are back afterwards.
    """
    found = slots_elsewhere(parts, device, staying)
    with hold_copies(found, copies_on(device, (slot.tensor for slot in found))):
        yield


def slots_elsewhere(parts: Iterable[nn.Module], device: torch.device, staying: Container[SlotKey] = ()) -> list[Slot]:
    """The slots of `parts` whose weights or buffers are not on `device`, except those of `staying`."""
    return [slot for slot in slots(parts) if slot.key not in staying and is_on_other_device(slot.tensor, device)]


def copies_on(device: torch.device, tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """Frozen copies on `device` of tensors, by the id of the original."""
    copies: dict[int, Tensor] = {}
    for tensor in tensors:
        if id(tensor) in copies:
            continue
        copied = tensor.detach().to(device, non_blocking=True)
        if isinstance(tensor, nn.Parameter):
            copied = nn.Parameter(copied, requires_grad=False)
        copies[id(tensor)] = copied
    return copies


def hold_copies(found: Iterable[Slot], copies: Mapping[int, Tensor]) -> AbstractContextManager[None]:
    """A context in which slots hold the copies of what is in them; the originals are back afterwards."""
    return swap_all(found, lambda slot: copies[id(slot.tensor)])
