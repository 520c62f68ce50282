"""The gradients of a step's micro-batches added up in one order, whoever computed them: equal bytes on any number of
ranks.

One process adds as autograd does. Ranks compute one part each at a time, and add them in the order of the parts: a few
ranks each add everything, more of them a slice each and then give each other the sums. What they send travels in
buckets, in the order in which the backward pass makes it, while it still runs (as in 2006.15704).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .process_group import ProcessGroup, SingleProcess

if TYPE_CHECKING:
    from .fsdp_order import Sums

BUCKET_BYTES = (
    4 << 20
)  # bytes that travel together: small enough that an adapter's first gradients are on their way early
# ranks up to which each takes everyone's gradients; with more, what each would take grows beyond what it saves to do so
ALL_GATHER_MAX_RANKS = 4


class LocalGradients:
    """One process: it computes every part. A part of several backward passes is added up by itself before it joins the
    others.
    """

    rank, size = 0, 1

    def __init__(self, trained: Mapping[str, Tensor]) -> None:
        self.tensors = list(trained.values())
        self.parameters: Mapping[str, Tensor] = {}  # that receive the gradients, where others than `trained` do,
        self.sums: Sums | None = None  # and what adds them
        self._before: list[Tensor | None] = []

    def begin_step(self, step: int, parts: int) -> None:
        """A step begins anew, of so many parts."""

    @contextmanager
    def backward(self, first: bool, last: bool) -> Iterator[None]:
        """Around one backward pass: the first and the last of a part, as it may be."""
        if first and not last:
            self._before = [t.grad for t in self.tensors]
            for t in self.tensors:
                t.grad = None
        yield
        if last and self._before:
            for t, before in zip(self.tensors, self._before, strict=True):
                if before is not None:
                    if t.grad is None:
                        t.grad = before
                    else:
                        t.grad = before.add_(t.grad)
            self._before = []

    def finish_round(self, count: int, loss: float) -> list[float]:
        """Finish the parts that run at a time, `count` of them: `.grad` has all of the step's so far. Their losses, in
        order.
        """
        return [loss]

    def broadcast_error(self, error: BaseException, until: int) -> None:
        """Before an error leaves the steps up to `until`: the other ranks hear of it."""


class Bucket:
    """Tensors whose gradients travel together: this rank's, everyone's when they have come, and the sum so far.

    A rank adds what lies between `low` and `high`: everything, or its slice.
    """

    def __init__(self, tensors: Sequence[Tensor], rank: int, ranks: int) -> None:
        self.tensors, self.ranks, self.sliced = list(tensors), ranks, ranks > ALL_GATHER_MAX_RANKS
        self.ends: list[int] = []
        for t in tensors:
            self.ends.append((self.ends[-1] if self.ends else 0) + t.numel())
        like, size = tensors[0], self.ends[-1]
        if self.sliced:
            length = -(-size // ranks)
        else:
            length = size
        if self.sliced:
            self.low = rank * length
        else:
            self.low = 0
        self.high = self.low + length
        self.own = torch.zeros(length * ranks if self.sliced else size, dtype=like.dtype, device=like.device)
        self.added = torch.zeros(length, dtype=like.dtype, device=like.device)
        if self.sliced:
            self.total = torch.zeros_like(self.own)
        else:
            self.total = self.added
        self.summed = [False] * len(tensors)
        self.coming: tuple[Any, Tensor] | None = None
        self.open()

    def open(self) -> None:
        """Before a part: nothing has come yet."""
        self.written = [False] * len(self.tensors)

    def part(self, flat: Tensor, number: int, low: int = 0) -> Tensor:
        """The place of a tensor in a flat one that begins at `low`."""
        start = self.ends[number] - self.tensors[number].numel()
        return flat[max(0, start - low) : max(0, self.ends[number] - low)]

    def write(self, number: int) -> None:
        """Take over a tensor's gradient, if it has one."""
        gradient = self.tensors[number].grad
        if gradient is not None and not self.written[number]:
            self.part(self.own, number).copy_(gradient.reshape(-1))
            self.written[number] = True

    def launch(self, group: ProcessGroup) -> None:
        """Send what was written, and take what the others send, without waiting."""
        out = torch.empty(self.ranks, self.added.numel(), dtype=self.own.dtype, device=self.own.device)
        if self.sliced:
            send = group.all_to_all
        else:
            send = group.all_gather
        self.coming = send(out.view(torch.uint8), self.own.view(torch.uint8), "gradients", wait=False), out

    def arrived(self, group: ProcessGroup) -> Tensor:
        """Every rank's gradients (ranks, n), when they are there."""
        assert self.coming is not None
        handle, out = self.coming
        with group.connection_errors():
            handle.wait()
        self.coming = None
        return out

    @torch.no_grad()
    def add_(self, rows: Tensor, present: Sequence[Sequence[bool]]) -> None:
        """Add rows to the sum in their order; a gradient that a part does not have is not a gradient of zeros."""
        if all(map(all, present)) and len(set(self.summed)) == 1:
            if self.summed[0]:
                start = 0
            else:
                start = 1
            if start:
                self.added.copy_(rows[0])
                self.summed = [True] * len(self.summed)
            for row in rows[start:]:
                self.added.add_(row)
            return
        for number in range(len(self.tensors)):
            sum_ = self.part(self.added, number, self.low)
            for row, has in zip(rows, present, strict=True):
                if not has[number]:
                    continue
                if self.summed[number]:
                    sum_.add_(self.part(row, number, self.low))
                else:
                    sum_.copy_(self.part(row, number, self.low))
                    self.summed[number] = True

    def give(self, group: ProcessGroup) -> None:
        """After the last part of a step: the sums into the gradients."""
        if self.sliced:
            group.all_gather(self.total.view(torch.uint8), self.added.view(torch.uint8), "sums")
        for number, t in enumerate(self.tensors):
            if self.summed[number]:
                t.grad = self.part(self.total, number).view_as(t)
            else:
                t.grad = None


