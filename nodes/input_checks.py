"""Answers of validate_inputs: settings that are wrong or exclude each other are refused before anything runs, at their
widgets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from comfy_api.latest import io

from ..settings.declaration import value_error

WIDGETS: Mapping[type, Any] = {bool: io.Boolean, int: io.Int, float: io.Float, str: io.String}
NOT_CONNECTED = "not connected"  # the default of sockets in validate_inputs: a link's value arrives there as None


def connected(**sockets: Any) -> list[str]:
    """The names of those sockets that are connected, from their values in validate_inputs."""
    return [name for name, value in sockets.items() if value != NOT_CONNECTED]


def input_error(one: Any, value: Any) -> str:
    """What is wrong with the value of a node's input; empty for a socket."""
    kind = next((kind for kind, widget in WIDGETS.items() if isinstance(one, widget.Input)), None)
    if isinstance(one, io.Combo.Input):
        kind = str
    if kind is None:
        return ""
    low, high = getattr(one, "min", None), getattr(one, "max", None)
    options = getattr(one, "options", None)
    return value_error(one.display_name, kind, value, low, high, options)


def input_errors(schema: io.Schema, values: Mapping[str, Any]) -> str:
    """What is wrong with the values of a node's inputs, each by itself, as one sentence; empty where nothing is. A node
    with `is_input_list` has a list of values for every input.
    """
    errors = []
    for one in schema.inputs:
        if one.id in values:
            given = values[one.id]
            errors += [input_error(one, value) for value in (given if schema.is_input_list else [given])]
    found = [error for error in dict.fromkeys(errors) if error]
    return f"{schema.display_name}: {'; '.join(found)}." if found else ""


def refusal(node: Any, check: Callable[..., object], *parts: tuple[str, ...], **values: Any) -> bool | str:
    """True, or what is wrong with the values of a node's inputs: `check(**values)` raises ValueError or
    FileNotFoundError with it.

    A value that comes through a link is None here: only the run knows it. Then those of `parts` are judged that are
    known as a whole: settings that fit or not whatever the others are. ComfyUI leaves the bounds and the choices of the
    inputs that validate_inputs takes to the node, so they are checked here.
    """
    known = {name: value for name, value in values.items() if value is not None}
    judged: list[tuple[str, ...]] = [part for part in parts if known.keys() >= set(part)]
    if len(known) == len(values):
        judged = [tuple(values)]
    errors = input_errors(node.define_schema(), known)
    if errors:
        return errors
    for names in judged:
        try:
            check(**{name: known[name] for name in names})
        except (ValueError, FileNotFoundError) as error:
            return str(error)
    return True
