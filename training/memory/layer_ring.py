"""Frozen layers in host memory: a block's weights come to the device while the block before it computes.

The copies run on a stream of their own, and nothing is copied back. Of the blocks that wait in host memory at most two
are on the device at once; what is in no block, and as many blocks as there is room for, stay there.

Trained weights may wait too: their gradients go to a tensor without memory, and whoever steps them writes to host
memory what comes over the next time.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...patches.core.calls import around
from ...patches.core.host_memory import has_streams
from ...patches.core.ledger import open_entry
from ...patches.core.slots import Slot, SlotKey, slots, stored_tensors, swap_all
from .allocations import META
from .checkpointing import blocks
from .offload import copies_on, slots_elsewhere, weights_on
from .pinning import Pins


def copies_ahead(device: torch.device) -> bool:
    """Whether copies to a device run beside its computations. A plan on the meta device is for one where they do."""
    return has_streams(device) or device == META


@dataclass(frozen=True, eq=False)
class Group:
    """Modules whose weights come together: those of a block, or all that are in no block."""

    modules: Sequence[nn.Module]
    is_block: bool


class Leaf(NamedTuple):
    """Where the gradients of a trained weight go that waits in host memory: a tensor on the device without memory. The
    model computes in `dtype`.
    """

    tensor: Tensor
    dtype: torch.dtype


class _Arrival(torch.autograd.Function):
    """What has come to the device, as the leaf: autograd keeps neither of them, and passes the gradient on."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, arrived: Tensor) -> Tensor:
        return arrived.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Order:
    """The order in which blocks are used, learned from the last time.

    Which block comes next depends on the last two groups: in the backward pass blocks run again in the opposite order.
    Passes without gradients have an order of their own.
    """

    def __init__(self) -> None:
        self._recent: tuple[Group | None, Group | None] = (None, None)
        self._next: dict[tuple[Any, bool], Group] = {}

    def expect_after(self, group: Group) -> Group | None:
        """Note that a group is used now; returns the block that came next the last time."""
        has_gradients = torch.is_grad_enabled()
        if group.is_block:
            self._next[self._recent, has_gradients] = group
            self._recent = self._recent[1], group
        else:
            self._recent = None, group  # a forward pass begins, whatever was before
        return self._next.get((self._recent, has_gradients))


class SideStream:
    """A stream for copies to `device`, beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: Any = getattr(torch, device.type)
        self._side = self._streams.Stream(device)

    @contextmanager
    def copy(self) -> Iterator[None]:
        """A context whose copies run on the side stream.

        Their memory belongs to that stream, so what is freed is taken again here, maybe before the device has computed
        with it. That is why the stream waits for the work that is queued now.
        """
        self._side.wait_stream(self._streams.current_stream(self._device))
        with self._streams.stream(self._side):
            yield

    def record_copies(self) -> Any:
        """The end of the copies so far, for `wait`."""
        event = self._streams.Event()
        event.record(self._side)
        return event

    def wait(self, event: Any) -> None:
        """Make later work on the device wait for copies. Does not block the host."""
        self._streams.current_stream(self._device).wait_event(event)

    def finish(self) -> None:
        """Wait until every copy has ended."""
        self._side.synchronize()


@dataclass(frozen=True)
class FetchedGroup:
    """A group's weights on the device, once the event `copied` has come."""

    group: Group
    found: Sequence[Slot]
    tensors: Sequence[Tensor]  # what was in these slots
    copies: Mapping[int, Tensor]
    copied: Any = None

    def is_for(self, group: Group, found: Sequence[Slot]) -> bool:
        """Whether these are copies of what a group has now."""
        if group is not self.group or len(found) != len(self.tensors):
            return False
        return all(slot.tensor is tensor for slot, tensor in zip(found, self.tensors, strict=True))


