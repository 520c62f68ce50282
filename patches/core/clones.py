"""Calls around the forward of a host's MODEL clone, each under a key: put on, replaced or taken off.

The host's objects are taken as they come: a patcher with `model_options` and callbacks by key. Clones share
dictionaries, so what is changed here becomes the clone's own first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

APPLY_MODEL = "apply_model"  # the host's name for calls of the whole model


def own_options(clone: Any) -> dict[str, Any]:
    """The transformer_options of a clone, which no other clone shares."""
    options: dict[str, Any] = dict(clone.model_options["transformer_options"])
    clone.model_options["transformer_options"] = options
    return options


def find_call(patcher: Any, key: str) -> Any:
    """The call around the model that a patcher carries under a key; None where it carries none."""
    wrappers = patcher.model_options.get("transformer_options", {}).get("wrappers", {})
    calls = wrappers.get(APPLY_MODEL, {}).get(key)
    if calls:
        return calls[0]
    return None


def put_call(clone: Any, key: str, call: Callable[..., Any] | None) -> None:
    """Put a call around the model of a clone, in place of the one under its key.

    Args:
        clone: the host's.
        key: what the call is known by.
        call: a wrapper as the host calls it; None takes off what is there.
    """
    options = own_options(clone)
    options["wrappers"] = {kind: dict(keyed) for kind, keyed in options.get("wrappers", {}).items()}
    options["wrappers"].get(APPLY_MODEL, {}).pop(key, None)
    if call is not None:
        options["wrappers"].setdefault(APPLY_MODEL, {})[key] = [call]


def put_callback(clone: Any, event: str, key: str, callback: Callable[..., Any] | None) -> None:
    """Have the host call something at an event of a clone, in place of what is under its key.

    Args:
        clone: the host's.
        event: the host's name for it.
        key: what the callback is known by.
        callback: None takes off what is there.
    """
    clone.remove_callbacks_with_key(event, key)
    if callback is not None:
        clone.add_callback_with_key(event, key, callback)


def put_object(clone: Any, name: str, value: Any) -> None:
    """Have a clone's model hold another object while the clone is loaded.

    Args:
        clone: the host's.
        name: the attribute's path, such as model_sampling.
        value: the object.
    """
    clone.add_object_patch(name, value)
