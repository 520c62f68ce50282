"""The bodies of requests: none that is compressed, and none that stops arriving."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import StreamReader, web

log = logging.getLogger(__name__)

STALLED = 30.0  # seconds without a byte of a body that is not complete


def bodies(stalled: float = STALLED) -> Callable:
    """The middleware that refuses compressed bodies (415), whose size is known only when they are unpacked, and ends
    requests whose body stops arriving (408).
    """

    @web.middleware
    async def checked(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise web.HTTPUnsupportedMediaType(text="send the body as it is, without Content-Encoding")
        if not request.can_read_body:
            return await handler(request)
        watch = asyncio.create_task(_end_when_stalled(request, request.content, stalled))
        try:
            return await handler(request)
        finally:
            watch.cancel()

    return checked


async def _end_when_stalled(request: web.Request, body: StreamReader, patience: float) -> None:
    received = -1
    while received != body.total_bytes and not body.is_eof():
        received = body.total_bytes
        await asyncio.sleep(patience)
    if body.is_eof():
        return
    log.warning("%s %s: its body stopped after %d bytes", request.method, request.path, received)
    error = web.HTTPRequestTimeout(text=f"the body of the request stopped arriving after {received} bytes")
    error.force_close()  # what else arrives on this connection belongs to that body
    body.set_exception(error)
    body.feed_eof()
