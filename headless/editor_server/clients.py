"""The WebSockets of the open pages: receives each page's features and sends it events in ComfyUI's formats."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import struct
import uuid
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import WSMsgType, web

from .answers import text_of

PREVIEW_IMAGE, UNENCODED_PREVIEW_IMAGE, TEXT, PREVIEW_IMAGE_WITH_METADATA = 1, 2, 3, 4
LARGEST_MESSAGE = 4 * 1024 * 1024  # bytes; a client sends its features and little else
HEARTBEAT = 30.0  # seconds


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
    """Sends the server's events to the open pages, in order.

    Two tabs may have the same client id (duplicating a tab copies it); both then get its events."""

    def __init__(self, server: Any, largest_upload: int):
        self.server, self.features = server, features(largest_upload)
        self.open: dict[str, list[web.WebSocketResponse]] = {}
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
        for socket in [socket for sockets in self.open.values() for socket in sockets]:
            await socket.close(code=1001, message=b"the server stops")

    async def _publish(self) -> None:
        while True:
            event, data, sid = await self.waiting.get()
            if sid is not None:
                sockets = self.open.get(sid, [])
            else:
                sockets = [socket for sockets in self.open.values() for socket in sockets]
            if sockets:
                message = await encoded(event, data)
                await asyncio.gather(*(_send(socket, message) for socket in list(sockets)))

    async def connect(self, request: web.Request) -> web.WebSocketResponse:
        """GET /ws: one page's connection."""
        socket = web.WebSocketResponse(heartbeat=HEARTBEAT, max_msg_size=LARGEST_MESSAGE)
        await socket.prepare(request)
        sid = request.query.get("clientId") or uuid.uuid4().hex
        self.open.setdefault(sid, []).append(socket)
        self.server.sockets[sid] = socket
        self.server.sockets_metadata.setdefault(sid, {"feature_flags": {}})
        try:
            await _send(
                socket, text_of({"type": "status", "data": {"status": self.server.get_queue_info(), "sid": sid}})
            )
            if self.server.client_id == sid and self.server.last_node_id is not None:
                data = {
                    "node": self.server.last_node_id,
                    "display_node": self.server.last_node_id,
                    "prompt_id": self.server.last_prompt_id,
                }
                await _send(socket, text_of({"type": "executing", "data": data}))
            async for message in socket:
                if message.type == WSMsgType.TEXT:
                    await self._heard(socket, sid, message.data)
        finally:
            self._gone(socket, sid)
        return socket

    async def _heard(self, socket: web.WebSocketResponse, sid: str, text: str) -> None:
        """Store the features that a page sends and reply with the server's; ignore all other messages."""
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            logging.warning("client %s sent something that is not JSON", sid)
            return
        if (
            isinstance(message, dict)
            and message.get("type") == "feature_flags"
            and isinstance(message.get("data"), dict)
        ):
            self.server.sockets_metadata[sid]["feature_flags"] = message["data"]
            await _send(socket, text_of({"type": "feature_flags", "data": self.features}))

    def _gone(self, socket: web.WebSocketResponse, sid: str) -> None:
        remaining = [other for other in self.open.pop(sid, []) if other is not socket]
        if remaining:
            self.open[sid], self.server.sockets[sid] = remaining, remaining[-1]
        else:
            self.server.sockets.pop(sid, None)
            self.server.sockets_metadata.pop(sid, None)


async def _send(socket: web.WebSocketResponse, message: str | bytes) -> None:
    """Send a message; do nothing if the page has disconnected."""
    with contextlib.suppress(ConnectionError, RuntimeError):
        await (socket.send_str(message) if isinstance(message, str) else socket.send_bytes(message))


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
