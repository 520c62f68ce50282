"""What nodes import as `io`: the names of _io that stay."""

from typing import TYPE_CHECKING, Any

from comfy_api.latest import _io
from comfy_api.latest._io import *  # noqa: F403

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Say what a pack can write in place of a socket type that is not there."""
        if name.startswith("_"):
            raise AttributeError(f"comfy_api.latest.io has no {name!r}")
        import difflib

        near = difflib.get_close_matches(name, _io.__all__, 1)
        hint = f"it has {near[0]}, and " if near else ""
        raise AttributeError(
            f"comfy_api.latest.io has no {name!r}; {hint}io.Custom({name.upper()!r}) is a type of a pack's own"
        )
