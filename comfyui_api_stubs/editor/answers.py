"""JSON in and out of requests."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web


def text_of(value: Any) -> str:
    """JSON that every browser can read: NaN and infinities become null, a value that JSON cannot hold its str()."""
    try:
        return json.dumps(value, allow_nan=False, default=str)
    except ValueError:
        return json.dumps(json.loads(json.dumps(value, default=str), parse_constant=_null))


def _null(name: str) -> None:
    """For NaN, Infinity and -Infinity, which are Python's and no JSON."""


def answer(value: Any, status: int = 200) -> web.Response:
    """A JSON response."""
    return web.json_response(text=text_of(value), status=status)


def problem(message: str, status: int = 400) -> web.Response:
    """A JSON response with an error message."""
    return answer({"error": message}, status)


class NotJson(ValueError):
    """Part of a request is not JSON; the message says why."""


async def asked(request: web.Request) -> dict[str, Any]:
    """The JSON object in a request's body; 400 if it is anything else. An empty body counts as an empty object."""
    value = await body_of(request, {})
    if not isinstance(value, dict):
        raise web.HTTPBadRequest(text="the body must be a JSON object")
    return value


async def body_of(request: web.Request, empty: Any = None) -> Any:
    """The JSON value in a request's body, or `empty` if the body is empty. Raises NotJson if it is not JSON."""
    try:
        text = await request.text()
    except (LookupError, UnicodeError) as error:
        raise NotJson(f"the body is not JSON: its encoding is another one or not known ({error})") from error
    if text.strip() or empty is None:
        return parsed(text, "the body")
    return empty


def parsed(text: str, what: str) -> Any:
    """Parse JSON text. Raises NotJson if it is not valid, nested too deep, or holds a number that is too long, NaN or
    infinite.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise NotJson(f"{what} is not JSON: {error}") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a value of JSON")


def number(request: web.Request, name: str, default: int | None = None) -> int | None:
    """An integer from the query; 400 if it is not one."""
    value = request.query.get(name)
    if value is None:
        return default
    try:
        return int(value)
    except ValueError:
        raise web.HTTPBadRequest(text=f"{name} must be an integer, got {value!r}") from None
