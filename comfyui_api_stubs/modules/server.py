"""The server object as nodes see it: queue, clients, routes, events. It listens only once `python -m graft_nodes
editor` serves it.

Until then routes are kept in a table and events go to whoever replaces `send_sync`; nothing here imports a web
framework.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from protocol import BinaryEventTypes

MAX_UPLOAD = 100 * 1024 * 1024  # bytes of one request


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

    def put(self, path: str, **kwargs: Any) -> Callable[[Callable], Callable]:
        return self.route("PUT", path)

    def patch(self, path: str, **kwargs: Any) -> Callable[[Callable], Callable]:
        return self.route("PATCH", path)

    def delete(self, path: str, **kwargs: Any) -> Callable[[Callable], Callable]:
        return self.route("DELETE", path)

    def view(self, path: str, **kwargs: Any) -> Callable[[Callable], Callable]:
        return self.route("*", path)


class PromptServer:
    """One a process, as `PromptServer.instance`; `client_id` is the client that queued the running workflow."""

    instance: PromptServer

    largest_upload = MAX_UPLOAD  # bytes of a request

    def __init__(self, loop: asyncio.AbstractEventLoop):
        from execution import PromptQueue

        PromptServer.instance = self
        self.loop = loop
        self.routes = RouteTable()
        self.prompt_queue = PromptQueue(self)
        self.sockets: dict[str, Any] = {}
        self.sockets_metadata: dict[str, dict] = {}
        self.client_id: str | None = None
        self.last_node_id: str | None = None
        self.last_prompt_id: str | None = None
        self.number = 0
        self.on_prompt_handlers: list[Callable] = []
        self.supports: list[str] = ["custom_nodes_from_web"]
        self.node_replacements: list[Any] = []  # what packs announced; nothing is replaced in a workflow
        self._app: Any = None

    @property
    def app(self) -> Any:
        """The aiohttp application that is served; made when first asked for, so that a host nobody serves imports no
        web framework.
        """
        if self._app is None:
            from aiohttp import web

            self._app = web.Application(client_max_size=self.largest_upload)
        return self._app

    def send_sync(self, event: Any, data: Any, sid: str | None = None) -> None:
        """Send an event to one client or to all; nobody is connected here, so whoever runs the host puts its own
        function in place.
        """

    def send_progress_text(self, text: bytes | bytearray | str, node_id: str, sid: str | None = None) -> None:
        """Send a text that the editor shows on a node."""
        content = text.encode() if isinstance(text, str) else bytes(text)
        node = str(node_id).encode()
        self.send_sync(BinaryEventTypes.TEXT, struct.pack(">I", len(node)) + node + content, sid)

    def get_queue_info(self) -> dict:
        """How many workflows wait or run, as clients are told."""
        return {"exec_info": {"queue_remaining": self.prompt_queue.get_tasks_remaining()}}

    def queue_updated(self) -> None:
        """Tell the clients that the queue changed."""
        self.send_sync("status", {"status": self.get_queue_info()})

    def trigger_on_prompt(self, json_data: dict) -> dict:
        """Pass a queued workflow through the registered functions; one that fails is passed over, with a log entry."""
        for handler in self.on_prompt_handlers:
            try:
                json_data = handler(json_data)
            except Exception:
                logging.warning("a function that a pack registered for queued workflows failed", exc_info=True)
        return json_data
