"""What the second device counts: bytes over the bus, waits of the host, and memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

import torch

HERE = os.path.dirname(os.path.abspath(__file__))
TORCH = os.path.dirname(os.path.abspath(torch.__file__))
PYTHON = os.path.dirname(os.path.abspath(os.__file__))


@dataclass
class Meter:
    """Counters since the last `clear`, and the memory in use.

    `synchronizations` has an entry for each time that the host waited for results of the device (`.item()`, `.cpu()`,
    `bool()`, boolean indexing, `synchronize()`): what it was and the line that asked. `blocking_uploads` has one for
    each copy to the device without non_blocking, after which CUDA waits too. `limit` is the size of the memory.
    With `lacks_float64` tensors of that type are refused, as MPS does.
    """

    synchronizations: list[str] = field(default_factory=list)
    blocking_uploads: list[str] = field(default_factory=list)
    uploaded: int = 0
    downloaded: int = 0
    allocated: int = 0
    peak: int = 0
    limit: int | None = None
    lacks_float64: bool = False

    def clear(self) -> None:
        """Count from zero again; memory in use stays."""
        self.synchronizations, self.blocking_uploads = [], []
        self.uploaded = self.downloaded = 0
        self.peak = self.allocated

    def take(self, size: int) -> None:
        """Allocate; raises torch.OutOfMemoryError above the limit."""
        if self.limit is not None and self.allocated + size > self.limit:
            raise torch.OutOfMemoryError(
                f"The second device is out of memory: {size} bytes were asked for, {self.allocated} of {self.limit} are"
                " in use."
            )
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def blocked(self, what: str) -> None:
        """The host has waited for a copy to the device."""
        self.blocking_uploads.append(f"{what} at {caller()}")

    def give_back(self, size: int) -> None:
        """Free."""
        self.allocated -= size

    def waited(self, what: str) -> None:
        """The host has waited for the device."""
        self.synchronizations.append(f"{what} at {caller()}")

    @contextmanager
    def limited(self, size: int) -> Iterator[None]:
        """A context in which the device has `size` bytes more than are in use now."""
        before, self.limit = self.limit, self.allocated + size
        try:
            yield
        finally:
            self.limit = before


def caller() -> str:
    """The innermost line outside of torch, Python's library and this folder."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_inner(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "torch's own thread"
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_inner(file: str) -> bool:
    folder, name = os.path.split(file)
    if folder == HERE:
        return not name.startswith(("test_", "train_"))
    return file.startswith((TORCH, PYTHON, "<"))


meter = Meter()
