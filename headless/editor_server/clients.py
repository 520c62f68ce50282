"""The open pages: their WebSockets, what they say they can do, and the events that are sent to them in ComfyUI's
formats.
"""

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
LARGEST_MESSAGE = 4 * 1024 * 1024  # bytes from a client: it sends its features and little else
HEARTBEAT = 30.0  # seconds


def features(largest_upload: int) -> dict[str, Any]:
    """What this server can do, as the front end asks it."""
    return {
        "supports_preview_metadata": True,
        "supports_model_type_tags": False,
        "max_upload_size": largest_upload,
        "extension": {"manager": {"supports_v4": False}},
        "node_replacements": False,
        "assets": False,
    }


class Clients:
    """Sends the server's events, in order, to the pages that they are for.

    Two tabs may have the same client id (a duplicated tab copies it): both get what is sent to it."""

    def __init__(self, server: Any, largest_upload: int):
        self.server, self.features = server, features(largest_upload)
        self.open: dict[str, list[web.WebSocketResponse]] = {}
        self.waiting: asyncio.Queue[tuple[Any, Any, str | None]] = asyncio.Queue()

    def send_sync(self, event: Any, data: Any, sid: str | None = None) -> None:
        """Have an event sent, from any thread; the events of one thread arrive in order."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server is gone, and nobody is left to tell
            self.server.loop.call_soon_threadsafe(self.waiting.put_nowait, (event, data, sid))

    async def running(self, app: web.Application) -> AsyncIterator[None]:
        """Send what waits for as long as the application runs; then close the sockets."""
        task = asyncio.create_task(self._publish())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def close(self, app: web.Application) -> None:
        """Tell every page that the server goes away."""
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
        """A page says what it can do, and is told the same of the server; nothing else is expected from it."""
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
        left = [other for other in self.open.pop(sid, []) if other is not socket]
        if left:
            self.open[sid], self.server.sockets[sid] = left, left[-1]
        else:
            self.server.sockets.pop(sid, None)
            self.server.sockets_metadata.pop(sid, None)


async def _send(socket: web.WebSocketResponse, message: str | bytes) -> None:
    """Send, unless the page has gone away meanwhile."""
    with contextlib.suppress(ConnectionError, RuntimeError):
        await (socket.send_str(message) if isinstance(message, str) else socket.send_bytes(message))


async def encoded(event: Any, data: Any) -> str | bytes:
    """An event as it is sent: JSON, or a binary message that begins with the event's number."""
    if event == UNENCODED_PREVIEW_IMAGE:
        kind, picture = await asyncio.to_thread(_picture, data)
        return struct.pack(">II", PREVIEW_IMAGE, 2 if kind == "png" else 1) + picture
    if event == PREVIEW_IMAGE_WITH_METADATA:
        preview, about = data
        kind, picture = await asyncio.to_thread(_picture, preview)
        header = text_of({**(about or {}), "image_type": f"image/{kind}"}).encode()
        return struct.pack(">II", PREVIEW_IMAGE_WITH_METADATA, len(header)) + header + picture
    if isinstance(data, (bytes, bytearray)):
        return struct.pack(">I", event) + bytes(data)
    return text_of({"type": event, "data": data})


def _picture(preview: tuple) -> tuple[str, bytes]:
    """("jpeg" or "png", the encoded file) of (format, PIL picture, largest side or None)."""
    kind, picture, largest = preview
    if largest is not None and max(picture.size) != largest:
        scale = largest / max(picture.size)
        picture = picture.resize(
            (max(1, round(picture.width * scale)), max(1, round(picture.height * scale))), resample=2
        )
    out = io.BytesIO()
    png = kind == "PNG"
    if png:
        picture.save(out, format="PNG", compress_level=1)
    else:
        picture.convert("RGB").save(out, format="JPEG", quality=95)
    return ("png" if png else "jpeg"), out.getvalue()
