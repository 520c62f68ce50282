"""JSON in and out of requests."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

from ...host import browser_json


def text_of(value: Any) -> str:
    """JSON that every browser reads; what JSON has no form for is its own text."""
    return browser_json.text_of(value, default=str)


def answer(value: Any, status: int = 200) -> web.Response:
    """A JSON response."""
    return web.json_response(text=text_of(value), status=status)


def problem(message: str, status: int = 400) -> web.Response:
    """A JSON response that says what is wrong."""
    return answer({"error": message}, status)


async def asked(request: web.Request) -> dict[str, Any]:
    """The object in a request's body; 400 when it is anything else. An empty body is an empty object."""
    body = await request.text()
    value = json.loads(body) if body.strip() else {}
    if not isinstance(value, dict):
        raise web.HTTPBadRequest(text="the body must be a JSON object")
    return value


def number(request: web.Request, name: str, default: int | None = None) -> int | None:
    """An integer of the query; 400 when it is none."""
    value = request.query.get(name)
    if value is None:
        return default
    try:
        return int(value)
    except ValueError:
        raise web.HTTPBadRequest(text=f"{name} must be an integer, got {value!r}") from None
