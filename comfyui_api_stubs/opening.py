"""Opens the embedded host, or the ComfyUI that is importable, in this process."""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Sequence
from pathlib import Path

from . import install
from .caching import Caching
from .host import Host
from .host_error import HostError


def open_host(packs: Sequence[str]) -> Host:
    """Import the host's modules, make its folders in the current one, and load its own nodes and those of some packs,
    each a folder or a .py file. Raises HostError when a pack does not load.
    """
    install()
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    names = ("server", "nodes", "execution", "folder_paths", "comfy.model_management", "comfy.utils")
    server, nodes, execution, folders, management, utils = (importlib.import_module(name) for name in names)
    version = importlib.import_module("comfyui_version").__version__
    prompt_server = server.PromptServer(loop)
    for folder in (folders.get_input_directory(), folders.get_output_directory(), folders.get_temp_directory()):
        os.makedirs(folder, exist_ok=True)
    loop.run_until_complete(nodes.init_extra_nodes(init_custom_nodes=False, init_api_nodes=False))
    for pack in packs:
        if not loop.run_until_complete(nodes.load_custom_node(str(Path(pack).absolute()))):
            raise HostError(f"--pack {pack} did not load; the log above says why")
    return Host(loop, prompt_server, nodes, execution, folders, management, utils, Caching(), version)
