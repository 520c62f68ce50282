"""A weight average in host memory: weights are copied beside the training (CUDA streams, pinned memory), the lerp runs
on a host thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from .update import average_, check_pairs


class Lane(Protocol):
    """How weights come to the host. `staging` holds them there, float by float as they are on the device, and is
    allocated once.
    """

    staging: dict[str, Tensor]
    note: str

    def fetch(self, weights: Mapping[str, Tensor]) -> None:
        """Begin to copy the weights into `staging`, behind the work that the device was given before; may return at
        once.
        """

    def protect(self) -> None:
        """Let the work that the device is given from now on wait until the copy has read the weights. Does not block
        the host.
        """

    def landed(self) -> None:
        """Block this thread until `staging` holds the weights. Called on the averaging thread only."""


class CudaLane:
    """Pinned staging, a side stream and an event; the training stream goes on while the copy runs."""

    note = ""

    def __init__(self, weights: Mapping[str, Tensor], device: torch.device) -> None:
        self.device = device
        self.staging = {
            name: torch.empty_like(w, device="cpu", pin_memory=True, requires_grad=False) for name, w in weights.items()
        }
        self.side = torch.cuda.Stream(device)
        self.event = torch.cuda.Event()

    def fetch(self, weights: Mapping[str, Tensor]) -> None:
        """See Lane."""
        self.side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.no_grad(), torch.cuda.stream(self.side):
            for name, tensor in self.staging.items():
                tensor.copy_(weights[name], non_blocking=True)
            self.event.record(self.side)

    def protect(self) -> None:
        """See Lane."""
        torch.cuda.current_stream(self.device).wait_event(self.event)

    def landed(self) -> None:
        """See Lane."""
        self.event.synchronize()


class PlainLane:
    """Plain staging and blocking copies, for devices that have no pinned memory or side streams (MPS)."""

    def __init__(self, weights: Mapping[str, Tensor], device: torch.device) -> None:
        self.note = note_on(device)
        self.staging = {name: torch.empty_like(w, device="cpu", requires_grad=False) for name, w in weights.items()}

    def fetch(self, weights: Mapping[str, Tensor]) -> None:
        """See Lane."""
        with torch.no_grad():
            for name, tensor in self.staging.items():
                tensor.copy_(weights[name])

    def protect(self) -> None:
        """The copy has ended before `fetch` returned."""

    def landed(self) -> None:
        """The copy has ended before `fetch` returned."""


def lane_for(weights: Mapping[str, Tensor], device: torch.device) -> Lane | None:
    """The way from `device` to the host; None where the weights are in host memory already."""
    if device.type == "cpu":
        return None
    if device.type == "cuda":
        return CudaLane(weights, device)
    return PlainLane(weights, device)


def note_on(device: torch.device) -> str:
    """What there is to say about an average in host memory when training on `device`; empty where it runs beside the
    steps.
    """
    if device.type == "cuda":
        return ""
    if device.type == "cpu":
        return "the average is in host memory, as the weights are: device host changes nothing on a CPU"
    return f"the average is copied to host memory without pinning, which {device.type} does not have"


class Offload:
    """Moves an average in host memory after each step without holding the step up: at most one copy and one lerp are
    under way.

    A step calls `protect` before it changes the weights and `take` after. `take` waits only when the lerp before has
    not ended; `finish` waits for it, and raises what went wrong on the averaging thread. Nothing but that thread reads
    or writes the average in between.
    """

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._thread = ThreadPoolExecutor(1, "graft-average")
        self._pending: Future[None] | None = None

    def take(self, average: Mapping[str, Tensor], weights: Mapping[str, Tensor], decay: float) -> None:
        """Begin to move `average` towards the weights as they are now."""
        check_pairs(average, weights)
        self.finish()  # the staging is free, and the averages move in order
        self.lane.fetch(weights)
        self._pending = self._thread.submit(self._move, average, decay)

    def protect(self) -> None:
        """Call before the weights change."""
        if self._pending is not None:
            self.lane.protect()

    def finish(self) -> None:
        """Wait until the average has taken in everything."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Finish and end the thread."""
        try:
            self.finish()
        finally:
            self._thread.shutdown()

    def _move(self, average: Mapping[str, Tensor], decay: float) -> None:
        self.lane.landed()
        average_(average, self.lane.staging, decay)
