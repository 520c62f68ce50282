"""Opens the embedded host for a node pack: loads the pack, checks what its nodes say of themselves, finds its example
workflows and runs them.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import logging
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import install

MOST_BYTES = 20_000_000  # of a workflow file
NOT_SEARCHED = {"node_modules", "__pycache__", "venv", "build", "dist", "tests"}
WEIGHT_FILES = (".safetensors", ".ckpt", ".pt", ".pth", ".bin", ".gguf", ".onnx", ".sft")
MEDIA_FILES = (".png", ".jpg", ".jpeg", ".webp", ".mp4", ".gif", ".wav", ".mp3", ".flac", ".glb")
FILES = (*WEIGHT_FILES, *MEDIA_FILES)
INPUT_OPTIONS = {"required", "optional", "hidden"}


class CannotRun(Exception):
    """An example workflow needs what is not here: other nodes, files, or a reader for its format."""


class Failed(Exception):
    """The pack is wrong: it does not load, a node contradicts itself, a workflow fails."""


class Pack:
    """A pack on the embedded host. `nodes` are its own, by id; `log` is what was logged while it was loaded, and
    `loaded` says whether that went well. `base` is an empty folder for models, inputs and outputs.
    """

    def __init__(self, path: Path, base: Path):
        self.path = path.resolve()
        open_folders(base)
        nodes = importlib.import_module("nodes")
        server = importlib.import_module("server")
        self.execution: Any = importlib.import_module("execution")
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self.server = server.PromptServer(self.loop)
        self.events: list[tuple[Any, Any]] = []
        self.server.send_sync = lambda event, data, sid=None: self.events.append((event, data))
        self.classes: dict[str, Any] = nodes.NODE_CLASS_MAPPINGS
        self.titles: dict[str, str] = nodes.NODE_DISPLAY_NAME_MAPPINGS
        self.loop.run_until_complete(nodes.init_extra_nodes(init_custom_nodes=False, init_api_nodes=False))
        before = dict(self.classes)
        self.loaded, self.log = self._load(nodes)
        self.nodes = {name: cls for name, cls in self.classes.items() if before.get(name) is not cls}

    def _load(self, nodes: Any) -> tuple[bool, str]:
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger().addHandler(handler)
        try:
            loaded = self.loop.run_until_complete(nodes.load_custom_node(str(self.path)))
        finally:
            logging.getLogger().removeHandler(handler)
        return loaded, "\n".join(records)

    def check_loaded(self) -> None:
        """Raise Failed when the pack could not be loaded, or has no nodes."""
        if not self.loaded:
            raise Failed(f"{self.path.name} does not load:\n{self.log}")
        if not self.nodes:
            raise Failed(f"{self.path.name} loads, but it has no nodes")

    def check_node(self, node_id: str) -> None:
        """Raise Failed with everything that a node says of itself and that cannot be."""
        problems = list(node_problems(self.nodes[node_id]))
        if problems:
            raise Failed("\n".join(problems))

    # --- workflows ----------------------------------------------------------------------------------------------------

    def workflows(self) -> list[Path]:
        """The pack's JSON files that are workflows, in either format."""
        return [path for path in json_files(self.path) if workflow_format(path)]

    def prompt(self, path: Path) -> dict[str, Any]:
        """A workflow file in the API format. Raises CannotRun when the editor's format cannot be read
        here, Failed when the file is broken.
        """
        data = json.loads(path.read_text(encoding="utf-8"))
        if workflow_format(path) == "api":
            return {name: node for name, node in data.items() if isinstance(node, dict) and "class_type" in node}
        return converted(data, path, self.classes, self.titles)

    def _refuse_missing(self, wanted: set[Any]) -> None:
        missing = sorted(str(name) for name in wanted if name not in self.classes)
        if missing:
            raise CannotRun(f"the embedded host has no {', '.join(missing)}")

    def run(self, prompt: dict[str, Any]) -> dict[str, Any]:
        """Validate and execute an API workflow; returns what its nodes show, by node. Raises Failed or CannotRun."""
        self._refuse_missing({node["class_type"] for node in prompt.values()})
        identity = str(uuid.uuid4())
        valid, error, outputs, node_errors = self.loop.run_until_complete(
            self.execution.validate_prompt(identity, prompt, None)
        )
        if not valid or node_errors:
            refuse_invalid(error, node_errors)
        start = len(self.events)
        executor = self.execution.PromptExecutor(self.server)
        extra = {"client_id": "pytest", "extra_pnginfo": {}}  # as from an editor, whose workflow is not known
        self.loop.run_until_complete(executor.execute_async(prompt, identity, extra, outputs))
        self.server.client_id = None
        for event, data in self.events[start:]:
            if event in ("execution_error", "execution_interrupted"):
                where = f"node {data['node_id']} ({data['node_type']})"
                told = f"{data.get('exception_type', event)}: {data.get('exception_message', '').strip()}"
                raise Failed("\n".join([f"{where}: {told}", *data.get("traceback", [])]))
        return executor.history_result["outputs"]


