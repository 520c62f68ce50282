"""`torch.second`: what torch.cuda is to CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch

from . import memory, streams
from .meter import meter

SIZE = 8 << 30  # what is said where no limit is set


class Generator(torch._C.Generator):
    """A generator that belongs to a device: torch cannot make one of a device in Python."""

    _device: torch.device

    def __new__(cls, device: Any = "cpu") -> Generator:
        generator = super().__new__(cls, "cpu")
        generator._device = torch.device(device)
        _generators[generator._cdata] = generator
        return generator

    def __init__(self, device: Any = "cpu") -> None:
        """All is done."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device whose numbers it draws."""
        return self._device


_generators: WeakValueDictionary[int, Generator] = WeakValueDictionary()


def device_of(generator: torch._C.Generator) -> torch.device:
    """The device of a generator as an operation gets it: another object around the same numbers."""
    return _generators.get(generator._cdata, generator).device


class SecondModule:
    """Functions of the device, by the names that torch.cuda has for them."""

    Stream = streams.Stream
    Event = streams.Event
    OutOfMemoryError = torch.OutOfMemoryError
    current_stream = staticmethod(streams.current_stream)
    stream = staticmethod(streams.stream)
    cudart = memory.Runtime
    default_generators: tuple[torch.Generator, ...] = ()

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def set_device(device: Any) -> None:
        """There is one."""

    @staticmethod
    @contextmanager
    def device(device: Any) -> Iterator[None]:
        """There is one."""
        yield

    @staticmethod
    def default_stream(device: Any = None) -> streams.Stream:
        return streams.DEFAULT

    @staticmethod
    def synchronize(device: Any = None) -> None:
        meter.waited("synchronize")
        streams.host_waits_for_all()

    # numbers

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @staticmethod
    def is_bf16_supported() -> bool:
        return True

    @staticmethod
    def manual_seed(seed: int) -> None:
        SecondModule.default_generators[0].manual_seed(seed)

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        SecondModule.default_generators[0].manual_seed(seed)

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        return SecondModule.default_generators[0].get_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        SecondModule.default_generators[0].set_state(state)

    # memory

    @staticmethod
    def memory_allocated(device: Any = None) -> int:
        return meter.allocated

    @staticmethod
    def max_memory_allocated(device: Any = None) -> int:
        return meter.peak

    @staticmethod
    def reset_peak_memory_stats(device: Any = None) -> None:
        meter.peak = meter.allocated

    @staticmethod
    def memory_reserved(device: Any = None) -> int:
        return meter.allocated

    @staticmethod
    def mem_get_info(device: Any = None) -> tuple[int, int]:
        size = meter.limit or SIZE
        return size - meter.allocated, size

    @staticmethod
    def empty_cache() -> None:
        """Nothing is kept."""
