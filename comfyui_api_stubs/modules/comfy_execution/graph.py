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
    """The workflow in API format, and the nodes that its nodes have added while it runs ("ephemeral" ones)."""

    def __init__(self, original_prompt: dict[str, dict]):
        self.original_prompt = original_prompt
        self.ephemeral_prompt: dict[str, dict] = {}
        self.ephemeral_parents: dict[str, str] = {}
        self.ephemeral_display: dict[str, str] = {}
        self._real: dict[str, str] = {}  # answers given already: nodes may be nested as deep as a loop is long
        self._displayed: dict[str, str] = {}

    def get_node(self, node_id: str) -> dict:
        if node_id in self.ephemeral_prompt:
            return self.ephemeral_prompt[node_id]
        if node_id not in self.original_prompt:
            raise NodeNotFoundError(f"Node {node_id} not found")
        return self.original_prompt[node_id]

    def has_node(self, node_id: str) -> bool:
        return node_id in self.original_prompt or node_id in self.ephemeral_prompt

    def add_ephemeral_node(self, node_id: str, node_info: dict, parent_id: str, display_id: str) -> None:
        """Add a node for the rest of this run; the editor shows `display_id` as running instead of it."""
        if self.has_node(node_id):
            self._real.clear()
            self._displayed.clear()
        self.ephemeral_prompt[node_id] = node_info
        self.ephemeral_parents[node_id] = parent_id
        self.ephemeral_display[node_id] = display_id

    def get_real_node_id(self, node_id: str) -> str:
        """The node of the workflow that a node comes from; that is the node itself when it is in the workflow."""
        return _followed(node_id, self.ephemeral_parents, self._real)

    def get_display_node_id(self, node_id: str) -> str:
        """The node that the editor shows as running."""
        return _followed(node_id, self.ephemeral_display, self._displayed)

    def get_parent_node_id(self, node_id: str) -> str | None:
        """The node that added a node; None for those of the workflow."""
        return self.ephemeral_parents.get(node_id)

    def all_node_ids(self) -> set[str]:
        return {*self.original_prompt, *self.ephemeral_prompt}

    def get_original_prompt(self) -> dict[str, dict]:
        return self.original_prompt


def _followed(node_id: str, steps: dict[str, str], known: dict[str, str]) -> str:
    """Where one ends that goes from a node along the steps; `known` has the ends found before and takes this one. Steps
    in a circle end where they began."""
    passed: dict[str, None] = {}
    end = node_id
    while end in steps and end not in known and end not in passed:
        passed[end] = None
        end = steps[end]
    end = known.get(end, end)
    known.update(dict.fromkeys(passed, end))
    return end


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

    def done(self, node_id: str) -> list[str]:
        """A node has its result: nothing waits for it any more. Returns what did."""
        del self.blockers[node_id], self._position[node_id]
        self._distance.pop(node_id, None)
        self._taken.discard(node_id)
        waiters = list(self._waiters.pop(node_id, ()))
        for waiter in waiters:
            self.blockers[waiter].discard(node_id)
            self._offer(waiter)
        return waiters

    def cycle(self) -> list[str]:
        """Nodes that wait for each other in a circle, when nothing is ready and nothing runs."""
        node_id = next(iter(self.blockers))
        path: dict[str, int] = {}
        while node_id not in path:
            path[node_id] = len(path)
            node_id = next(iter(self.blockers[node_id]))
        return list(path)[path[node_id] :]

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
