"""The newest node API: io (schema), ui, ComfyExtension, and names for input types (ComfyUI's comfy_api.latest)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from . import _io as io
from . import _ui as ui


class ComfyExtension(ABC):
    """What a pack's comfy_entrypoint returns."""

    async def on_load(self) -> None:  # noqa: B027  (optional hook)
        """Called once when the pack is loaded."""

    @abstractmethod
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """The pack's node classes."""


class Input:
    """Types of values on sockets, for annotations."""

    Image = torch.Tensor
    Mask = torch.Tensor
    Latent = dict[str, Any]


__all__ = ["ComfyExtension", "Input", "io", "ui"]
