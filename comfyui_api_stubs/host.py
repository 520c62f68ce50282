"""An open host: what the editor's server and whoever runs workflows need of a ComfyUI, real or embedded."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from .caching import Caching


@dataclass(frozen=True)
class Host:
    """ComfyUI's modules, its event loop and its server object; `caching` says which results of nodes are kept."""

    loop: asyncio.AbstractEventLoop
    server: Any
    nodes: ModuleType
    execution: ModuleType
    folders: ModuleType
    management: ModuleType
    utils: ModuleType
    caching: Caching
    version: str  # ComfyUI's, or that of whoever brings the embedded host