def open_folders(base: Path) -> None:
    """Have the embedded host keep everything in a folder. Raises CannotRun when a real ComfyUI would be used."""
    if not install() and not is_embedded():
        raise CannotRun("a ComfyUI is importable here, and packs are tested on the embedded host: take it off the path")
    args = importlib.import_module("comfy.cli_args").args
    if args.base_directory is None:
        args.base_directory = str(base)
    folders = importlib.import_module("folder_paths")
    for name in ("input", "output", "temp", "user"):
        (base / name).mkdir(parents=True, exist_ok=True)
        getattr(folders, f"set_{name}_directory")(str(base / name))
    from PIL import Image

    Image.new("RGB", (64, 64), (120, 160, 200)).save(base / "input" / "example.png")  # a new ComfyUI has one


def is_embedded() -> bool:
    """Whether the `comfy` on the path belongs to another copy of the embedded host, such as Graft's own."""
    spec = importlib.util.find_spec("comfy")
    return spec is not None and Path(spec.origin or "").parents[2].name == "comfyui_api_stubs"


# --- nodes ------------------------------------------------------------------------------------------------------------


def node_problems(cls: Any) -> Iterator[str]:
    """What is wrong with what a node class says of itself."""
    try:
        spec = cls.INPUT_TYPES()
    except Exception as error:  # noqa: BLE001  (a pack's own code)
        yield f"INPUT_TYPES raises {type(error).__name__}: {error}"
        return
    unknown = sorted(set(spec) - INPUT_OPTIONS)
    if unknown:
        yield f"INPUT_TYPES has {', '.join(map(repr, unknown))}; it may have required, optional and hidden"
    inputs = {**spec.get("required", {}), **spec.get("optional", {})}
    for name, entry in inputs.items():
        yield from input_problems(name, entry)
    yield from output_problems(cls)
    yield from call_problems(cls, [*inputs, *spec.get("hidden", {})])


def input_problems(name: str, entry: Any) -> Iterator[str]:
    """What is wrong with one input."""
    if not isinstance(entry, tuple | list) or not entry:
        yield f"input {name}: it must be a tuple (type,) or (type, options), not {entry!r}"
        return
    options = entry[1] if len(entry) > 1 else {}
    if not isinstance(options, dict):
        yield f"input {name}: its options must be a dict, not {options!r}"
        return
    choices = entry[0] if isinstance(entry[0], list) else options.get("options")
    default = options.get("default")
    if entry[0] in ("INT", "FLOAT") and isinstance(default, int | float):
        low, high = options.get("min", default), options.get("max", default)
        if not low <= default <= high:
            yield f"input {name}: its default {default} is not from {low} to {high}"
    if entry[0] == "COMBO" or isinstance(entry[0], list):
        is_choice = isinstance(choices, list | tuple) and default in choices
        if default is not None and choices and not is_choice and not isinstance(default, list):
            yield f"input {name}: its default {default!r} is none of its choices"


