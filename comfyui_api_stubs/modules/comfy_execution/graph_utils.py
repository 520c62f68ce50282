"""Links, the blocker value, and a builder for graphs in API format (ComfyUI's comfy_execution.graph_utils)."""

from __future__ import annotations

import contextvars
from typing import Any


def is_link(obj: Any) -> bool:
    """Whether an input's value is a link: [node id, output index]."""
    return isinstance(obj, list) and len(obj) == 2 and isinstance(obj[0], str) and isinstance(obj[1], (int, float))


class ExecutionBlocker:
    """A value that keeps every node it reaches from running; with a message, that is reported as an error there."""

    def __init__(self, message: str | None):
        self.message = message


class Node:
    """One node of a GraphBuilder."""

    def __init__(self, id: str, class_type: str, inputs: dict[str, Any]):
        self.id = id
        self.class_type = class_type
        self.inputs = inputs
        self.override_display_id: str | None = None

    def out(self, index: int) -> list:
        """A link to one of the node's outputs."""
        return [self.id, index]

    def set_input(self, key: str, value: Any) -> None:
        """Set an input; None takes it away."""
        if value is None:
            self.inputs.pop(key, None)
        else:
            self.inputs[key] = value

    def get_input(self, key: str) -> Any:
        """An input's value or link, or None."""
        return self.inputs.get(key)

    def set_override_display_id(self, override_display_id: str) -> None:
        """Have the editor show another node as the one that runs."""
        self.override_display_id = override_display_id

    def serialize(self) -> dict[str, Any]:
        shown = {} if self.override_display_id is None else {"override_display_id": self.override_display_id}
        return {"class_type": self.class_type, "inputs": self.inputs, **shown}


# What the ids of a GraphBuilder without a prefix begin with: the node that runs, which of its calls it is, and which of
# that call's graphs. Each task of an async node has its own.
_prefix: contextvars.ContextVar[tuple[str, int, int]] = contextvars.ContextVar("prefix", default=("", 0, 0))


class GraphBuilder:
    """Builds a graph in API format, node by node; every id begins with the builder's prefix."""

    def __init__(self, prefix: str | None = None):
        self.prefix = GraphBuilder.alloc_prefix() if prefix is None else prefix
        self.nodes: dict[str, Node] = {}
        self.id_gen = 1

    @classmethod
    def set_default_prefix(cls, prefix_root: str, call_index: int, graph_index: int = 0) -> None:
        """What the next builder without a prefix takes; the executor sets it before each call of a node."""
        _prefix.set((prefix_root, call_index, graph_index))

    @classmethod
    def alloc_prefix(
        cls, root: str | None = None, call_index: int | None = None, graph_index: int | None = None
    ) -> str:
        """A prefix that nothing else in this call of the node has."""
        default = _prefix.get()
        _prefix.set((default[0], default[1], default[2] + 1))
        asked = zip((root, call_index, graph_index), default, strict=True)
        return "".join(f"{usual if part is None else part}." for part, usual in asked)

    def node(self, class_type: str, id: str | None = None, **kwargs: Any) -> Node:
        """Add a node, or return the one that has this id already."""
        if id is None:
            id = str(self.id_gen)
            self.id_gen += 1
        key = self.prefix + id
        return self.nodes.setdefault(key, Node(key, class_type, kwargs))

    def lookup_node(self, id: str) -> Node | None:
        """The node of an id without the prefix, or None."""
        return self.nodes.get(self.prefix + id)

    def remove_node(self, id: str) -> None:
        """Take a node away; links to it stay."""
        del self.nodes[self.prefix + id]

    def replace_node_output(self, node_id: str, index: int, new_value: Any) -> None:
        """Put a value or another link wherever an output of a node is linked to; None takes those inputs away."""
        link = [self.prefix + node_id, index]
        for node in self.nodes.values():
            for key in [key for key, value in node.inputs.items() if is_link(value) and value == link]:
                node.set_input(key, new_value)

    def finalize(self) -> dict[str, dict]:
        """The graph in API format."""
        return {key: node.serialize() for key, node in self.nodes.items()}


def add_graph_prefix(graph: dict[str, dict], outputs: Any, prefix: str) -> tuple[dict[str, dict], tuple]:
    """A graph in API format and its outputs, with a prefix before every id."""

    def prefixed(value: Any) -> Any:
        return [prefix + value[0], value[1]] if is_link(value) else value

    renamed = {}
    for node_id, node in graph.items():
        inputs = {name: prefixed(value) for name, value in node.get("inputs", {}).items()}
        renamed[prefix + node_id] = {"class_type": node["class_type"], "inputs": inputs}
    return renamed, tuple(prefixed(output) for output in outputs)