class LayerRing:
    """Brings the weights of groups to a device when they compute, and those of the expected next block ahead."""

    def __init__(
        self, device: torch.device, staying: Callable[[], Container[SlotKey]], leaves: Mapping[int, Leaf]
    ) -> None:
        self._device, self._staying, self._leaves = device, staying, leaves
        self._order = Order()
        self._ahead: FetchedGroup | None = None
        self._stream: SideStream | None = None
        if has_streams(device):
            self._stream = SideStream(device)

    def call(self, group: Group, _: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `inner` with the group's weights on the device; the original tensors are back afterwards."""
        found = self._slots(group)
        if group.is_block and not found:  # it stays there
            return inner(*args, **kwargs)
        fetched = self._take(group, found)
        with swap_all(fetched.found, partial(self._arrived, fetched)):
            self._look_ahead(fetched)
            return inner(*args, **kwargs)

    def close(self) -> None:
        """Forget what came ahead, and wait until every copy has ended."""
        self._ahead = None
        if self._stream is not None:
            self._stream.finish()

    def _arrived(self, fetched: FetchedGroup, slot: Slot) -> Tensor:
        """What a slot holds while its group computes."""
        copied = fetched.copies[id(slot.tensor)]
        leaf = self._leaves.get(id(slot.tensor))
        if leaf is None:
            return copied
        if torch.is_grad_enabled():
            copied = _Arrival.apply(leaf.tensor, copied)
        return copied.to(leaf.dtype)

    def _take(self, group: Group, found: Sequence[Slot]) -> FetchedGroup:
        """The group's weights, from what came ahead if that is it."""
        fetched, self._ahead = self._ahead, None
        if fetched is None or not fetched.is_for(group, found):
            fetched = None  # its memory is free for the copies
            fetched = self._fetch(group, found)
        if self._stream is not None:
            self._stream.wait(fetched.copied)
        return fetched

    def _look_ahead(self, now: FetchedGroup) -> None:
        """Begin to fetch the block that is expected after what computes now.

        What is in no block never comes ahead: until the backward pass has ended it is on the device already.
        """
        expected = self._order.expect_after(now.group)
        if expected is None or not copies_ahead(self._device):
            return
        if expected is now.group:  # the last block runs again first
            self._ahead = now
            return
        self._ahead = self._fetch(expected, self._slots(expected))

    def _slots(self, group: Group) -> Sequence[Slot]:
        return slots_elsewhere(group.modules, self._device, self._staying())

    def _fetch(self, group: Group, found: Sequence[Slot]) -> FetchedGroup:
        tensors = [slot.tensor for slot in found]
        context: AbstractContextManager[None] = nullcontext()
        if self._stream is not None:
            context = self._stream.copy()
        with context:
            copies = copies_on(self._device, tensors)
        if self._stream is None:
            return FetchedGroup(group, found, tensors, copies)
        return FetchedGroup(group, found, tensors, copies, self._stream.record_copies())


@contextmanager
def layers_on_host(
    module: nn.Module,
    device: torch.device,
    staying: Callable[[], Container[SlotKey]] = frozenset[SlotKey],
    waiting: int | None = None,
    trained: Mapping[SlotKey, Any] | None = None,
    leaves: Mapping[int, Leaf] | None = None,
) -> Iterator[None]:
    """A context in which weights of `module` come to `device` when their block computes, and leave when it is done.

    Blocks are those of `training.memory.checkpointing.blocks`, which must be checkpointed inside this: otherwise the
    backward pass keeps what came over. So many of them are `waiting` in host memory, evenly spread (None: all); the
    others and the weights outside any block come over once. The tensors in host memory are not changed, but those that
    wait are pinned inside the block. What is in the slots that `staying` gives at that time does not come over.

    Others will be in the slots of `trained`: what is in them comes over only when a block computes with it. Of what
    waits, gradients are taken for the tensors in `leaves`, by their id.
    """
    pins, ring = Pins(device), LayerRing(device, staying, leaves or {})
    (root, outside), *inner = _groups(module)
    chosen = spread(len(inner), len(inner) if waiting is None else waiting)
    with open_entry(module, "layers in host memory") as stack:
        stack.callback(pins.release)
        stack.callback(ring.close)
        here = [outside.modules, *(group.modules for number, (_, group) in enumerate(inner) if number not in chosen)]
        elsewhere = trained or staying()  # quantized weights are not trained
        stack.enter_context(weights_on(list(chain.from_iterable(here)), device, elsewhere))
        pins.pin(slot.tensor for slot in slots_elsewhere(module.modules(), device, elsewhere))
        for owner, group in ((root, outside), *inner):
            stack.enter_context(around(owner, "ring", partial(ring.call, group)))
        yield


def spread(count: int, chosen: int) -> list[int]:
    """Which of `count` blocks wait in host memory, evenly spread: blocks that stay compute while those come over."""
    chosen = min(count, chosen)
    return [number for number in range(count) if (number + 1) * chosen // count > number * chosen // count]


def more_bytes(sizes: Sequence[int], chosen: int) -> int:
    """What blocks of these sizes take on the device when only so many wait, beyond what they take when all do: those
    that stay, less what no longer comes and goes.
    """
    gone = spread(len(sizes), chosen)
    stay = sum(size for number, size in enumerate(sizes) if number not in gone)
    return stay - (min(2, len(sizes)) - min(2, len(gone))) * min(sizes, default=0)


def fewest_waiting(sizes: Sequence[int], room: int) -> int:
    """How many blocks of these sizes have to wait in host memory when there are `room` bytes beside a step for which
    all do.
    """
    return next((chosen for chosen in range(len(sizes)) if more_bytes(sizes, chosen) <= room), len(sizes))


def block_sizes(
    module: nn.Module,
    device: torch.device,
    staying: Container[SlotKey] = (),
    trained: Mapping[SlotKey, torch.dtype] | None = None,
) -> list[int]:
    """The bytes that each block of a module would bring to a device, where weights of these types will be in the slots
    of `trained`.
    """
    trained, sizes = trained or {}, []
    for _, group in _groups(module)[1:]:
        elsewhere = slots_elsewhere(group.modules, device, staying)
        own = {id(slot.tensor): slot.tensor for slot in elsewhere if slot.key not in trained}
        size = sum(stored.nbytes for tensor in own.values() for stored in stored_tensors(tensor))
        moving = {id(slot.tensor): slot for slot in slots(group.modules) if slot.key in trained}
        sizes.append(size + sum(_trained_size(slot.tensor, trained[slot.key]) for slot in moving.values()))
    return sizes


def _trained_size(own: Tensor, dtype: torch.dtype) -> int:
    """The bytes of a trained weight, and of its copy in the type of the model's own where that is another one."""
    types = {dtype, own.dtype}
    return sum(own.numel() * one.itemsize for one in types)


def slots_of_blocks(module: nn.Module, waiting: int) -> set[SlotKey]:
    """The slots of the blocks that wait in host memory when so many do."""
    inner = _groups(module)[1:]
    parts = chain.from_iterable(inner[number][1].modules for number in spread(len(inner), waiting))
    return {slot.key for slot in slots(parts)}


def _groups(module: nn.Module) -> list[tuple[nn.Module, Group]]:
    """The whole module with what is in no block, and each block, in this order."""
    inner = blocks(module)
    in_blocks = {id(part) for block in inner for part in block.modules()}
    outer = [part for part in module.modules() if id(part) not in in_blocks]
    groups = [(module, Group(outer, False))]
    groups.extend((block, Group(list(block.modules()), True)) for block in inner)
    return groups
