"""The server object as nodes see it: events go to whoever replaces `send_sync`, routes are kept in a table. Nothing listens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Route(NamedTuple):
    """One registered request handler."""

    method: str
    path: str
    handler: Callable


class RouteTable:
    """Decorators as of aiohttp's RouteTableDef; iterating gives the routes."""

    def __init__(self) -> None:
        self.items: list[Route] = []

    def __iter__(self) -> Iterator[Route]:
        return iter(self.items)

    def route(self, method: str, path: str, **kwargs: Any) -> Callable[[Callable], Callable]:
        """Register a handler for a method and a path."""

        def register(handler: Callable) -> Callable:
            self.items.append(Route(method.upper(), path, handler))
            return handler

        return register

    def get(self, path: str, **kwargs: Any) -> Callable[[Callable], Callable]:
        return self.route("GET", path)

    def post(self, path: str, **kwargs: Any) -> Callable[[Callable], Callable]:
        return self.route("POST", path)

    def delete(self, path: str, **kwargs: Any) -> Callable[[Callable], Callable]:
        return self.route("DELETE", path)


class PromptServer:
    """One a process, as `PromptServer.instance`; `client_id` is the client that queued the running workflow."""

    instance: PromptServer

    def __init__(self, loop: asyncio.AbstractEventLoop):
        PromptServer.instance = self
        self.loop = loop
        self.routes = RouteTable()
        self.sockets: dict[str, Any] = {}
        self.sockets_metadata: dict[str, dict] = {}
        self.client_id: str | None = None
        self.last_node_id: str | None = None
        self.last_prompt_id: str | None = None
        self.on_prompt_handlers: list[Callable] = []
        self.supports: list[str] = []

    def send_sync(self, event: Any, data: Any, sid: str | None = None) -> None:
        """Send an event to one client or to all; nobody is connected here, so whoever runs the host puts its own function in place."""

    def send_progress_text(self, text: Any, node_id: str, sid: str | None = None) -> None:
        """Send a line of text to show under a node."""
        self.send_sync("progress_text", {"node": node_id, "text": text.decode() if isinstance(text, bytes) else text}, sid)

    def queue_updated(self) -> None:
        """Tell the clients that the queue changed: there is no queue here."""

    def add_on_prompt_handler(self, handler: Callable) -> None:
        """Register a function that may change each queued workflow."""
        self.on_prompt_handlers.append(handler)

    def trigger_on_prompt(self, json_data: dict) -> dict:
        """Pass a queued workflow through the registered functions."""
        for handler in self.on_prompt_handlers:
            json_data = handler(json_data)
        return json_data
