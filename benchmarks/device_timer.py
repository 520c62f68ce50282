"""Seconds and peak memory of work on a device: a GPU returns from a call before its work is done."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

MB = 1 << 20


def wait(device: torch.device) -> None:
    """Block until the device has done what was queued on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


class Timer:
    """Measures work on one device.

    `seconds` is what somebody waits for it: the clock, read while the device is idle. `device_seconds` is what the
    device spends on it, from CUDA's events; work that is queued in microseconds is measured by these. Elsewhere both
    are the same.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self.device, self.clock = device, clock

    def seconds(self, work: Callable[[], Any]) -> float:
        """Seconds until the work is done on the device."""
        wait(self.device)
        start = self.clock()
        work()
        wait(self.device)
        return self.clock() - start

    def device_seconds(self, work: Callable[[], Any]) -> float:
        """Seconds that the device spends on the work."""
        if self.device.type != "cuda":
            return self.seconds(work)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(self.device)
        first.record(stream)
        work()
        last.record(stream)
        last.synchronize()
        return first.elapsed_time(last) / 1000


def reset_peak(device: torch.device) -> None:
    """Begin to count the peak again, where a device can: on CUDA."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_mb(device: torch.device) -> float:
    """The most memory in MB: of the device since `reset_peak` on CUDA, else of this process since it began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MB
    import resource  # Unix only

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (MB if sys.platform == "darwin" else 1024)
