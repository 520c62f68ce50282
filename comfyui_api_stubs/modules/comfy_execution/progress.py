"""How far each node of the running workflow is, and who is told (ComfyUI's comfy_execution.progress)."""

from __future__ import annotations

from enum import Enum
from typing import Any

from protocol import BinaryEventTypes

from comfy_execution.graph import DynamicPrompt


class NodeState(Enum):
    """Where a node stands."""

    Pending = "pending"
    Running = "running"
    Finished = "finished"
    Error = "error"


class ProgressHandler:
    """Is told of each change; derive and register to listen."""

    def __init__(self, name: str):
        self.name = name
        self.enabled = True

    def set_registry(self, registry: ProgressRegistry) -> None:
        """Called when the handler is registered."""

    def start_handler(self, node_id: str, state: dict, prompt_id: str) -> None:
        """A node started."""

    def update_handler(
        self, node_id: str, value: float, max_value: float, state: dict, prompt_id: str, image: Any = None
    ) -> None:
        """A node did `value` of `max_value`."""

    def finish_handler(self, node_id: str, state: dict, prompt_id: str) -> None:
        """A node ended."""

    def reset(self) -> None:
        """The workflow is over."""

    def enable(self) -> None:
        self.enabled = True

    def disable(self) -> None:
        self.enabled = False


class WebUIProgressHandler(ProgressHandler):
    """Sends the state of all nodes that have started as "progress_state"; builds nothing while no page would get it."""

    def __init__(self, server_instance: Any):
        super().__init__("webui")
        self.server_instance = server_instance
        self.registry: ProgressRegistry | None = None
        self.shown: dict[str, dict] = {}  # what clients are told of each node; its entries are never changed in place
        self.changed: dict[str, None] = {}  # the nodes whose entry is out of date

    def set_registry(self, registry: ProgressRegistry) -> None:
        self.registry = registry

    def _place(self, node_id: str) -> dict:
        """Where a node stands in the graph, as clients are told."""
        prompt = self.registry.dynprompt  # type: ignore[union-attr]
        return {
            "node_id": node_id,
            "display_node_id": prompt.get_display_node_id(node_id),
            "parent_node_id": prompt.get_parent_node_id(node_id),
            "real_node_id": prompt.get_real_node_id(node_id),
        }

    def _described(self, node_id: str, prompt_id: str) -> dict:
        state = self.registry.nodes[node_id]  # type: ignore[union-attr]
        return {
            "value": state["value"],
            "max": state["max"],
            "state": state["state"].value,
            "prompt_id": prompt_id,
            **self._place(node_id),
        }

    def _listened_to(self) -> bool:
        """Whether a page is open that would get the state."""
        sockets = getattr(self.server_instance, "sockets", {})
        client = self.server_instance.client_id
        return bool(sockets) if client is None else client in sockets

    def _send(self, node_id: str, prompt_id: str) -> None:
        """Tell clients that a node changed; only the nodes that changed since the last time are described anew."""
        if self.registry is None or self.server_instance is None:
            return
        self.changed[node_id] = None
        if not self._listened_to():
            return
        for changed_id in self.changed:
            self.shown[changed_id] = self._described(changed_id, prompt_id)
        self.changed.clear()
        data = {"prompt_id": prompt_id, "nodes": dict(self.shown)}
        self.server_instance.send_sync("progress_state", data, self.server_instance.client_id)

    def start_handler(self, node_id: str, state: dict, prompt_id: str) -> None:
        self._send(node_id, prompt_id)

    def update_handler(
        self, node_id: str, value: float, max_value: float, state: dict, prompt_id: str, image: Any = None
    ) -> None:
        """Send the state, and a preview picture with its node to clients that say they know such messages."""
        self._send(node_id, prompt_id)
        server = self.server_instance
        if image is None or self.registry is None or server is None:
            return
        flags = getattr(server, "sockets_metadata", {}).get(server.client_id, {}).get("feature_flags", {})
        if flags.get("supports_preview_metadata") is True:
            data = (image, {"prompt_id": prompt_id, **self._place(node_id)})
            server.send_sync(BinaryEventTypes.PREVIEW_IMAGE_WITH_METADATA, data, server.client_id)

    def finish_handler(self, node_id: str, state: dict, prompt_id: str) -> None:
        self._send(node_id, prompt_id)


class ProgressRegistry:
    """The state of every node of one workflow."""

    def __init__(self, prompt_id: str, dynprompt: DynamicPrompt):
        self.prompt_id = prompt_id
        self.dynprompt = dynprompt
        self.nodes: dict[str, dict] = {}
        self.handlers: dict[str, ProgressHandler] = {}

    def register_handler(self, handler: ProgressHandler) -> None:
        self.handlers[handler.name] = handler

    def ensure_entry(self, node_id: str) -> dict:
        return self.nodes.setdefault(node_id, {"state": NodeState.Pending, "value": 0, "max": 1})

    def _listening(self) -> list[ProgressHandler]:
        return [handler for handler in self.handlers.values() if handler.enabled]

    def start_progress(self, node_id: str) -> None:
        entry = self.ensure_entry(node_id)
        entry.update(state=NodeState.Running, value=0.0, max=1.0)
        for handler in self._listening():
            handler.start_handler(node_id, entry, self.prompt_id)

    def update_progress(self, node_id: str, value: float, max_value: float, image: Any = None) -> None:
        entry = self.ensure_entry(node_id)
        entry.update(state=NodeState.Running, value=value, max=max_value)
        for handler in self._listening():
            handler.update_handler(node_id, value, max_value, entry, self.prompt_id, image)

    def finish_progress(self, node_id: str) -> None:
        entry = self.ensure_entry(node_id)
        entry.update(state=NodeState.Finished, value=entry["max"])
        for handler in self._listening():
            handler.finish_handler(node_id, entry, self.prompt_id)

    def reset_handlers(self) -> None:
        for handler in self.handlers.values():
            handler.reset()


global_progress_registry: ProgressRegistry | None = None


def reset_progress_state(prompt_id: str, dynprompt: DynamicPrompt) -> None:
    """Begin anew for a workflow."""
    global global_progress_registry
    if global_progress_registry is not None:
        global_progress_registry.reset_handlers()
    global_progress_registry = ProgressRegistry(prompt_id, dynprompt)


def add_progress_handler(handler: ProgressHandler) -> None:
    """Have a handler told of the running workflow."""
    registry = get_progress_state()
    handler.set_registry(registry)
    registry.register_handler(handler)


def get_progress_state() -> ProgressRegistry:
    """The state of the running workflow, or an empty one."""
    global global_progress_registry
    if global_progress_registry is None:
        global_progress_registry = ProgressRegistry("", DynamicPrompt({}))
    return global_progress_registry