def output_problems(cls: Any) -> Iterator[str]:
    """What is wrong with the outputs."""
    kinds = getattr(cls, "RETURN_TYPES", None)
    if not isinstance(kinds, tuple | list):
        yield f"RETURN_TYPES must be a tuple of types, not {kinds!r}"
        return
    for attribute in ("RETURN_NAMES", "OUTPUT_IS_LIST"):
        listed = getattr(cls, attribute, None)
        if listed is not None and len(listed) != len(kinds):
            yield f"{attribute} has {len(listed)} entries for {len(kinds)} outputs"


def call_problems(cls: Any, names: list[str]) -> Iterator[str]:
    """Whether the function can be called with the inputs."""
    name = getattr(cls, "FUNCTION", None)
    is_v3 = hasattr(cls, "GET_SCHEMA")
    function = getattr(cls, "execute" if is_v3 else str(name), None)
    if not callable(function):
        yield f"FUNCTION is {name!r}, and there is no such method"
        return
    if is_v3:
        cls.GET_SCHEMA()
        names = [name for name in names if name not in cls.INPUT_TYPES().get("hidden", {})]
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    taken = {parameter.name for parameter in parameters}
    refused = sorted(set(names) - taken)
    if refused:
        yield f"{function.__name__} takes no {', '.join(refused)}, which INPUT_TYPES has"


# --- workflow files ---------------------------------------------------------------------------------------------------


def json_files(folder: Path) -> Iterator[Path]:
    """The JSON files of a pack, hidden folders and those of tools left out."""
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in NOT_SEARCHED and not name.startswith("."))
        for name in sorted(files):
            path = Path(root, name)
            if name.endswith(".json") and path.stat().st_size <= MOST_BYTES:
                yield path


def workflow_format(path: Path) -> str | None:
    """ "api" or "editor"; None when the file is no workflow."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict):
        return None
    if isinstance(data.get("nodes"), list) and isinstance(data.get("links"), list):
        return "editor"
    is_api = bool(data) and all(isinstance(node, dict) and "class_type" in node for node in data.values())
    return "api" if is_api else None


def converted(data: dict, path: Path, classes: dict[str, Any], titles: dict[str, str]) -> dict[str, Any]:
    """A workflow of the editor in the API format, by Graft's reader if that is installed. Raises CannotRun when the
    reader is not there or cannot read it, Failed when the file is broken.
    """
    try:
        reader = importlib.import_module("graft_nodes.headless.workflow")
        schema = importlib.import_module("graft_nodes.headless.schema")
        problem = importlib.import_module("graft_nodes.headless.problem")
    except ModuleNotFoundError as error:
        raise CannotRun(
            "it is in the editor's format: install graft-nodes, or save it with Export (API) in ComfyUI"
        ) from error
    try:
        return reader.parse(data, str(path)).graph(schema.catalogue(classes, titles))
    except problem.WorkflowError as error:
        if all(getattr(one, "unread", False) for one in error.problems):
            raise CannotRun(str(error)) from error
        raise Failed(str(error)) from error


def refuse_invalid(error: dict | None, node_errors: dict[str, dict]) -> None:
    """Raise CannotRun when only files are missing, else Failed with every problem."""
    lines, files = [], []
    for node_id, found in (node_errors or {}).items():
        for entry in found["errors"]:
            value = (entry.get("extra_info") or {}).get("received_value")
            if isinstance(value, str) and value.lower().endswith(FILES):
                files.append(value)
            lines.append(f"node {node_id} ({found['class_type']}): {entry['message']}: {entry['details']}")
    if lines and len(files) == len(lines):
        raise CannotRun(f"it needs {', '.join(sorted(set(files)))}")
    if not lines and error:
        lines = [f"{error['message']}: {error.get('details', '')}"]
    raise Failed("\n".join(lines))
