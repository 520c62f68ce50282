"""Answers questions about the host: its nodes, its models, the machine, and the server's features."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from typing import Any

from aiohttp import web

from ..host import Host
from .answers import answer, problem
from .paths import inside

HEADER_LIMIT = 16 * 1024 * 1024  # bytes; longer safetensors headers are not read
NOT_MODELS = ("custom_nodes", "configs")
# Attributes of a node class that are sent under their name in lower case.
WHEN_SET, WHEN_TRUE = ("OUTPUT_TOOLTIPS", "API_NODE", "ESSENTIALS_CATEGORY"), ("DEPRECATED", "EXPERIMENTAL", "DEV_ONLY")


class About:
    """The handlers of the routes; `add` registers them."""

    def __init__(self, host: Host, features: dict[str, Any]):
        self.host, self.features = host, features

    def add(self, routes: web.RouteTableDef) -> None:
        """Register every route."""
        routes.get("/object_info")(self.all_nodes)
        routes.get("/object_info/{node}")(self.one_node)
        routes.get("/embeddings")(self.embeddings)
        routes.get("/models")(self.model_kinds)
        routes.get("/models/{folder}")(self.models)
        routes.get("/experiment/models")(self.model_folders)
        routes.get("/experiment/models/{folder}")(self.model_files)
        routes.get("/view_metadata/{folder}")(self.metadata)
        routes.get("/system_stats")(self.machine)
        routes.get("/features")(self.can)
        routes.get("/node_replacements")(self.replacements)
        routes.get("/internal/logs")(self.no_log)
        routes.get("/internal/logs/raw")(self.no_log_entries)
        routes.patch("/internal/logs/subscribe")(self.accepted)
        routes.get("/internal/folder_paths")(self.folders)
        routes.get("/internal/files/{kind}")(self.files)

    async def all_nodes(self, request: web.Request) -> web.Response:
        """GET /object_info: the inputs and outputs of all nodes."""
        table = self.host.nodes.NODE_CLASS_MAPPINGS
        return answer(await asyncio.to_thread(lambda: {node_id: self._node(node_id) for node_id in list(table)}))

    async def one_node(self, request: web.Request) -> web.Response:
        """GET /object_info/NODE: the inputs and outputs of one node; an empty object if there is no such node."""
        node_id = request.match_info["node"]
        return answer({node_id: self._node(node_id)} if node_id in self.host.nodes.NODE_CLASS_MAPPINGS else {})

    def _node(self, node_id: str) -> dict[str, Any]:
        cls = self.host.nodes.NODE_CLASS_MAPPINGS[node_id]
        if hasattr(cls, "GET_NODE_INFO_V1"):
            return cls.GET_NODE_INFO_V1()
        inputs, outputs = cls.INPUT_TYPES(), cls.RETURN_TYPES
        info = {
            "input": inputs,
            "input_order": {group: list(entries) for group, entries in inputs.items()},
            "is_input_list": getattr(cls, "INPUT_IS_LIST", False),
            "output": outputs,
            "output_is_list": getattr(cls, "OUTPUT_IS_LIST", [False] * len(outputs)),
            "output_name": getattr(cls, "RETURN_NAMES", outputs),
            "name": node_id,
            "display_name": self.host.nodes.NODE_DISPLAY_NAME_MAPPINGS.get(node_id, node_id),
            "description": getattr(cls, "DESCRIPTION", ""),
            "python_module": getattr(cls, "RELATIVE_PYTHON_MODULE", "nodes"),
            "category": getattr(cls, "CATEGORY", "sd"),
            "output_node": getattr(cls, "OUTPUT_NODE", False) is True,
            "has_intermediate_output": getattr(cls, "HAS_INTERMEDIATE_OUTPUT", False) is True,
            "search_aliases": getattr(cls, "SEARCH_ALIASES", []),
        }
        info.update({attribute.lower(): getattr(cls, attribute) for attribute in WHEN_SET if hasattr(cls, attribute)})
        info.update({attribute.lower(): True for attribute in WHEN_TRUE if getattr(cls, attribute, False)})
        return info

    # models
    async def embeddings(self, request: web.Request) -> web.Response:
        """GET /embeddings: the names of the embeddings."""
        return answer([os.path.splitext(name)[0] for name in self.host.folders.get_filename_list("embeddings")])

    async def model_kinds(self, request: web.Request) -> web.Response:
        """GET /models: the kinds of models, such as checkpoints or loras."""
        return answer(list(self.host.folders.folder_names_and_paths))

    async def models(self, request: web.Request) -> web.Response:
        """GET /models/KIND: the file names of one kind of model."""
        kind = request.match_info["folder"]
        if kind not in self.host.folders.folder_names_and_paths:
            return web.Response(status=404)
        return answer(self.host.folders.get_filename_list(kind))

    async def model_folders(self, request: web.Request) -> web.Response:
        """GET /experiment/models: the kinds of models with their folders."""
        kinds = self.host.folders.folder_names_and_paths
        return answer(
            [
                {"name": kind, "folders": list(folders), "extensions": sorted(extensions)}
                for kind, (folders, extensions) in kinds.items()
                if kind not in NOT_MODELS
            ]
        )

    async def model_files(self, request: web.Request) -> web.Response:
        """GET /experiment/models/KIND: the files of one kind of model, each with the index of its folder."""
        kind = request.match_info["folder"]
        if kind not in self.host.folders.folder_names_and_paths:
            return web.Response(status=404)
        return answer(await asyncio.to_thread(self._files_of, kind))

    def _files_of(self, kind: str) -> list[dict[str, Any]]:
        folders = self.host.folders
        files = []
        for index, folder in enumerate(folders.get_folder_paths(kind)):
            names = folders.filter_files_extensions(
                folders.recursive_search(folder, [".git"])[0], folders.folder_names_and_paths[kind][1]
            )
            for name in names:
                try:
                    stat = os.stat(os.path.join(folder, name))
                except OSError:  # a link to a missing file, or a file that was just removed
                    continue
                files.append(
                    {
                        "name": name,
                        "pathIndex": index,
                        "modified": stat.st_mtime,
                        "created": stat.st_ctime,
                        "size": stat.st_size,
                    }
                )
        return files

    async def metadata(self, request: web.Request) -> web.Response:
        """GET /view_metadata/KIND?filename=: the metadata of a safetensors file."""
        kind, name = request.match_info["folder"], request.query.get("filename", "")
        if kind not in self.host.folders.folder_names_and_paths or not name.endswith(".safetensors"):
            return web.Response(status=404)
        paths = [inside(folder, name) for folder in self.host.folders.get_folder_paths(kind)]
        path = next((path for path in paths if os.path.isfile(path)), None)
        if path is None:
            metadata = None
        else:
            metadata = await asyncio.to_thread(_metadata, path)
        if metadata is None:
            return web.Response(status=404)
        return await asyncio.to_thread(answer, metadata)

    # the machine
    async def machine(self, request: web.Request) -> web.Response:
        """GET /system_stats."""
        return answer(await asyncio.to_thread(self._machine))

    def _machine(self) -> dict[str, Any]:
        import torch

        management, device, cpu = self.host.management, self.host.management.get_torch_device(), torch.device("cpu")
        return {
            "system": {
                "os": sys.platform,
                "ram_total": management.get_total_memory(cpu),
                "ram_free": management.get_free_memory(cpu),
                "comfyui_version": self.host.version,
                "required_frontend_version": None,
                "installed_templates_version": None,
                "required_templates_version": None,
                "comfy_package_versions": [],
                "python_version": sys.version,
                "pytorch_version": torch.__version__,
                "embedded_python": False,
                "deploy_environment": "comfyui_api_stubs",
                "argv": ["comfyui_api_stubs", "editor"],
            },
            "devices": [
                {
                    "name": management.get_torch_device_name(device),
                    "type": device.type,
                    "index": device.index,
                    "vram_total": management.get_total_memory(device),
                    "vram_free": management.get_free_memory(device),
                    "torch_vram_total": management.get_total_memory(device),
                    "torch_vram_free": management.get_free_memory(device),
                }
            ],
        }

    async def can(self, request: web.Request) -> web.Response:
        """GET /features: the features that the WebSocket also sends."""
        return answer(self.features)

    async def replacements(self, request: web.Request) -> web.Response:
        """GET /node_replacements: always empty."""
        return answer({})

    async def no_log(self, request: web.Request) -> web.Response:
        """GET /internal/logs: always empty, as the log is in the terminal."""
        return answer("")

    async def no_log_entries(self, request: web.Request) -> web.Response:
        """GET /internal/logs/raw: always empty, as the log is in the terminal."""
        return answer({"entries": [], "size": {"cols": 80, "rows": 24}})

    async def accepted(self, request: web.Request) -> web.Response:
        """PATCH /internal/logs/subscribe: accept it, but never send log entries."""
        return web.Response()

    async def folders(self, request: web.Request) -> web.Response:
        """GET /internal/folder_paths: the folders of each kind of model."""
        return answer({kind: list(folders) for kind, (folders, _) in self.host.folders.folder_names_and_paths.items()})

    async def files(self, request: web.Request) -> web.Response:
        """GET /internal/files/KIND: the files in the input, output or temp folder, newest first, written as
        "name.png [output]".
        """
        kind = request.match_info["kind"]
        folder = self.host.folders.get_directory_by_type(kind)
        if folder is None:
            return problem("Invalid directory type")
        files = []
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            path = os.path.join(folder, name)
            with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                if os.path.isfile(path) and not name.startswith("."):
                    files.append((-os.stat(path).st_mtime, f"{name} [{kind}]"))
        return answer([name for _, name in sorted(files)])


def _metadata(path: str) -> dict[str, Any] | None:
    """The "__metadata__" of a safetensors file; None if it has none or is not a safetensors file."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= HEADER_LIMIT:
            return None
        header = file.read(length)
    try:
        content = json.loads(header)
    except (ValueError, RecursionError):
        return None
    if isinstance(content, dict):
        return content.get("__metadata__")
    return None