class AllGatheredGradients(LocalGradients):
    """A rank of several: it computes one part of those that run at a time, and has the sum of everyone's after the
    last.

    After the parts there is one small exchange: who has failed or wants to stop, the losses, and which gradients there
    are. A rank that fails sends what is still expected of it, so that nobody waits in vain, and then says why.
    """

    def __init__(self, trained: Mapping[str, Tensor], group: ProcessGroup) -> None:
        super().__init__(trained)
        self.group, self.rank, self.size = group, group.rank, group.size
        self.buckets = [Bucket(tensors, group.rank, group.size) for tensors in _in_buckets(self.tensors[::-1])]
        self._places = {id(t): (bucket, number) for bucket in self.buckets for number, t in enumerate(bucket.tensors)}
        self._launched = 0
        self.step, self._rounds = -1, 0

    def begin_step(self, step: int, parts: int) -> None:
        self.step, self._rounds = step, -(-parts // self.size)
        for bucket in self.buckets:
            bucket.summed = [False] * len(bucket.tensors)

    @contextmanager
    def backward(self, first: bool, last: bool) -> Iterator[None]:
        if first:
            for t in self.tensors:
                t.grad = None
        if not last:
            yield
            return
        hooks = [
            t.register_post_accumulate_grad_hook(partial(self.gradient_ready, *self._places[id(t)]))
            for t in self.tensors
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def gradient_ready(self, bucket: Bucket, number: int, tensor: Tensor) -> None:
        """A gradient is whole: buckets that are full leave, in their order."""
        bucket.write(number)
        while self._launched < len(self.buckets) and all(self.buckets[self._launched].written):
            self._launch()

    def _launch(self) -> None:
        self.buckets[self._launched].launch(self.group)
        self._launched += 1

    def _flush(self, failed: bool) -> None:
        """What has not left yet does; of a rank that failed nothing is looked at."""
        while self._launched < len(self.buckets):
            bucket = self.buckets[self._launched]
            for number in range(len(bucket.tensors)):
                if not failed:
                    bucket.write(number)
            self._launch()

    def finish_round(self, count: int, loss: float) -> list[float]:
        idle = self.rank >= count
        if idle:
            for t in self.tensors:
                t.grad = None
        said, rows = self._exchange(loss, False)
        if any(one.failed for one in said):
            self.group.raise_remote_error()
        for number, bucket in enumerate(self.buckets):
            bucket.add_(rows[number][:count], [one.present[number] for one in said[:count]])
            if not self._rounds:
                bucket.give(self.group)
        return [one.loss for one in said[:count]]

    def _exchange(self, loss: float, failed: bool) -> tuple[list[RankStatus], list[Tensor]]:
        """Finish a round: what every rank says, and every bucket's gradients of every rank."""
        self._flush(failed)
        own = RankStatus(failed, self.group.stop_asked, loss, [bucket.written for bucket in self.buckets]).packed()
        out = torch.empty(self.size, own.numel(), dtype=torch.uint8)
        self.group.all_gather(out, own, "control")
        said = [RankStatus.read(row, self.buckets) for row in out]
        rows = [bucket.arrived(self.group) for bucket in self.buckets]
        for bucket in self.buckets:
            bucket.open()
        self.group.stop_agreed = any(one.stop for one in said)
        self._launched = 0
        self._rounds -= 1
        return said, rows

    def broadcast_error(self, error: BaseException, until: int) -> None:
        if not _heard(self.group, self._rounds, self.step, until):
            return
        if not self.group.shard:
            self._exchange(0.0, True)
        self.group.broadcast_error(error)


class RowShardedGradients(LocalGradients):
    """A rank of several that hold whole weights together: `sums` adds up the gradients of its rows, which `parameters`
    receive.
    """

    def __init__(self, trained: Mapping[str, Tensor], group: ProcessGroup) -> None:
        super().__init__(trained)
        self.trained, self.group, self.rank, self.size = trained, group, group.rank, group.size
        self.step, self._rounds = -1, 0

    def begin_step(self, step: int, parts: int) -> None:
        self.step, self._rounds = step, -(-parts // self.size)
        if self.sums is not None:
            self.sums.begin()

    @contextmanager
    def backward(self, first: bool, last: bool) -> Iterator[None]:
        for parameter in self.parameters.values():
            parameter.grad = None  # what comes is the sum of the step so far
        yield

    def finish_round(self, count: int, loss: float) -> list[float]:
        own = RankStatus(False, self.group.stop_asked, loss, []).packed()
        out = torch.empty(self.size, own.numel(), dtype=torch.uint8)
        self.group.all_gather(out, own, "control")
        said = [RankStatus.read(row, []) for row in out]
        self.group.stop_agreed = any(one.stop for one in said)
        self._rounds -= 1
        if not self._rounds:
            for name, tensor in self.trained.items():
                gradient = self.parameters[name].grad
                tensor.grad = None if gradient is None else gradient.to_local()  # type: ignore[attr-defined]
        return [one.loss for one in said]

    def broadcast_error(self, error: BaseException, until: int) -> None:
        if _heard(self.group, self._rounds, self.step, until):
            self.group.broadcast_error(error)


def for_group(group: SingleProcess, trained: Mapping[str, Tensor], row_sharded: bool = False) -> LocalGradients:
    """What adds up the gradients of a step's micro-batches; `row_sharded` where each rank holds rows of what is
    trained.
    """
    if not isinstance(group, ProcessGroup):
        return LocalGradients(trained)
    group.stop_asked = group.stop_agreed = False
    if row_sharded:
        return RowShardedGradients(trained, group)
    return AllGatheredGradients(trained, group)


def _heard(group: ProcessGroup, rounds: int, step: int, until: int) -> bool:
    """Whether other ranks can hear of an error now."""
    if group.shard and rounds > 0:
        group.broken = True  # they are in the middle of a pass, which only the end of this process ends
    return not group.broken and (rounds > 0 or step + 1 < until)  # else the steps are done and nobody waits


class RankStatus:
    """What a rank says after a part: whether it failed, whether it wants to stop, its loss, and which gradients it has,
    by bucket.
    """

    def __init__(self, failed: bool, stop: bool, loss: float, present: Sequence[Sequence[bool]]) -> None:
        self.failed, self.stop, self.loss, self.present = failed, stop, loss, present

    def packed(self) -> Tensor:
        """As bytes: two flags, the loss as float64, one bit a tensor."""
        bits = [flag for bucket in self.present for flag in bucket]
        number = sum(1 << place for place, flag in enumerate(bits) if flag)
        body = struct.pack("<??d", self.failed, self.stop, self.loss) + number.to_bytes(-(-len(bits) // 8), "little")
        return torch.frombuffer(bytearray(body), dtype=torch.uint8)

    @classmethod
    def read(cls, row: Tensor, buckets: Sequence[Bucket]) -> RankStatus:
        """The inverse of `packed`."""
        body = bytes(row.tolist())
        failed, stop, loss = struct.unpack("<??d", body[:10])
        number, present, place = int.from_bytes(body[10:], "little"), [], 0
        for bucket in buckets:
            present.append([bool(number >> (place + i) & 1) for i in range(len(bucket.tensors))])
            place += len(bucket.tensors)
        return cls(failed, stop, loss, present)


def _in_buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors in their order, as many together as BUCKET_BYTES allows; kinds are not mixed."""
    out: list[list[Tensor]] = []
    left = 0
    for t in tensors:
        size = t.numel() * t.element_size()
        if not out or size > left or out[-1][-1].dtype != t.dtype or out[-1][-1].device != t.device:
            out.append([])
            left = BUCKET_BYTES
        out[-1].append(t)
        left -= size
    return out
