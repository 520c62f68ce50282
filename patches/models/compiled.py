"""Models under torch.compile: which are, and code of its own for a call whose options no guard looks at."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch.overrides import TorchFunctionMode


def is_compiled(wrappers: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether ComfyUI's own way of compiling (TorchCompileModel, and other packs' nodes that use it) is among {kind:
    {key: wrappers}}.
    """
    return any("torch.compile" in keyed for keyed in wrappers.values())


def uncompiled(model: Any) -> Any:
    """The module that torch.compile has wrapped, whose class and blocks say what it is; any other module itself."""
    return getattr(model, "_orig_mod", model)


class _Pass(TorchFunctionMode):
    """Lets every operation through as it is."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@functools.cache
def _kind(identity: str) -> type[_Pass]:
    return type("OwnCode", (_Pass,), {"__doc__": identity})


def own_code(identity: str) -> TorchFunctionMode:
    """While it is entered, torch.compile runs nothing that it compiled without it or under another identity, and the
    other way round.

    ComfyUI 0.33's TorchCompileModel drops every guard on `transformer_options`, and with them what tells one model's
    patches from another's. The kinds of torch function modes that are entered are part of every guard, of every piece
    that a graph is broken into. What has been compiled once under an identity is found again. An operation that is not
    compiled costs a Python call more.
    """
    return _kind(identity)()
