"""Streams and events of the second device, and the order in which memory is used.

The device computes at once, but remembers what CUDA would have promised: work on one stream is done in its order, work
on two streams in no order unless one waits for the other, and the host knows only what it has waited for. Using memory
outside of that order raises OutOfOrder. A copy to pinned memory fills it only when the host has waited for it: until
then it holds bytes that are NaN.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from .meter import meter

NOT_YET = 0xFF  # in every byte, it makes NaN of each float type


class OutOfOrder(RuntimeError):
    """Memory was used before a copy or computation that it depends on has ended."""


_streams: WeakSet[Stream] = WeakSet()


class Mark(NamedTuple):
    """One piece of work: the stream that does it, and its number there."""

    stream: Stream
    number: int


class Stream:
    """A queue of work. `seen` says up to which number it waits for the work of other streams."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.queued = 0
        _streams.add(self)
        self.seen: dict[Stream, int] = {}
        self.freed: dict[Stream, int] = {}  # the last uses of memory that came from this stream and is free

    def take_back(self, uses: Uses) -> None:
        """Memory is free: work of this stream may take it again, in its own order. Another stream may still use it."""
        used = dict(uses.reads)
        if uses.write is not None:
            used[uses.write.stream] = max(uses.write.number, used.get(uses.write.stream, 0))
        for stream, number in used.items():
            self.freed[stream] = max(number, self.freed.get(stream, 0))

    def queue(self) -> Mark:
        """Put one piece of work into the queue."""
        self.queued += 1
        return Mark(self, self.queued)

    def position(self) -> dict[Stream, int]:
        """What is done when all work that is queued now is done."""
        return {**self.seen, self: self.queued}

    def see(self, position: Mapping[Stream, int]) -> None:
        """Let later work wait for a position."""
        for stream, number in position.items():
            self.seen[stream] = max(number, self.seen.get(stream, 0))

    def wait_stream(self, stream: Stream) -> None:
        """As torch.cuda.Stream.wait_stream."""
        self.see(stream.position())

    def wait_event(self, event: Event) -> None:
        """As torch.cuda.Stream.wait_event."""
        self.see(event.position)

    def record_event(self, event: Event | None = None) -> Event:
        """As torch.cuda.Stream.record_event."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait for all work that is queued now."""
        meter.waited("Stream.synchronize")
        host_waits(self.position())


class Event:
    """A point in a stream."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.position: dict[Stream, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        """As torch.cuda.Event.record."""
        self.position = (stream or current_stream()).position()

    def wait(self, stream: Stream | None = None) -> None:
        """As torch.cuda.Event.wait."""
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        """Whether the host has waited for it."""
        return all(number <= _host.seen.get(stream, 0) for stream, number in self.position.items())

    def synchronize(self) -> None:
        """Let the host wait for it."""
        if threading.current_thread() is threading.main_thread():
            meter.waited("Event.synchronize")
        host_waits(self.position)


DEFAULT = Stream()
_host = Stream()  # no queue of work: what the host has waited for
_current = threading.local()


def current_stream(device: Any = None) -> Stream:
    """The stream that this thread's work goes to."""
    return getattr(_current, "stream", DEFAULT)


@contextmanager
def stream(chosen: Stream | None) -> Iterator[None]:
    """A context in which this thread's work goes to a stream."""
    before = current_stream()
    _current.stream = chosen or before
    try:
        yield
    finally:
        _current.stream = before


# --- the order in which memory is used --------------------------------------------------------------------------------


class Uses:
    """The last write to a piece of memory, and what has read it since, by stream; of new memory, what it was before."""

    def __init__(self, before: Mapping[Stream, int]) -> None:
        self.write: Mark | None = None
        self.reads: dict[Stream, int] = dict(before)

    def read(self, mark: Mark, what: object) -> None:
        """Note a read; raises OutOfOrder if the last write may not be done by then."""
        if self.write is not None and not _before(self.write, mark.stream):
            raise OutOfOrder(f"{what} reads memory that another stream may still be writing")
        self.reads[mark.stream] = mark.number

    def wrote(self, mark: Mark, what: object) -> None:
        """Note a write; raises OutOfOrder if earlier uses may not be done by then."""
        if self.write is not None and not _before(self.write, mark.stream):
            raise OutOfOrder(f"{what} writes memory that another stream may still be writing")
        for reader, number in self.reads.items():
            if not _before(Mark(reader, number), mark.stream):
                raise OutOfOrder(f"{what} writes memory that another stream may still be reading")
        self.write, self.reads = mark, {}


def _before(mark: Mark, later: Stream) -> bool:
    """Whether a piece of work is surely done when work that is queued to `later` now begins."""
    if mark.stream is later:
        return True
    return max(later.seen.get(mark.stream, 0), _host.seen.get(mark.stream, 0)) >= mark.number


# --- copies that the host does not wait for ---------------------------------------------------------------------------


@dataclass
class _Copy:
    """A copy between pinned memory and the device that has not ended yet: `contents` are what it copies."""

    mark: Mark
    pinned: Tensor
    contents: Tensor
    to_host: bool

    def end(self) -> None:
        if self.to_host:
            self.pinned.copy_(self.contents)
        elif not torch.equal(_bytes(self.pinned), _bytes(self.contents)):
            raise OutOfOrder("pinned memory was changed before its copy to the device had ended")

    def overlaps(self, tensor: Tensor) -> bool:
        return self.pinned.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


_unfinished: list[_Copy] = []


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def begin_download(pinned: Tensor, contents: Tensor) -> None:
    """Copy to pinned memory without waiting: until the host waits, it holds no numbers."""
    mark = current_stream().queue()
    settle(pinned)
    _unfinished.append(_Copy(mark, pinned, contents.clone(), True))
    filler = torch.full((pinned.numel() * pinned.element_size(),), NOT_YET, dtype=torch.uint8)
    pinned.copy_(filler.view(pinned.dtype).view(pinned.shape))


def begin_upload(pinned: Tensor) -> None:
    """Copy from pinned memory without waiting: until the host waits, it must stay as it is."""
    settle(pinned)
    _unfinished.append(_Copy(current_stream().queue(), pinned, pinned.clone(), False))


def settle(pinned: Tensor) -> None:
    """End the earlier copies of pinned memory, which the current stream is about to use; raises OutOfOrder where it may
    be too early.
    """
    for copy in [copy for copy in _unfinished if copy.overlaps(pinned)]:
        if not _before(copy.mark, current_stream()):
            raise OutOfOrder("a copy uses pinned memory that a copy of another stream may still be using")
        _unfinished.remove(copy)
        copy.end()


def is_uploading(address: int, size: int) -> bool:
    """Whether a copy from a piece of memory to the device may not have ended."""
    return any(address <= copy.pinned.data_ptr() < address + size for copy in _unfinished)


def host_waits(position: Mapping[Stream, int]) -> None:
    """Let the host wait for a position."""
    _host.see(position)
    done = [copy for copy in _unfinished if copy.mark.number <= _host.seen.get(copy.mark.stream, 0)]
    for copy in done:
        _unfinished.remove(copy)
    for copy in done:
        copy.end()


def host_waits_for_all() -> None:
    """Let the host wait for every stream that has work."""
    for stream_with_work in list(_streams):
        host_waits(stream_with_work.position())
