"""Adds up the gradients of a step's micro-batches, always in one order: equal bytes on any number of ranks.

One process adds as autograd does. Each rank computes one micro-batch at a time, and the gradients are added in the
order of the micro-batches: on a few ranks each adds everything, on more of them each adds a slice and then they give
each other the sums. Gradients travel in buckets, in the order in which the backward pass makes them, while it still
runs (as in 2006.15704).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from .process_group import ProcessGroup, SingleProcess

# Bytes that are sent together: few enough that an adapter's first gradients are sent early.
BUCKET_BYTES = 4 << 20
# Up to so many ranks each takes everyone's gradients; with more, what each would take grows beyond what that saves.
ALL_GATHER_MAX_RANKS = 4
STATUS_BYTES = 128  # of a RankStatus, without its gradients


class Reduction(Protocol):
    """How FSDP2 sums the gradients of sharded parameters (see fsdp.py)."""

    def begin_step(self, parameters: Mapping[str, Tensor]) -> None: ...

    def begin_backward(self, parameters: Mapping[str, Tensor]) -> None: ...


class LocalGradients:
    """The gradients of one process, which computes every micro-batch itself.

    If a micro-batch has several backward passes, it is added up by itself before it joins the others.
    """

    rank, size = 0, 1

    def __init__(self, trained: Mapping[str, Tensor]) -> None:
        self.tensors = list(trained.values())
        self.parameters: Mapping[str, Tensor] = {}
        self.reduction: Reduction | None = None
        self._before: list[Tensor | None] = []

    def attach(self, parameters: Mapping[str, Tensor], reduction: Reduction) -> None:
        """Take the gradients from these sharded parameters instead of the trained tensors."""
        self.parameters, self.reduction = parameters, reduction

    def begin_step(self, step: int, micro_batches: int) -> None:
        """Before the first micro-batch of a step."""

    @contextmanager
    def backward(self, first: bool, last: bool) -> Iterator[None]:
        """Around each backward pass: `first` and `last` of a micro-batch."""
        if first and not last:
            self._before = [tensor.grad for tensor in self.tensors]
            self._clear()
        yield
        if last and self._before:
            for tensor, earlier_gradient in zip(self.tensors, self._before, strict=True):
                if earlier_gradient is None:
                    continue
                if tensor.grad is None:
                    tensor.grad = earlier_gradient
                else:
                    tensor.grad = earlier_gradient.add_(tensor.grad)
            self._before = []

    def _clear(self) -> None:
        for tensor in self.tensors:
            tensor.grad = None

    def finish_round(self, count: int, loss: float) -> list[float]:
        """Add the gradients of `count` micro-batches, one per rank, to the step's sum in `.grad`; returns their losses
        in order.
        """
        return [loss]

    def broadcast_error(self, error: BaseException, until: int) -> None:
        """Tell the other ranks of an error before it leaves the steps up to `until`."""


class Bucket:
    """Tensors whose gradients are sent together: this rank's, everyone's once received, and the sum so far.

    A rank adds what lies between `low` and `high`: everything, or its slice.
    """

    def __init__(self, tensors: Sequence[Tensor], rank: int, ranks: int) -> None:
        self.tensors, self.ranks, self.sliced = list(tensors), ranks, ranks > ALL_GATHER_MAX_RANKS
        self.ends: list[int] = []
        size = 0
        for tensor in tensors:
            size += tensor.numel()
            self.ends.append(size)
        first = tensors[0]
        self.low, length = 0, size
        if self.sliced:
            length = -(-size // ranks)
            size = length * ranks
            self.low = rank * length
        self.high = self.low + length
        self.own = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.sum = torch.zeros(length, dtype=first.dtype, device=first.device)
        self.total = self.sum
        if self.sliced:
            self.total = torch.zeros_like(self.own)
        self.summed = [False] * len(tensors)
        self.pending: tuple[Any, Tensor] | None = None
        self.open()

    def open(self) -> None:
        """Before a micro-batch: nothing has been received."""
        self.written = [False] * len(self.tensors)

    def section(self, flat: Tensor, number: int, low: int = 0) -> Tensor:
        """The place of a tensor in a flat one that begins at `low`."""
        start = self.ends[number] - self.tensors[number].numel()
        return flat[max(0, start - low) : max(0, self.ends[number] - low)]

    def write(self, number: int) -> None:
        """Copy a tensor's gradient, if it has one."""
        gradient = self.tensors[number].grad
        if gradient is not None and not self.written[number]:
            self.section(self.own, number).copy_(gradient.reshape(-1))
            self.written[number] = True

    def launch(self, group: ProcessGroup) -> None:
        """Sends this rank's gradients and receives the others', without waiting."""
        received = torch.empty(self.ranks, self.sum.numel(), dtype=self.own.dtype, device=self.own.device)
        exchange = group.all_gather
        if self.sliced:
            exchange = group.all_to_all
        handle = exchange(received.view(torch.uint8), self.own.view(torch.uint8), "gradients", wait=False)
        self.pending = handle, received

    def wait(self, group: ProcessGroup) -> Tensor:
        """Waits for every rank's gradients (ranks, n)."""
        assert self.pending is not None
        handle, received = self.pending
        with group.connection_errors():
            handle.wait()
        self.pending = None
        return received

    @torch.no_grad()
    def add_(self, rows: Tensor, present: Sequence[Sequence[bool]]) -> None:
        """Add rows to the sum in their order; a gradient that a micro-batch does not have is not a gradient of
        zeros.
        """
        if all(map(all, present)) and len(set(self.summed)) == 1:
            self._add_whole(rows)
            return
        for number in range(len(self.tensors)):
            for row, has_gradient in zip(rows, present, strict=True):
                if has_gradient[number]:
                    total, gradient = self.section(self.sum, number, self.low), self.section(row, number, self.low)
                    if self.summed[number]:
                        total.add_(gradient)
                    else:
                        total.copy_(gradient)
                        self.summed[number] = True

    def _add_whole(self, rows: Tensor) -> None:
        if not self.summed[0]:
            self.sum.copy_(rows[0])
            self.summed = [True] * len(self.summed)
            rows = rows[1:]
        for row in rows:
            self.sum.add_(row)

    def set_gradients(self, group: ProcessGroup) -> None:
        """After the last micro-batch of a step: the sums become the gradients."""
        if self.sliced:
            group.all_gather(self.total.view(torch.uint8), self.sum.view(torch.uint8), "sums")
        for number, tensor in enumerate(self.tensors):
            if self.summed[number]:
                tensor.grad = self.section(self.total, number).view_as(tensor)
            else:
                tensor.grad = None


