"""The WebSockets of the open pages: receives each page's features and sends it events in ComfyUI's formats."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import struct
import uuid
from collections.abc import AsyncIterator, Hashable
from typing import Any

from aiohttp import WSMsgType, web

from .answers import text_of
from .page import Page, PageLimits

log = logging.getLogger(__name__)

PREVIEW_IMAGE, UNENCODED_PREVIEW_IMAGE, TEXT, PREVIEW_IMAGE_WITH_METADATA = 1, 2, 3, 4
LARGEST_MESSAGE = 4 * 1024 * 1024  # bytes; a client sends its features and little else
HEARTBEAT = 30.0  # seconds
GOING_AWAY = 1001  # WebSocket close code


def features(largest_upload: int) -> dict[str, Any]:
    """The features of this server, in the front end's format."""
    return {
        "supports_preview_metadata": True,
        "supports_model_type_tags": False,
        "max_upload_size": largest_upload,
        "extension": {"manager": {"supports_v4": False}},
        "node_replacements": False,
        "assets": False,
    }


class Clients:
    """Sends the server's events to the open pages, to each in order and to none at the cost of another.

    Two tabs may have the same client id (duplicating a tab copies it); both then get its events."""

    def __init__(self, server: Any, largest_upload: int, limits: PageLimits | None = None):
        self.server, self.features = server, features(largest_upload)
        self.limits = limits or PageLimits()
        self.open: dict[str, list[Page]] = {}
        self.waiting: asyncio.Queue[tuple[Any, Any, str | None]] = asyncio.Queue()

    def send_sync(self, event: Any, data: Any, sid: str | None = None) -> None:
        """Queue an event for sending, from any thread; the events of one thread arrive in order."""
        with contextlib.suppress(RuntimeError):  # the loop is closed because the server has stopped
            self.server.loop.call_soon_threadsafe(self.waiting.put_nowait, (event, data, sid))

    async def running(self, app: web.Application) -> AsyncIterator[None]:
        """Send queued events while the application runs."""
        task = asyncio.create_task(self._publish())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def close(self, app: web.Application) -> None:
        """Close every WebSocket because the server stops."""
        await asyncio.gather(*(page.disconnect(GOING_AWAY, "the server stops") for page in self._pages(None)))

    def _pages(self, sid: str | None) -> list[Page]:
        """The pages with this client id; None: all."""
        if sid is not None:
            return list(self.open.get(sid, ()))
        return [page for pages in self.open.values() for page in pages]

    async def _publish(self) -> None:
        while True:
            event, data, sid = await self.waiting.get()
            pages = self._pages(sid)
            if pages:
                message = await encoded(event, data)
                for page in pages:
                    page.send(message, merge_key(event, data))
                await asyncio.sleep(0)  # each page sends it now, if its connection can take it

    async def connect(self, request: web.Request) -> web.WebSocketResponse:
        """GET /ws: one page's connection."""
        socket = web.WebSocketResponse(heartbeat=HEARTBEAT, max_msg_size=LARGEST_MESSAGE)
        await socket.prepare(request)
        sid = request.query.get("clientId") or uuid.uuid4().hex
        page = Page(socket, request, sid, self.limits)
        self.open.setdefault(sid, []).append(page)
        self.server.sockets[sid] = socket
        self.server.sockets_metadata.setdefault(sid, {"feature_flags": {}})
        try:
            page.send(text_of({"type": "status", "data": {"status": self.server.get_queue_info(), "sid": sid}}))
            if self.server.client_id == sid and self.server.last_node_id is not None:
                data = {
                    "node": self.server.last_node_id,
                    "display_node": self.server.last_node_id,
                    "prompt_id": self.server.last_prompt_id,
                }
                page.send(text_of({"type": "executing", "data": data}))
            async for message in socket:
                if message.type == WSMsgType.TEXT:
                    self._heard(page, message.data)
        finally:
            self._gone(page)
        return socket

    def _heard(self, page: Page, text: str) -> None:
        """Store the features that a page sends and reply with the server's; ignore all other messages."""
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            if not page.has_sent_nonsense:  # once: a page may send it ten thousand times
                log.warning("client %s sent something that is not JSON", page.sid)
            page.has_sent_nonsense = True
            return
        if (
            isinstance(message, dict)
            and message.get("type") == "feature_flags"
            and isinstance(message.get("data"), dict)
        ):
            self.server.sockets_metadata[page.sid]["feature_flags"] = message["data"]
            page.send(text_of({"type": "feature_flags", "data": self.features}))

    def _gone(self, page: Page) -> None:
        page.end()
        remaining = [other for other in self.open.pop(page.sid, []) if other is not page]
        if remaining:
            self.open[page.sid], self.server.sockets[page.sid] = remaining, remaining[-1].socket
        else:
            self.server.sockets.pop(page.sid, None)
            self.server.sockets_metadata.pop(page.sid, None)


def merge_key(event: Any, data: Any) -> Hashable | None:
    """What a newer event replaces while it waits for a page: the older progress, preview or queue length. None: every
    event counts.
    """
    if event in ("status", UNENCODED_PREVIEW_IMAGE):
        return event
    if event == "progress_state":
        return event, data.get("prompt_id")
    if event == "progress":
        return event, data.get("prompt_id"), data.get("node")
    if event == PREVIEW_IMAGE_WITH_METADATA:
        metadata = data[1] or {}
        return event, metadata.get("prompt_id"), metadata.get("node_id")
    return None


async def encoded(event: Any, data: Any) -> str | bytes:
    """Encode an event: as JSON, or as a binary message that starts with the event's number."""
    if event == UNENCODED_PREVIEW_IMAGE:
        kind, picture = await asyncio.to_thread(_picture, data)
        return struct.pack(">II", PREVIEW_IMAGE, 2 if kind == "png" else 1) + picture
    if event == PREVIEW_IMAGE_WITH_METADATA:
        preview, metadata = data
        kind, picture = await asyncio.to_thread(_picture, preview)
        header = text_of({**(metadata or {}), "image_type": f"image/{kind}"}).encode()
        return struct.pack(">II", PREVIEW_IMAGE_WITH_METADATA, len(header)) + header + picture
    if isinstance(data, (bytes, bytearray)):
        return struct.pack(">I", event) + bytes(data)
    return text_of({"type": event, "data": data})


def _picture(preview: tuple) -> tuple[str, bytes]:
    """Encode a preview (format, PIL picture, largest side or None); returns ("jpeg" or "png", file bytes)."""
    kind, picture, largest = preview
    if largest is not None and max(picture.size) != largest:
        scale = largest / max(picture.size)
        picture = picture.resize(
            (max(1, round(picture.width * scale)), max(1, round(picture.height * scale))), resample=2
        )
    buffer = io.BytesIO()
    png = kind == "PNG"
    if png:
        picture.save(buffer, format="PNG", compress_level=1)
    else:
        picture.convert("RGB").save(buffer, format="JPEG", quality=95)
    return ("png" if png else "jpeg"), buffer.getvalue()
