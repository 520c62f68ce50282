"""What is wrong with the values of a node's inputs, by the schema: before a workflow runs, and when the node does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comfy_api.latest import io

from ..settings.declaration import value_error

WIDGETS: Mapping[type, Any] = {bool: io.Boolean, int: io.Int, float: io.Float, str: io.String}


def input_error(one: Any, value: object) -> str:
    """What is wrong with the value of one of a schema's inputs; empty where nothing is, and for a socket."""
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
