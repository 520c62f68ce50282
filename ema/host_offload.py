"""Keeps a weight average in host memory: weights are copied while training runs, and averaged on a host thread.

On CUDA the copy uses pinned memory and a stream of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

from ..patches.core.host_memory import empty_on_host, has_streams
from .update import average_, check_pairs


class Lane(Protocol):
    """Copies weights to the host. `staging` holds them there, in the device's float types, and is allocated once."""

    staging: dict[str, Tensor]
    note: str

    def fetch(self, weights: Mapping[str, Tensor]) -> None:
        """Begin to copy the weights into `staging`, after the work already queued on the device; may return at once.

        Args:
            weights: by name, of the shapes that the lane was opened for.
        """

    def protect(self) -> None:
        """Make later work on the device wait until the copy has read the weights. Does not block the host."""

    def wait(self) -> None:
        """Block this thread until `staging` holds the weights. Only called on the averaging thread."""


class CudaLane:
    """Pinned staging, a side stream and an event; the training stream keeps running during the copy."""

    note = ""

    def __init__(self, weights: Mapping[str, Tensor], device: torch.device) -> None:
        self.device = device
        self.staging = {name: empty_on_host(w.detach(), device) for name, w in weights.items()}
        self.streams: Any = getattr(torch, device.type)
        self.side = self.streams.Stream(device)
        self.event = self.streams.Event()

    def fetch(self, weights: Mapping[str, Tensor]) -> None:
        """See Lane.

        Args:
            weights: by name, of the shapes that the lane was opened for.
        """
        self.side.wait_stream(self.streams.current_stream(self.device))
        with torch.no_grad(), self.streams.stream(self.side):
            for name, tensor in self.staging.items():
                tensor.copy_(weights[name], non_blocking=True)
            self.event.record(self.side)

    def protect(self) -> None:
        """See Lane."""
        self.streams.current_stream(self.device).wait_event(self.event)

    def wait(self) -> None:
        """See Lane."""
        self.event.synchronize()


class PlainLane:
    """Plain staging and blocking copies, for devices that have no pinned memory or side streams (MPS)."""

    def __init__(self, weights: Mapping[str, Tensor], device: torch.device) -> None:
        self.note = offload_note(device)
        self.staging = {name: torch.empty_like(w, device="cpu", requires_grad=False) for name, w in weights.items()}

    def fetch(self, weights: Mapping[str, Tensor]) -> None:
        """See Lane.

        Args:
            weights: by name, of the shapes that the lane was opened for.
        """
        with torch.no_grad():
            for name, tensor in self.staging.items():
                tensor.copy_(weights[name])

    def protect(self) -> None:
        """The copy was done when `fetch` returned."""

    def wait(self) -> None:
        """The copy was done when `fetch` returned."""


def open_lane(weights: Mapping[str, Tensor], device: torch.device) -> Lane | None:
    """A lane to the host's memory.

    Args:
        weights: by name; the lane has memory for them.
        device: where they are.

    Returns:
        None if they are in host memory already.
    """
    if device.type == "cpu":
        return None
    if has_streams(device):
        return CudaLane(weights, device)
    return PlainLane(weights, device)


def offload_note(device: torch.device) -> str:
    """A note for the report about keeping the average in host memory when training on `device`.

    It is empty if the average is updated in parallel with the steps.
    """
    if has_streams(device):
        return ""
    if device.type == "cpu":
        return "the average is in host memory, as the weights are: device host changes nothing on a CPU"
    return f"the average is copied to host memory without pinning, which {device.type} does not have"


class Offload:
    """Updates an average in host memory after each step without blocking the step.

    At most one copy and one update run at a time. A step calls `protect` before it changes the weights and `take`
    after. `take` waits only if the previous update is still running; `finish` waits for it and raises any error from
    the averaging thread. Only that thread reads or writes the average in between.
    """

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._thread = ThreadPoolExecutor(1, "graft-average")
        self._pending: Future[None] | None = None

    def take(self, average: Mapping[str, Tensor], weights: Mapping[str, Tensor], decay: float) -> None:
        """Begin to move an average by 1 - decay toward the current weights. Returns once the copy has begun.

        Args:
            average: float32 in host memory, by name; it changes in place.
            weights: by name, on the device.
            decay: from 0 (copies the weights) to 1 (changes nothing).

        Raises:
            ValueError: where names or shapes differ; and what the update before this one has raised.
        """
        check_pairs(average, weights)
        self.finish()  # the staging is free, and the averages move in order
        self.lane.fetch(weights)
        self._pending = self._thread.submit(self._move, average, decay)

    def protect(self) -> None:
        """Call before the weights change."""
        if self._pending is not None:
            self.lane.protect()

    def finish(self) -> None:
        """Wait until the average includes every update."""
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
        self.lane.wait()
        average_(average, self.lane.staging, decay)
