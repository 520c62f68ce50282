"""Answers of validate_inputs: settings that are wrong or exclude each other are refused before anything runs, at their
widgets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NOT_CONNECTED = "not connected"  # the default of sockets in validate_inputs: a link's value arrives there as None


def connected(**sockets: Any) -> list[str]:
    """The names of those sockets that are connected, from their values in validate_inputs."""
    return [name for name, value in sockets.items() if value != NOT_CONNECTED]


def refusal(node: Any, make: Callable[..., object], *parts: tuple[str, ...], **settings: Any) -> bool | str:
    """True, or what is wrong with the settings: `make(**settings)` raises ValueError or FileNotFoundError with it.

    A setting that comes through a link is None: only the run knows it. Then those of `parts` are judged that are known
    as a whole: settings that fit or not whatever the others are. ComfyUI leaves the bounds and the choices of the
    inputs that validate_inputs takes to the node, so they are checked here.
    """
    known = {name: value for name, value in settings.items() if value is not None}
    declared = [one for one in node.define_schema().inputs if one.id in known]
    for one in declared:
        low, high = getattr(one, "min", None), getattr(one, "max", None)
        if low is not None and not low <= known[one.id] <= high:
            return f"{one.display_name} is {known[one.id]}, expected from {low} to {high}"
    judged: list[tuple[str, ...]] = [part for part in parts if known.keys() >= set(part)]
    if len(known) == len(settings):
        judged = [tuple(settings)]
    for names in judged:
        try:
            make(**{name: known[name] for name in names})
        except (ValueError, FileNotFoundError) as error:
            return str(error)
    for one in declared:
        options = getattr(one, "options", None)
        if options is not None and known[one.id] not in options:
            return f"{one.display_name} is {known[one.id]!r}, expected one of {', '.join(options)}"
    return True
