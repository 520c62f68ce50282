"""Which node is being executed, for code that is called from within it."""

from __future__ import annotations

import contextvars
from typing import NamedTuple


class ExecutionContext(NamedTuple):
    """The running node, and which entry of its input lists."""

    prompt_id: str
    node_id: str
    list_index: int | None


current_executing_context: contextvars.ContextVar[ExecutionContext | None] = contextvars.ContextVar(
    "current_executing_context",
    default=None,
)


def get_executing_context() -> ExecutionContext | None:
    """The running node, or None outside of an execution."""
    return current_executing_context.get(None)


class CurrentNodeContext:
    """Within this context, `get_executing_context` gives this node."""

    def __init__(self, prompt_id: str, node_id: str, list_index: int | None = None):
        self.context = ExecutionContext(prompt_id, node_id, list_index)
        self.token: contextvars.Token | None = None

    def __enter__(self) -> CurrentNodeContext:
        self.token = current_executing_context.set(self.context)
        return self

    def __exit__(self, exc_type: object, exc_val: object, exc_tb: object) -> None:
        if self.token is not None:
            current_executing_context.reset(self.token)
