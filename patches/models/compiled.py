"""Models under torch.compile: how to detect them, and separate compiled code for a call whose options no
guard checks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch.overrides import TorchFunctionMode


def is_compiled(wrappers: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether ComfyUI's own compile wrapper (TorchCompileModel, and other packs' nodes that use it) is among {kind:
    {key: wrappers}}.
    """
    return any("torch.compile" in keyed for keyed in wrappers.values())


def uncompiled(model: Any) -> Any:
    """The module inside a torch.compile wrapper, whose class and blocks identify it; any other module itself."""
    return getattr(model, "_orig_mod", model)


class _Pass(TorchFunctionMode):
    """Passes every operation through unchanged."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@functools.cache
def _kind(identity: str) -> type[_Pass]:
    return type("OwnCode", (_Pass,), {"__doc__": identity})


def own_code(identity: str) -> TorchFunctionMode:
    """Inside this context, torch.compile uses only code it compiled under the same identity, and outside only code
    compiled without it.

    ComfyUI 0.33's TorchCompileModel drops every guard on `transformer_options`, and with them what distinguishes one
    model's patches from another's. The types of active torch function modes are part of every guard, for every piece of
    a broken graph. Code compiled once under an identity is reused. Each operation that is not compiled costs one extra
    Python call.
    """
    return _kind(identity)()
