"""Process groups for training on several ranks (torch.distributed): broadcast, gather, shared errors and stops.

A process is a `SingleProcess` until it joins a `ProcessGroup` (torch.distributed); both have the same methods, so that
training code is the same for one process and for many.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from . import wire_format

# How long to wait for a rank that does not answer: longer than any validation, preview or save of the first one.
TIMEOUT = timedelta(minutes=30)
_POLL_SECONDS = 0.05  # between two checks of the store
TEXT_BYTES = 1024  # of an error or another short text that all ranks get
_CHUNK_BYTES = 4 << 20  # of a value that go into the store together


class RemoteRankError(RuntimeError):
    """Another rank failed, or was interrupted: `rank` says which, `kind` is its exception's class."""

    def __init__(self, rank: int, kind: str, message: str) -> None:
        super().__init__(f"Rank {rank} ended with {kind}: {message}" if message else f"Rank {rank} ended with {kind}.")
        self.rank, self.kind = rank, kind


class RankConnectionError(RuntimeError):
    """The connection to another rank broke or timed out."""


def format_error(error: BaseException) -> str:
    """Serialize an error for the other ranks; `parse_error` reads it."""
    return f"{type(error).__name__}\n{' '.join(str(error).split())}"


def parse_error(rank: int, text: str) -> RemoteRankError:
    """The error that another rank sent."""
    kind, _, message = text.partition("\n")
    return RemoteRankError(rank, kind, message)


