"""What a cache outside of ComfyUI derives from (ComfyUI's comfy_api.latest._caching)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass
class CacheContext:
    """Whose result it is."""

    node_id: str
    class_type: str
    cache_key_hash: str


@dataclass
class CacheValue:
    """A node's result."""

    outputs: list
    ui: dict | None = None


class CacheProvider(ABC):
    """Keeps results where other hosts find them too."""

    @abstractmethod
    async def on_lookup(self, context: CacheContext) -> CacheValue | None:
        """The result, or None when it is not kept."""

    @abstractmethod
    async def on_store(self, context: CacheContext, value: CacheValue) -> None:
        """Keep a result."""

    def should_cache(self, context: CacheContext, value: CacheValue | None = None) -> bool:
        """Whether to ask and to keep."""
        return True

    def on_prompt_start(self, prompt_id: str) -> None:  # noqa: B027  (optional hook)
        """A workflow begins."""

    def on_prompt_end(self, prompt_id: str) -> None:  # noqa: B027  (optional hook)
        """A workflow ended."""
