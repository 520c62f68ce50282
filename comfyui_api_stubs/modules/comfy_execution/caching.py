"""How long the results of nodes are kept for later runs: one class for each of ComfyUI's ways.

The executor gives every node of a workflow a number: equal numbers, equal results. Whatever the cache forgets, a node
that waits keeps the results that it waits for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import comfy.model_management
import torch

GB = 1024**3
LARGE = GB // 2  # bytes: results of the running workflow that are smaller go last
SMALL = 0.05  # bytes that a result without tensors counts as: it goes after all others, the oldest first
OLDER_COUNTS_MORE = 1.3  # by how much with each run that did not use it


class CacheEntry(NamedTuple):
    """What a node gave: for each output the list of its values, and what the editor shows."""

    outputs: list[list]
    ui: dict


class ClassicCache:
    """Keeps the results of the latest workflow."""

    keeps_objects = True  # whether a node's instance lives as long as the node is in the workflow

    def __init__(self) -> None:
        self.entries: dict[int, CacheEntry] = {}

    def begin(self, numbers: set[int]) -> None:
        """A workflow begins that has these nodes."""
        self.entries = {number: entry for number, entry in self.entries.items() if number in numbers}

    def get(self, number: int) -> CacheEntry | None:
        return self.entries.get(number)

    def put(self, number: int, entry: CacheEntry) -> None:
        self.entries[number] = entry

    def expanded(self) -> None:
        """A node added nodes to the workflow."""

    def node_done(self) -> None:
        """A node of the workflow is done."""


class NoCache(ClassicCache):
    """Keeps nothing: every node runs in every workflow, and again for each node that asks for it late."""

    keeps_objects = False

    def put(self, number: int, entry: CacheEntry) -> None:
        pass


class LRUCache(ClassicCache):
    """Keeps at most so many results of earlier workflows; those unused for the most runs go first, and all of such a
    run go together.
    """

    def __init__(self, max_size: int) -> None:
        super().__init__()
        self.max_size = max_size
        self.run = 0
        self.oldest = 0  # what was last used in an earlier run has been forgotten
        self.used_in: dict[int, int] = {}

    def begin(self, numbers: set[int]) -> None:
        self.run += 1
        self.used_in.update(dict.fromkeys(numbers & self.entries.keys(), self.run))
        self.expanded()

    def get(self, number: int) -> CacheEntry | None:
        entry = self.entries.get(number)
        if entry is not None:
            self.used_in[number] = self.run
        return entry

    def put(self, number: int, entry: CacheEntry) -> None:
        self.entries[number] = entry
        self.used_in[number] = self.run

    def expanded(self) -> None:
        while len(self.entries) > self.max_size and self.oldest < self.run:
            self.oldest += 1
            self.forget([number for number, run in self.used_in.items() if run < self.oldest])

    def forget(self, numbers: Iterable[int]) -> None:
        """Let go of results."""
        for number in numbers:
            del self.entries[number], self.used_in[number]


class RAMPressureCache(LRUCache):
    """Keeps results while memory is free: below `inactive` bytes those of earlier workflows go, below `active` bytes
    also those of the running one, until so much is free again. Old and large ones go first.
    """

    def __init__(self, active: float, inactive: float) -> None:
        super().__init__(max_size=0)
        self.active, self.inactive = active, inactive
        self.earlier: set[int] = set()  # of earlier workflows, and not used by the running one yet
        self.touched: dict[int, int] = {}
        self.touches = 0

    def begin(self, numbers: set[int]) -> None:
        super().begin(numbers)
        self.earlier = self.entries.keys() - numbers

    def get(self, number: int) -> CacheEntry | None:
        entry = super().get(number)
        if entry is not None:
            self._touch(number)
        return entry

    def put(self, number: int, entry: CacheEntry) -> None:
        super().put(number, entry)
        self._touch(number)

    def _touch(self, number: int) -> None:
        self.touches += 1
        self.touched[number] = self.touches
        self.earlier.discard(number)

    def expanded(self) -> None:
        """Memory decides, not a number of results."""

    def node_done(self) -> None:
        if self.earlier:
            self._release(self.inactive, list(self.earlier))
        if _free() < self.active:
            large = [number for number, entry in self.entries.items() if _size(entry.outputs) >= LARGE]
            self._release(self.active, large)
            self._release(self.active, list(self.entries))

    def _release(self, wanted: float, numbers: list[int]) -> None:
        """Forget these results, the heaviest first, until `wanted` bytes are free."""
        for number in sorted(numbers, key=self._weight, reverse=True):
            if _free() >= wanted:
                return
            self.forget([number])

    def _weight(self, number: int) -> tuple[float, int]:
        """What goes first: models of earlier workflows, then by size and age, then what was used longest ago."""
        outputs, age = self.entries[number].outputs, self.run - self.used_in[number]
        if age and any(hasattr(value, "patcher") or hasattr(value, "model_size") for value in _flat(outputs)):
            return float("inf"), -self.touched[number]
        return _size(outputs) * OLDER_COUNTS_MORE**age, -self.touched[number]

    def forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            super().forget([number])
            del self.touched[number]
            self.earlier.discard(number)


def _free() -> int:
    """Bytes of memory that are free."""
    return comfy.model_management.get_free_memory(torch.device("cpu"))


def _flat(values: Any) -> Iterator[Any]:
    """The entries of lists in lists."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def _size(outputs: list[list]) -> float:
    """Bytes in memory of the tensors among a node's outputs."""
    tensors = [value for value in _flat(outputs) if isinstance(value, torch.Tensor) and value.device.type == "cpu"]
    return SMALL + sum(tensor.numel() * tensor.element_size() for tensor in tensors)
