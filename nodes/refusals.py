"""Answers of validate_inputs: settings that exclude each other are refused before anything runs, at their widgets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def refusal(node: Any, make: Callable[..., object], **settings: Any) -> bool | str:
    """True, or what is wrong with the settings: `make(**settings)` raises ValueError with it.

    A setting that comes through a link is None: only the run knows it. ComfyUI leaves the bounds of the inputs that
    validate_inputs takes to the node, so they are checked here.
    """
    if None in settings.values():
        return True
    for declared in node.define_schema().inputs:
        low, high = getattr(declared, "min", None), getattr(declared, "max", None)
        if declared.id in settings and low is not None and not low <= settings[declared.id] <= high:
            return f"{declared.display_name} is {settings[declared.id]}, expected from {low} to {high}"
    try:
        make(**settings)
    except ValueError as error:
        return str(error)
    return True
