"""The running workflow as a graph, and what a node class says of its inputs (ComfyUI's comfy_execution.graph)."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from typing import Any

from comfy_execution.graph_utils import ExecutionBlocker, is_link

__all__ = [
    "DependencyCycleError",
    "DynamicPrompt",
    "ExecutionBlocker",
    "NodeInputError",
    "NodeNotFoundError",
    "WaitingNodes",
    "get_input_info",
    "is_link",
]


class DependencyCycleError(Exception):
    """Nodes that wait for each other."""


class NodeInputError(Exception):
    """A node asked for an input that it cannot have."""


class NodeNotFoundError(Exception):
    """No node of that id."""


class DynamicPrompt:
    """The workflow in API format; nodes could be added while it runs, which the embedded host refuses, so every id
    stands for itself.
    """

    def __init__(self, original_prompt: dict[str, dict]):
        self.original_prompt = original_prompt

    def get_node(self, node_id: str) -> dict:
        if node_id not in self.original_prompt:
            raise NodeNotFoundError(f"Node {node_id} not found")
        return self.original_prompt[node_id]

    def get_real_node_id(self, node_id: str) -> str:
        return node_id

    def get_display_node_id(self, node_id: str) -> str:
        return node_id

    def get_parent_node_id(self, node_id: str) -> str | None:
        return None


def get_input_info(
    class_def: Any, input_name: str, valid_inputs: dict | None = None
) -> tuple[Any, str | None, dict | None]:
    """(type, "required" or "optional" or "hidden", options) of an input; three times None when the node has no such
    input.
    """
    valid_inputs = valid_inputs or class_def.INPUT_TYPES()
    for category in ("required", "optional", "hidden"):
        inputs = valid_inputs.get(category, {})
        info = inputs[input_name] if input_name in inputs else None  # noqa: SIM401  (packs have dicts that hold any name)
        if info is not None:
            return info[0], category, info[1] if len(info) > 1 else {}
    return None, None, None


FAR = 3  # links from a node to the nearest urgent one: more are not told apart


class WaitingNodes:
    """The nodes that wait to be executed, what each waits for, and which is next.

    Urgent nodes (outputs and async nodes) come first, then what leads to one soonest, so that results show early; among
    equals the one that waits longest. Each step costs what the node's own links cost, however many nodes wait.
    """

    def __init__(self) -> None:
        self.blockers: dict[str, set[str]] = {}  # of each node that waits
        self._waiters: dict[str, dict[str, None]] = {}
        self._distance: dict[str, int] = {}  # links to the nearest urgent node, FAR at most
        self._position: dict[str, int] = {}
        self._numbers = itertools.count()
        self._ready: list[tuple[int, int, str]] = []  # a heap; what is out of date in it is passed over
        self._taken: set[str] = set()

    def __contains__(self, node_id: str) -> bool:
        return node_id in self.blockers

    def __len__(self) -> int:
        return len(self.blockers)

    def add(self, node_id: str, urgent: bool, sources: Iterable[str]) -> None:
        """Have a node wait for its sources."""
        self.blockers[node_id] = set()
        self._position[node_id] = next(self._numbers)
        if urgent:
            self._distance[node_id] = 0
        for source in sources:
            self.wait_for(node_id, source)
        self._offer(node_id)

    def wait_for(self, node_id: str, source: str) -> None:
        """Have a node that waits already wait for one more."""
        self.blockers[node_id].add(source)
        self._waiters.setdefault(source, {})[node_id] = None
        self._draw_near(source, self._distance.get(node_id, FAR) + 1)

    def take(self) -> str | None:
        """The next node that waits for nothing; None when each waits for another or is taken."""
        while self._ready:
            _, position, node_id = heapq.heappop(self._ready)
            if self._is_ready(node_id) and self._position[node_id] == position:
                self._taken.add(node_id)
                return node_id
        return None

    def give_back(self, node_id: str) -> None:
        """A node that was taken has to wait on."""
        self._taken.discard(node_id)
        self._offer(node_id)

    def done(self, node_id: str) -> None:
        """A node has its result: nothing waits for it any more."""
        del self.blockers[node_id], self._position[node_id]
        self._distance.pop(node_id, None)
        self._taken.discard(node_id)
        for waiter in self._waiters.pop(node_id, ()):
            self.blockers[waiter].discard(node_id)
            self._offer(waiter)

    def _is_ready(self, node_id: str) -> bool:
        return node_id in self.blockers and not self.blockers[node_id] and node_id not in self._taken

    def _offer(self, node_id: str) -> None:
        if self._is_ready(node_id):
            entry = (self._distance.get(node_id, FAR), self._position[node_id], node_id)
            heapq.heappush(self._ready, entry)

    def _draw_near(self, node_id: str, distance: int) -> None:
        """Note that a node is this near to an urgent one, and what it waits for one link farther."""
        if distance < self._distance.get(node_id, FAR):
            self._distance[node_id] = distance
            self._offer(node_id)
            for source in self.blockers.get(node_id, ()):
                self._draw_near(source, distance + 1)