class SingleProcess:
    """Training in one process.

    `as_ranks` multiplies the gradient accumulation, so that steps equal those of so many ranks.
    """

    rank, size = 0, 1
    shard = False  # whether weights are divided among the ranks (see fsdp.py)
    reproducible = False  # whether sharded weights must get the bytes of one process (see fsdp_order.py)

    def __init__(self, as_ranks: int = 1) -> None:
        self.as_ranks = as_ranks

    @property
    def is_main_process(self) -> bool:
        """Whether this process writes, shows, validates and keeps averages."""
        return self.rank == 0

    def meet_at(self, place: str) -> None:
        """Barrier: wait until every rank has reached this node; the first rank tells the others which."""

    def begin_call(self) -> None:
        """A call of TrainStep begins."""

    @contextmanager
    def raise_together(self) -> Iterator[None]:
        """For work that every rank does: an error on one rank is raised on all, as RemoteRankError on the others."""
        yield

    def broadcast(self, plain: Any, tensors: Mapping[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        """Send the first rank's plain values (JSON) and CPU tensors to every rank."""
        return plain, dict(tensors)

    def broadcast_(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite the tensors of every rank with the first rank's."""

    def agree_to_stop(self, asked: bool) -> bool:
        """Whether any rank asked to stop; the answer is the same on all ranks at the same step."""
        return asked

    def broadcast_flag(self, own: bool) -> bool:
        """The first rank's flag on every rank, where all must decide alike."""
        return own

    def report(self, parts: int, steps: int) -> list[str]:
        """Report lines on the number of ranks and micro-batches per step; none for one process."""
        return []


class ProcessGroup(SingleProcess):
    """Training as one rank of torch.distributed's default group, which must exist and be able to send CPU tensors.

    `store` is a store of torch.distributed that every rank sees: it is for moments that may take long, such as loading
    a model; what must be fast goes through the group.
    """

    def __init__(
        self,
        store: Any,
        as_ranks: int | None = None,
        shard: bool = False,
        timeout: timedelta = TIMEOUT,
        reproducible: bool = False,
    ) -> None:
        import torch.distributed as distributed

        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        super().__init__(self.size if as_ranks is None else as_ranks)
        self.store, self.shard, self.reproducible, self.timeout = store, shard, reproducible, timeout
        self.distributed = distributed
        self.broken = False  # after a connection error no more messages can be sent
        self.error_shared = False  # an error was sent or received: every rank is stopping, and none listens
        self.bytes_sent: dict[str, int] = {}  # bytes handed to collectives, by purpose
        self.stop_asked = self.stop_agreed = False  # to stop: this rank, and some rank at the last exchange
        self._met: list[str] = []
        self._reported = 0
        self._gather: Callable[..., Any] = (
            getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
        )

    # --- what everything is made of -----------------------------------------------------------------------------------

    @contextmanager
    def connection_errors(self) -> Iterator[None]:
        """Context manager around calls of torch.distributed: turns their errors into RankConnectionError."""
        try:
            yield
        except (RemoteRankError, RankConnectionError):
            raise
        except RuntimeError as error:
            self.broken = True
            if str(error):
                reason = str(error).splitlines()[0]
            else:
                reason = type(error).__name__
            raise RankConnectionError(
                f"Rank {self.rank} lost another rank, or it did not answer for {self.timeout}: {reason}"
            ) from error

    def all_gather(self, out: Tensor, own: Tensor, purpose: str, wait: bool = True) -> Any:
        """Gather every rank's bytes (n,) into rows of `out` (ranks, n); without `wait` returns a handle to wait on."""
        self.bytes_sent[purpose] = self.bytes_sent.get(purpose, 0) + own.numel()
        with self.connection_errors():
            return self._gather(out.view(-1), own, async_op=not wait)

    def all_to_all(self, out: Tensor, own: Tensor, purpose: str, wait: bool = True) -> Any:
        """Exchange slices: cut each rank's bytes into one slice per rank, and get this rank's slice of all of them.

        They come as rows of `out` (ranks, n).
        """
        self.bytes_sent[purpose] = self.bytes_sent.get(purpose, 0) + own.numel()
        with self.connection_errors():
            return self.distributed.all_to_all_single(out.view(-1), own, async_op=not wait)

    def all_gather_text(self, text: str) -> list[str]:
        """Gather a text from every rank, in order; only the first TEXT_BYTES of each are sent."""
        texts = self._all_gather_bytes(text.encode()[:TEXT_BYTES], TEXT_BYTES)
        return [text.decode(errors="replace") for text in texts]

    def all_gather_json(self, value: Any, size: int) -> list[Any]:
        """Gather every rank's plain value, in order; its JSON has at most `size` bytes, the same number everywhere."""
        body = json.dumps(value, separators=(",", ":")).encode()
        if len(body) > size:
            raise ValueError(f"A message of {len(body)} bytes was to fit in {size}.")
        return [json.loads(text) for text in self._all_gather_bytes(body, size)]

    def _all_gather_bytes(self, body: bytes, size: int) -> list[bytes]:
        local_bytes = torch.frombuffer(bytearray(body.ljust(size, b"\0")), dtype=torch.uint8)
        gathered = torch.empty(self.size, size, dtype=torch.uint8)
        self.all_gather(gathered, local_bytes, "control")
        return [bytes(row.tolist()).rstrip(b"\0") for row in gathered]

    def broadcast_error(self, error: BaseException) -> None:
        """Send this rank's error to the others, which wait in `raise_remote_error`."""
        self.error_shared = True
        self.all_gather_text(format_error(error))

    def raise_remote_error(self) -> None:
        """Raise another rank's error, if one failed. Every rank calls this or `all_gather_text` at the same time."""
        for rank, text in enumerate(self.all_gather_text("")):
            if text:
                self.error_shared = True
                raise parse_error(rank, text)

    # --- the group ----------------------------------------------------------------------------------------------------

    def meet_at(self, place: str) -> None:
        if place in self._met:  # a node that runs over a list of inputs
            return
        self._met.append(place)
        if not self.is_main_process:
            self.store.set(f"here/{place}/{self.rank}", "yes")
            return
        self.publish({"run": place})
        for rank in range(1, self.size):
            self.wait_for(f"here/{place}/{rank}")

    @contextmanager
    def raise_together(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if not (self.broken or self.error_shared):
                self.broadcast_error(error)
            raise
        self.raise_remote_error()

    def begin_call(self) -> None:
        self.error_shared = False

    def broadcast(self, plain: Any, tensors: Mapping[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        shapes = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()}
        body = json.dumps([plain, shapes]).encode() if self.is_main_process else b""
        length = torch.tensor([len(body)])
        self._spread(length)
        if self.is_main_process:
            header = torch.frombuffer(bytearray(body), dtype=torch.uint8)
        else:
            header = torch.empty(int(length), dtype=torch.uint8)
        self._spread(header)
        plain, shapes = json.loads(bytes(header.numpy()))
        if self.is_main_process:
            received = dict(tensors)
        else:
            received = {n: torch.empty(shape, dtype=getattr(torch, kind)) for n, (kind, shape) in shapes.items()}
        self.broadcast_(received)
        return plain, received

    def broadcast_(self, tensors: Mapping[str, Tensor]) -> None:
        for tensor in tensors.values():
            if tensor.numel():
                self._spread(tensor.detach())

    def _spread(self, tensor: Tensor) -> None:
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        self.bytes_sent["given"] = self.bytes_sent.get("given", 0) + (flat.numel() if self.is_main_process else 0)
        with self.connection_errors():
            self.distributed.broadcast(flat, 0)
        if flat.data_ptr() != tensor.data_ptr() and not self.is_main_process:
            tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))

    def agree_to_stop(self, asked: bool) -> bool:
        self.stop_asked = asked
        return self.stop_agreed

    def broadcast_flag(self, own: bool) -> bool:
        flag = torch.tensor([own], dtype=torch.uint8)
        self._spread(flag)
        return bool(flag)

    def report(self, parts: int, steps: int) -> list[str]:
        rounds, idle = -(-parts // self.size), -parts % self.size
        sent = (self.bytes_sent.get("gradients", 0) - self._reported) / max(1, steps)
        self._reported = self.bytes_sent.get("gradients", 0)
        sends = f"; a rank sends {sent / 1e6:.3f} MB of gradients a step" if sent else ""
        sharding = ", the model divided among them" if self.shard else ""
        lines = [f"{self.size} ranks{sharding}, {parts} micro-batches a step, {rounds} one after another{sends}"]
        if idle:
            lines.append(
                f"{idle} of {self.size} ranks are idle in the last round of a step: {parts} is not a multiple of"
                f" {self.size}"
            )
        return lines

    # --- slow moments -------------------------------------------------------------------------------------------------

    def publish(self, message: Mapping[str, Any]) -> None:
        """Send the first rank's next message to all others."""
        number = self.store.add("said", 1)
        self.store.set(f"said/{number}", json.dumps(message))
        if "end" in message:
            self.store.set("end", "yes")

    def leave(self, patience: float) -> None:
        """Leave as a rank after the first: waits until the first rank is done, at most `patience` seconds."""
        until = time.monotonic() + patience
        with self.connection_errors():
            self.store.set(f"left/{self.rank}", "yes")
            while not (self.broken or self.store.check(["end"]) or time.monotonic() > until):
                time.sleep(_POLL_SECONDS)

    def messages(self) -> Iterator[dict[str, Any]]:
        """Iterate over the first rank's messages as they arrive."""
        number = 1
        while True:
            yield json.loads(self.wait_for(f"said/{number}", forever=True))
            number += 1

    def put_value(self, key: str, value: Any) -> None:
        """Store a plain value (`wire_format.encode`) for the other ranks. Raises TypeError for any other value."""
        body = wire_format.encode(value)
        starts = range(0, len(body), _CHUNK_BYTES)
        for number, start in enumerate(starts):
            self.store.set(f"value/{key}/{number}", body[start : start + _CHUNK_BYTES])
        self.store.set(f"value/{key}", str(len(starts)))

    def take_value(self, key: str) -> Any:
        """Wait for the value that `put_value` stored, and return it."""
        count = int(self.wait_for(f"value/{key}"))
        chunks = [bytes(self.store.get(f"value/{key}/{number}")) for number in range(count)]
        return wire_format.decode(b"".join(chunks))

    def report_failure(self, error: BaseException | str) -> None:
        """Tell the ranks that wait in `wait_for` that this rank has failed."""
        text = error if isinstance(error, str) else format_error(error)
        self.store.set(f"failed/{self.rank}", text)
        if self.store.add("failures", 1) == 1:
            self.store.set("failed", json.dumps([self.rank, text]))

    def wait_for(self, key: str, forever: bool = False) -> bytes:
        """Wait for a key of the store and return its value. Raises RemoteRankError when a rank fails meanwhile,
        RankConnectionError after `timeout`.
        """
        until = time.monotonic() + self.timeout.total_seconds()
        with self.connection_errors():
            while not self.store.check([key]):
                if self.store.check(["failed"]):
                    rank, text = json.loads(self.store.get("failed"))
                    raise parse_error(rank, text)
                if not forever and time.monotonic() > until:
                    raise RankConnectionError(
                        f"Rank {self.rank} waited {self.timeout} for {key}: a rank hangs, or loads for longer than"
                        " that."
                    )
                time.sleep(_POLL_SECONDS)
            return bytes(self.store.get(key))


_group: SingleProcess = SingleProcess()


def current() -> SingleProcess:
    """The process group (or single process) that this process trains in."""
    return _group


def join(joined: SingleProcess) -> None:
    """Set the process group that this process trains in."""
    global _group
    _group = joined
