"""Search aliases of a node, for hosts whose Schema knows them (newer than ComfyUI 0.3.64)."""

from __future__ import annotations

import dataclasses

from comfy_api.latest import io

_KNOWN = any(field.name == "search_aliases" for field in dataclasses.fields(io.Schema))


def aliases(*words: str) -> dict[str, list[str]]:
    """`io.Schema(..., **aliases("a", "b"))`: passes the keyword argument if the host's Schema has it."""
    if _KNOWN:
        return {"search_aliases": list(words)}
    return {}
