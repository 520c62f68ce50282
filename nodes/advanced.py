"""Inputs that a first run does not need: the editor folds them away behind "Show advanced inputs"."""

from __future__ import annotations

from typing import Any


def advanced(kind: Any, identifier: str, **declared: Any) -> Any:
    """`advanced(io.Int, "rank", default=16)` is `io.Int.Input("rank", default=16)`, folded away in the editor.

    Widgets take no `advanced` in ComfyUI 0.3.64; what is in `extra_dict` reaches the editor from every host.
    """
    made = kind.Input(identifier, **declared)
    made.extra_dict = {**made.extra_dict, "advanced": True}
    return made
