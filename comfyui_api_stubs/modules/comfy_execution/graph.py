"""The running workflow as a graph, and what a node class says of its inputs (ComfyUI's comfy_execution.graph)."""

from __future__ import annotations

from typing import Any

from comfy_execution.graph_utils import ExecutionBlocker, is_link

__all__ = [
    "DependencyCycleError",
    "DynamicPrompt",
    "ExecutionBlocker",
    "NodeInputError",
    "NodeNotFoundError",
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
        info = valid_inputs.get(category, {}).get(input_name)
        if info is not None:
            return info[0], category, info[1] if len(info) > 1 else {}
    return None, None, None
