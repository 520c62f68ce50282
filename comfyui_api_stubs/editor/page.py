"""One open page: the events that wait for it are sent in order by a task of its own, so that a page that stops reading
holds up no other page. Such a page is disconnected; the front end connects again when it can.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Hashable
from dataclasses import dataclass

from aiohttp import web

log = logging.getLogger(__name__)

TRY_AGAIN = 1013  # WebSocket close code: the server cannot serve this page now
TOO_SLOW = "this page did not read the server's events in time; reload it"


@dataclass(frozen=True)
class PageLimits:
    """How far a page may fall behind, and how long the server waits for it, in seconds."""

    send: float = 20.0  # for one message
    close: float = 10.0  # for the page to take the closing message
    messages: int = 1000  # that wait for a page
    bytes: int = 64 * 1024 * 1024  # of all messages that wait for a page


class Page:
    """The WebSocket of a page and what waits to be sent on it. `run` sends while the page is connected."""

    def __init__(self, socket: web.WebSocketResponse, request: web.Request, sid: str, limits: PageLimits) -> None:
        self.socket, self.sid = socket, sid
        self.has_sent_nonsense = False
        self._request, self._limits = request, limits
        self._waiting: dict[Hashable, str | bytes] = {}
        self._bytes = 0
        self._filled = asyncio.Event()
        self._numbers = itertools.count()
        self._sending = asyncio.create_task(self._send_waiting())
        self._closing: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """How many messages wait to be sent."""
        return len(self._waiting)

    def send(self, message: str | bytes, replaces: Hashable | None = None) -> None:
        """Queue a message. One that still waits and has the same `replaces` is dropped: the new one is newer progress.

        A page for which too much waits is disconnected.
        """
        if self._closing is not None:
            return
        key = next(self._numbers) if replaces is None else replaces
        self._bytes -= len(self._waiting.pop(key, ""))
        self._waiting[key] = message
        self._bytes += len(message)
        self._filled.set()
        if len(self._waiting) > self._limits.messages or self._bytes > self._limits.bytes:
            self.disconnect(TRY_AGAIN, TOO_SLOW)

    def disconnect(self, code: int, reason: str) -> asyncio.Task[None]:
        """Drop what waits, and tell the page why; a page that does not take that either is cut off."""
        if self._closing is None:
            if code == TRY_AGAIN:
                log.warning("the page %s was disconnected: %s", self.sid, reason)
            self._waiting.clear()
            self._closing = asyncio.create_task(self._close(code, reason))
        return self._closing

    def end(self) -> None:
        """The page is gone: stop sending."""
        self._sending.cancel()

    async def _send_waiting(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._filled.wait()
            while self._waiting:
                message = self._waiting.pop(next(iter(self._waiting)))
                self._bytes -= len(message)
                timer = loop.call_later(self._limits.send, self.disconnect, TRY_AGAIN, TOO_SLOW)
                try:
                    await _send(self.socket, message)
                finally:
                    timer.cancel()
            self._filled.clear()

    async def _close(self, code: int, reason: str) -> None:
        transport = self._request.transport
        closing = asyncio.ensure_future(self.socket.close(code=code, message=reason.encode()))
        await asyncio.wait({closing}, timeout=self._limits.close)
        if transport is not None:
            transport.abort()  # what it has not read by now is not kept for it
        self._sending.cancel()
        closing.cancel()


async def _send(socket: web.WebSocketResponse, message: str | bytes) -> None:
    """Send a message; do nothing if the page has disconnected."""
    with contextlib.suppress(ConnectionError, RuntimeError):
        await (socket.send_str(message) if isinstance(message, str) else socket.send_bytes(message))
