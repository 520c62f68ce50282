"""JSON as browsers read it, for routes here and for the editor's server."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .comfyui_objects import Request


def text_of(value: Any, default: Callable[[Any], Any] | None = None) -> str:
    """JSON text with null for NaN and infinities. `default` converts values that JSON cannot hold; without it they
    raise TypeError.
    """
    try:
        return json.dumps(value, allow_nan=False, default=default)
    except ValueError:
        return json.dumps(without_nan(value), allow_nan=False, default=default)


def without_nan(value: Any) -> Any:
    """The value with null for every NaN and infinity in it."""
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return None
    if isinstance(value, dict):
        return {key: without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(entry) for entry in value]
    return value


def read_name(request: Request, name: str) -> str:
    """A name from a request's query. ValueError when it is missing or has characters that no name has."""
    value = request.query.get(name, "")
    if not value.strip() or len(value) > 1000 or any(ord(character) < 32 for character in value):
        raise ValueError(f"{name} is missing or not a valid name: got {value[:100]!r}")
    return str(value)


def read_text(values: Mapping[str, Any], name: str) -> str:
    """A text of a query or of a posted object, empty when it is missing. ValueError when it is not text."""
    value = values.get(name, "")
    if not isinstance(value, str):
        from ..training.data.yaml_values import shorten

        raise ValueError(f"{name} is {shorten(value)}, expected a name")
    return value


def read_step(request: Request, name: str) -> int:
    """A step's number from a request's query, 0 when it is missing. ValueError when it is not a number."""
    text = request.query.get(name, "0")
    number = whole_number(text)
    if number is None:
        raise ValueError(f"{name}: expected the number of a step, found {text[:100]!r}")
    return number


def whole_number(text: str) -> int | None:
    """The number of a text of at most 15 digits, None for any other text."""
    if not text.isascii() or not text.isdecimal() or len(text) > 15:
        return None
    return int(text)
