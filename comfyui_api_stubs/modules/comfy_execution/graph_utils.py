"""Links, the blocker value, and a builder for graphs in API format (ComfyUI's comfy_execution.graph_utils)."""

from __future__ import annotations

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

    def serialize(self) -> dict[str, Any]:
        shown = {} if self.override_display_id is None else {"override_display_id": self.override_display_id}
        return {"class_type": self.class_type, "inputs": self.inputs, **shown}


class GraphBuilder:
    """Builds a graph in API format, node by node; every id begins with the builder's prefix."""

    _root: str = ""
    _call_index: int = 0
    _graph_index: int = 0

    def __init__(self, prefix: str | None = None):
        self.prefix = GraphBuilder.alloc_prefix() if prefix is None else prefix
        self.nodes: dict[str, Node] = {}

    @classmethod
    def alloc_prefix(
        cls, root: str | None = None, call_index: int | None = None, graph_index: int | None = None
    ) -> str:
        parts = (
            cls._root if root is None else root,
            cls._call_index if call_index is None else call_index,
            cls._graph_index if graph_index is None else graph_index,
        )
        GraphBuilder._graph_index += 1
        return "".join(f"{part}." for part in parts)

    def node(self, class_type: str, id: str | None = None, **kwargs: Any) -> Node:
        """Add a node, or return the one that has this id already."""
        key = self.prefix + (str(len(self.nodes) + 1) if id is None else id)
        return self.nodes.setdefault(key, Node(key, class_type, kwargs))

    def finalize(self) -> dict[str, dict]:
        """The graph in API format."""
        return {key: node.serialize() for key, node in self.nodes.items()}
