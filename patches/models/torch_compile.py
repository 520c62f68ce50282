"""Models under torch.compile: how to recognize them, and how to keep compiled code apart for different settings."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch.overrides import TorchFunctionMode


def is_compiled(wrappers: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether ComfyUI's own compile wrapper is among {kind: {key: wrappers}}.

    TorchCompileModel uses it, and so do nodes of other packs.
    """
    return any("torch.compile" in keyed for keyed in wrappers.values())


def unwrap(model: Any) -> Any:
    """The module inside a torch.compile wrapper, whose class and blocks identify it; any other module itself."""
    return getattr(model, "_orig_mod", model)


class _Pass(TorchFunctionMode):
    """Passes every operation through unchanged."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@functools.cache
def _kind(identity: str) -> type[_Pass]:
    return type("OwnCode", (_Pass,), {"__doc__": identity})


def separate_code(identity: str) -> TorchFunctionMode:
    """A context with compiled code of its own, for one identity (such as the settings and grid of Apply ToDo).

    Inside, torch.compile uses only code that it compiled under the same identity; outside, only code that it compiled
    without one. This is needed because ComfyUI 0.33's TorchCompileModel drops every guard on `transformer_options`, and
    with them what tells one model's patches from another's. The types of active torch function modes are part of every
    guard, for every piece of a broken graph. Code that was compiled once under an identity is used again. Each
    operation that is not compiled costs one extra Python call.
    """
    return _kind(identity)()
