"""A host for tests: calls nodes and runs workflows in whichever ComfyUI is open, the real one or the embedded one, in
the same way.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import os
import uuid
from typing import Any

import torch

CAPTURE = "TestCapture"


class Capture:
    """An output node that hands what reaches it to the test; it never counts as cached."""

    values: dict[str, Any] = {}  # noqa: RUF012  (one place for all instances: the executor builds them)

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        return {"required": {"value": ("*", {}), "name": ("STRING", {"default": ""})}}

    @classmethod
    def VALIDATE_INPUTS(cls, input_types: dict) -> bool:
        return True

    @classmethod
    def IS_CHANGED(cls, **inputs: Any) -> float:
        return float("nan")

    RETURN_TYPES = ()
    FUNCTION = "keep"
    OUTPUT_NODE = True
    INPUT_IS_LIST = True
    CATEGORY = "test"

    def keep(self, value: list, name: list) -> dict:
        Capture.values[name[0]] = value[0] if len(value) == 1 else value
        return {}


class Host:
    """The open ComfyUI.

    `call(id, **inputs)` runs one node; `run(prompt)` validates and executes an API-format workflow; `events` holds what
    was sent. `input`, `output`, `temp`, `models` are this session's folders.
    """

    def __init__(self, base: str):
        import execution
        import folder_paths
        import server

        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self.server = server.PromptServer(self.loop)
        self.server.client_id = None
        self.events: list[tuple[str, Any]] = []
        self.server.send_sync = lambda event, data, sid=None: self.events.append((event, data))
        self.folder_paths, self.execution = folder_paths, execution
        self.input, self.output, self.temp = (os.path.join(base, name) for name in ("input", "output", "temp"))
        self.models = os.path.join(base, "models")
        for name in ("input", "output", "temp"):
            os.makedirs(getattr(self, name), exist_ok=True)
            getattr(folder_paths, f"set_{name}_directory")(getattr(self, name))
        for kind in ("loras", "diffusion_models", "checkpoints", "vae"):
            os.makedirs(os.path.join(self.models, kind))
            # Instead of the folders that there are: what lies in those is the user's, or of the demo.
            suffixes = folder_paths.folder_names_and_paths[kind][1]
            folder_paths.folder_names_and_paths[kind] = ([os.path.join(self.models, kind)], suffixes)
        import nodes

        self.nodes = nodes
        self.loop.run_until_complete(nodes.init_extra_nodes(init_custom_nodes=False, init_api_nodes=False))
        nodes.NODE_CLASS_MAPPINGS[CAPTURE] = Capture
        self.fresh()

    def register(self, *classes: type) -> None:
        """Make V3 node classes known under their schema's id, as loading a pack does."""
        for cls in classes:
            self.nodes.NODE_CLASS_MAPPINGS[cls.GET_SCHEMA().node_id] = cls  # type: ignore[attr-defined]

    def node(self, node_id: str) -> type:
        """The class of a node."""
        if node_id not in self.nodes.NODE_CLASS_MAPPINGS:
            raise KeyError(f"no node {node_id!r} on this host")
        return self.nodes.NODE_CLASS_MAPPINGS[node_id]

    def fresh(self, cache: str = "CLASSIC", **limits: float) -> None:
        """A new executor: nothing is cached, as after a restart. `cache` and `limits` are CacheType's name and
        cache_args.
        """
        kind, types = self.execution.PromptExecutor, self.execution.CacheType
        if cache == "NONE" and cache not in types.__members__:
            cache = "DEPENDENCY_AWARE"  # what --cache-none chooses in ComfyUI 0.3.64
        settings: dict[str, Any] = {}
        if "cache_args" in inspect.signature(kind).parameters:
            settings["cache_args"] = {"lru": 0, "ram": 1.0, "ram_inactive": 1.0, **limits}
        else:
            settings["cache_size"] = limits.get("lru")
        self.executor = kind(self.server, cache_type=types[cache], **settings)

    def defaults(self, node_id: str) -> dict[str, Any]:
        """The value of every widget of a node as the editor would send it."""
        spec, values = self.node(node_id).INPUT_TYPES(), {}  # type: ignore[attr-defined]
        for name, entry in {**spec.get("required", {}), **spec.get("optional", {})}.items():
            options = entry[1] if len(entry) > 1 else {}
            choices = entry[0] if isinstance(entry[0], list) else options.get("options")
            if "default" in options:
                values[name] = options["default"]
            elif choices:
                values[name] = choices[0]
        return values

    def call(self, node_id: str, **inputs: Any) -> tuple:
        """Run one node under inference mode, its widgets' defaults filled in; returns its outputs as a tuple."""
        cls: Any = self.node(node_id)
        values = {**self.defaults(node_id), **inputs}
        if getattr(cls, "INPUT_IS_LIST", False):
            values = {name: value if isinstance(value, list) else [value] for name, value in values.items()}
        with torch.inference_mode():
            v3 = hasattr(cls, "PREPARE_CLASS_CLONE")
            result = (cls.PREPARE_CLASS_CLONE(None).execute if v3 else getattr(cls(), cls.FUNCTION))(**values)
            if inspect.isawaitable(result):
                result = self.loop.run_until_complete(result)
        if isinstance(result, dict):
            result = result.get("result", ())
        return tuple(getattr(result, "args", result) or ())

    def validate(self, prompt: dict) -> tuple:
        """ComfyUI's own answer for a workflow: (valid, error, outputs that can run, errors by node)."""
        arguments = (str(uuid.uuid4()), prompt, None)
        return self.loop.run_until_complete(self.execution.validate_prompt(*arguments))

    def run(
        self, prompt: dict, capture: dict[str, list] | None = None, extra_data: dict | None = None
    ) -> dict[str, Any]:
        """Validate and execute an API-format workflow.

        `capture` maps a name to a link ["node id", output]; the values come back in result["captured"][name]. The
        result also has success, valid, errors (validation: {node id: [error…]}, or {"": [error]} for the whole;
        execution: {node id: [error data]}), history (ui outputs by node), executed (ids that ran, in order), cached,
        events.
        """
        prompt = copy.deepcopy(prompt)
        Capture.values = {}
        for name, link in (capture or {}).items():
            prompt[f"capture {name}"] = {
                "class_type": CAPTURE,
                "inputs": {"value": list(link), "name": name},
            }
        start = len(self.events)
        valid, error, outputs, node_errors = self.validate(prompt)
        if not valid or node_errors:
            errors = {node: found["errors"] for node, found in (node_errors or {}).items()} or {"": [error]}
            empty = {"history": {}, "captured": {}, "executed": [], "cached": [], "events": []}
            return {"valid": False, "success": False, "errors": errors, **empty}
        identity = str(uuid.uuid4())
        self.loop.run_until_complete(
            self.executor.execute_async(prompt, identity, {"client_id": "test", **(extra_data or {})}, outputs)
        )
        self.server.client_id = None
        events = self.events[start:]
        failed = [data for event, data in events if event in ("execution_error", "execution_interrupted")]
        cached = [node for event, data in events if event == "execution_cached" for node in data["nodes"]]
        ran = [data["node"] for event, data in events if event == "executing" and data["node"] is not None]
        return {
            "valid": True,
            "success": not failed,
            "errors": {data["node_id"]: [data] for data in failed},
            "history": self.executor.history_result["outputs"] if not failed else {},
            "captured": dict(Capture.values),
            "executed": list(dict.fromkeys(ran)),
            "cached": cached,
            "events": events,
        }