class AllGatheredGradients(LocalGradients):
    """Gradients of a rank that computes one micro-batch of each round, and has the sum of everyone's after the last.

    After each round there is one small exchange (RankStatus). A rank that fails sends what is still expected of it, so
    that nobody waits in vain, and then its error.
    """

    def __init__(self, trained: Mapping[str, Tensor], group: ProcessGroup) -> None:
        super().__init__({name: tensor for name, tensor in trained.items() if tensor.requires_grad})
        self.group, self.rank, self.size = group, group.rank, group.size
        self.buckets = [Bucket(tensors, group.rank, group.size) for tensors in _fill_buckets(self.tensors[::-1])]
        self._places: dict[int, tuple[Bucket, int]] = {}
        for bucket in self.buckets:
            for number, tensor in enumerate(bucket.tensors):
                self._places[id(tensor)] = bucket, number
        self._launched = 0
        self.step, self._rounds = -1, 0

    def begin_step(self, step: int, micro_batches: int) -> None:
        self.step, self._rounds = step, -(-micro_batches // self.size)
        for bucket in self.buckets:
            bucket.summed = [False] * len(bucket.tensors)

    @contextmanager
    def backward(self, first: bool, last: bool) -> Iterator[None]:
        if first:
            self._clear()
        if not last:
            yield
            return
        hooks = []
        for tensor in self.tensors:
            hook = partial(self.gradient_ready, *self._places[id(tensor)])
            hooks.append(tensor.register_post_accumulate_grad_hook(hook))
        try:
            yield
        finally:
            for handle in hooks:
                handle.remove()

    def gradient_ready(self, bucket: Bucket, number: int, tensor: Tensor) -> None:
        """Stores a complete gradient. Full buckets are sent, in order."""
        bucket.write(number)
        while self._launched < len(self.buckets) and all(self.buckets[self._launched].written):
            self._launch()

    def _launch(self) -> None:
        self.buckets[self._launched].launch(self.group)
        self._launched += 1

    def finish_round(self, count: int, loss: float) -> list[float]:
        is_idle = self.rank >= count
        if is_idle:
            self._clear()
        statuses, rows = self._exchange(loss, False)
        if any(status.failed for status in statuses):
            self.group.raise_remote_error()
        computed = statuses[:count]
        for number, bucket in enumerate(self.buckets):
            bucket.add_(rows[number][:count], [status.present[number] for status in computed])
            if not self._rounds:
                bucket.set_gradients(self.group)
        return [status.loss for status in computed]

    def _exchange(self, loss: float, failed: bool) -> tuple[list[RankStatus], list[Tensor]]:
        """Finish a round: the status of every rank, and for each bucket the gradients of every rank."""
        while self._launched < len(self.buckets):
            bucket = self.buckets[self._launched]
            for number in range(len(bucket.tensors)):
                if not failed:
                    bucket.write(number)
            self._launch()
        present = [bucket.written for bucket in self.buckets]
        statuses = RankStatus(failed, self.group.stop_asked, loss, present).all_gather(self.group)
        rows = [bucket.wait(self.group) for bucket in self.buckets]
        for bucket in self.buckets:
            bucket.open()
        self._launched = 0
        self._rounds -= 1
        return statuses, rows

    def broadcast_error(self, error: BaseException, until: int) -> None:
        if not _others_listen(self.group, self._rounds, self.step, until):
            return
        if not self.group.shard:
            self._exchange(0.0, True)
        self.group.broadcast_error(error)


class RowShardedGradients(LocalGradients):
    """Gradients of a rank that has rows of whole weights: FSDP2 sums them, in the parameters that were attached."""

    def __init__(self, trained: Mapping[str, Tensor], group: ProcessGroup) -> None:
        super().__init__(trained)
        self.trained, self.group, self.rank, self.size = trained, group, group.rank, group.size
        self.step, self._rounds = -1, 0

    def begin_step(self, step: int, micro_batches: int) -> None:
        self.step, self._rounds = step, -(-micro_batches // self.size)
        if self.reduction is not None:
            self.reduction.begin_step(self.parameters)

    @contextmanager
    def backward(self, first: bool, last: bool) -> Iterator[None]:
        if self.reduction is not None:
            self.reduction.begin_backward(self.parameters)
        yield

    def finish_round(self, count: int, loss: float) -> list[float]:
        statuses = RankStatus(False, self.group.stop_asked, loss, []).all_gather(self.group)
        self._rounds -= 1
        if not self._rounds:
            for name, tensor in self.trained.items():
                gradient = self.parameters[name].grad
                if gradient is not None:
                    gradient = gradient.to_local()  # type: ignore[attr-defined]
                tensor.grad = gradient
        return [status.loss for status in statuses]

    def broadcast_error(self, error: BaseException, until: int) -> None:
        if _others_listen(self.group, self._rounds, self.step, until):
            self.group.broadcast_error(error)


def for_group(group: SingleProcess, trained: Mapping[str, Tensor], row_sharded: bool = False) -> LocalGradients:
    """Choose how gradients are added up in this group; `row_sharded` if each rank has rows of `trained`."""
    if not isinstance(group, ProcessGroup):
        return LocalGradients(trained)
    group.stop_asked = group.stop_agreed = False
    if row_sharded:
        return RowShardedGradients(trained, group)
    return AllGatheredGradients(trained, group)


def _others_listen(group: ProcessGroup, rounds: int, step: int, until: int) -> bool:
    """Whether other ranks can receive an error now."""
    if group.shard and rounds > 0:
        group.broken = True  # they are in the middle of a pass, which only the end of this process ends
    return not group.broken and (rounds > 0 or step + 1 < until)  # otherwise the steps are done and no rank waits


@dataclass(frozen=True)
class RankStatus:
    """What each rank tells the others after a round.

    That is whether it failed, whether it wants to stop, its loss, and which gradients it has, by bucket.
    """

    failed: bool
    stop: bool
    loss: float
    present: Sequence[Sequence[bool]]

    def all_gather(self, group: ProcessGroup) -> list[RankStatus]:
        """Every rank's status, in order; notes in the group whether some rank wants to stop."""
        statuses = [RankStatus.from_json(text) for text in group.all_gather_json(self.to_json(), self._size())]
        group.stop_agreed = any(status.stop for status in statuses)
        return statuses

    def _size(self) -> int:
        """Bytes that the JSON of any rank fits in: all have the same buckets."""
        return STATUS_BYTES + sum(len(bucket) + 4 for bucket in self.present)

    def to_json(self) -> dict[str, Any]:
        """As JSON: of each bucket a text of 0 and 1, one for each gradient."""
        present = []
        for bucket in self.present:
            present.append("".join("1" if has_gradient else "0" for has_gradient in bucket))
        return {"failed": self.failed, "stop": self.stop, "loss": self.loss, "present": present}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RankStatus:
        """The inverse of `to_json`."""
        present = []
        for bucket in content["present"]:
            present.append([flag == "1" for flag in bucket])
        return cls(content["failed"], content["stop"], content["loss"], present)


def _fill_buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors in their order, as many together as BUCKET_BYTES allows; types and devices are not mixed."""
    buckets: list[list[Tensor]] = []
    free_bytes = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if not buckets or size > free_bytes or not _share_bucket(buckets[-1][-1], tensor):
            buckets.append([])
            free_bytes = BUCKET_BYTES
        buckets[-1].append(tensor)
        free_bytes -= size
    return buckets


def _share_bucket(tensor: Tensor, other: Tensor) -> bool:
    return tensor.dtype == other.dtype and tensor.device == other.device
