"""Opens the embedded host for a node pack: loads the pack, checks what its nodes say of themselves, finds its example
workflows and runs them.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import json
import logging
import os
import sys
import traceback
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import MODULES, install
from .node_checks import node_problems
from .opening import open_host
from .workflows import workflow
from .workflows.problem import WorkflowError
from .workflows.schema import catalogue

MOST_BYTES = 20_000_000  # of a workflow file
NOT_SEARCHED = {"node_modules", "__pycache__", "venv", "build", "dist", "tests"}
WEIGHT_FILES = (".safetensors", ".ckpt", ".pt", ".pth", ".bin", ".gguf", ".onnx", ".sft")
MEDIA_FILES = (".png", ".jpg", ".jpeg", ".webp", ".mp4", ".gif", ".wav", ".mp3", ".flac", ".glb")
FILES = (*WEIGHT_FILES, *MEDIA_FILES)
EXAMPLES = {"example_workflows", "example", "examples", "workflow", "workflows"}  # where ComfyUI looks for templates


class CannotRun(Exception):
    """An example workflow needs what is not here: other nodes, files, or a browser."""


class Failed(Exception):
    """The pack is wrong: it does not load, a node contradicts itself, a workflow fails."""


class Pack:
    """A pack on the embedded host. `nodes` are its own, by id; `wrong` says why it could not be loaded, and is empty
    when it was. `base` is an empty folder for models, inputs and outputs.
    """

    def __init__(self, path: Path, base: Path):
        self.path = path.resolve()
        open_folders(base)
        host = open_host(())
        self.loop, self.server = host.loop, host.server
        self.execution: Any = host.execution
        self.events: list[tuple[Any, Any]] = []
        self.server.send_sync = lambda event, data, sid=None: self.events.append((event, data))
        self.classes: dict[str, Any] = host.nodes.NODE_CLASS_MAPPINGS
        self.titles: dict[str, str] = host.nodes.NODE_DISPLAY_NAME_MAPPINGS
        before = dict(self.classes)
        self.wrong = self._load(host.nodes)
        self.nodes = {name: cls for name, cls in self.classes.items() if before.get(name) is not cls}

    def _load(self, nodes: Any) -> str:
        """Load the pack; returns why that failed, or nothing."""
        heard = _Heard()
        logging.getLogger().addHandler(heard)
        try:
            loaded = self.loop.run_until_complete(nodes.load_custom_node(str(self.path)))
        finally:
            logging.getLogger().removeHandler(heard)
        if loaded:
            return ""
        return "\n".join(heard.messages) if heard.error is None else why_not_loaded(heard.error)

    def check_loaded(self) -> None:
        """Raise Failed when the pack could not be loaded, or has no nodes."""
        if self.wrong:
            raise Failed(f"{self.path.name} does not load: {self.wrong}")
        if not self.nodes:
            raise Failed(f"{self.path.name} loads, but it has no nodes")

    def check_node(self, node_id: str) -> None:
        """Raise Failed with everything that a node says of itself and that cannot be."""
        problems = list(node_problems(self.nodes[node_id]))
        if problems:
            raise Failed("\n".join(problems))

    # --- workflows ----------------------------------------------------------------------------------------------------

    def workflows(self) -> list[Path]:
        """The pack's JSON files that are workflows in either format, and broken ones where examples lie."""
        return [path for path in json_files(self.path) if workflow_format(path) or is_broken_example(path)]

    def prompt(self, path: Path) -> dict[str, Any]:
        """A workflow file in the API format. Raises CannotRun when only a browser can read it, Failed when the file is
        broken.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise Failed(f"it is not JSON ({error}); export it again from ComfyUI") from error
        if workflow_format(path) == "api":
            return {name: node for name, node in data.items() if isinstance(node, dict) and "class_type" in node}
        return converted(data, path, self.classes, self.titles)

    def _refuse_missing(self, wanted: set[Any]) -> None:
        missing = sorted(str(name) for name in wanted if name not in self.classes)
        if missing:
            near = sorted({name for one in missing for name in difflib.get_close_matches(one, self.nodes, 1, 0.75)})
            hint = f"; the pack has {', '.join(near)}" if near else ""
            raise CannotRun(f"neither the pack nor the embedded host has {', '.join(missing)}{hint}")

    def run(self, prompt: dict[str, Any]) -> dict[str, Any]:
        """Validate and execute an API workflow; returns what its nodes show, by node. Raises Failed or CannotRun."""
        self._refuse_missing({node["class_type"] for node in prompt.values()})
        identity = str(uuid.uuid4())
        with what_is_told_not_logged():
            valid, error, outputs, node_errors = self.loop.run_until_complete(
                self.execution.validate_prompt(identity, prompt, None)
            )
        if not valid or node_errors:
            refuse_invalid(error, node_errors)
        start = len(self.events)
        executor = self.execution.PromptExecutor(self.server)
        extra = {"client_id": "pytest", "extra_pnginfo": {}}  # as from an editor, whose workflow is not known
        with what_is_told_not_logged():
            self.loop.run_until_complete(executor.execute_async(prompt, identity, extra, outputs))
        self.server.client_id = None
        for event, data in self.events[start:]:
            if event in ("execution_error", "execution_interrupted"):
                where = f"node {data['node_id']} ({data['node_type']})"
                told = f"{data.get('exception_type', event)}: {data.get('exception_message', '').strip()}"
                stack = [entry.rstrip() for entry in data.get("traceback", []) if MODULES not in entry]
                raise Failed("\n".join([f"{where}: {told}", *stack]))
        return executor.history_result["outputs"]


class _Heard(logging.Handler):
    """What is logged, and the error that is being handled meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        self.error: BaseException | None = None

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self.error = sys.exc_info()[1] or self.error


@contextlib.contextmanager
def what_is_told_not_logged() -> Iterator[None]:
    """Keep the host from logging the errors that Failed tells."""
    execution = os.path.join(MODULES, "execution.py")

    def is_other(record: logging.LogRecord) -> bool:
        return record.pathname != execution or record.levelno < logging.ERROR

    logging.getLogger().addFilter(is_other)
    try:
        yield
    finally:
        logging.getLogger().removeFilter(is_other)


def why_not_loaded(error: BaseException) -> str:
    """The error, what to do about it, and where in the pack it came up."""
    root = error.__cause__ or error
    frames = [frame for frame in traceback.extract_tb(root.__traceback__) if _is_of_the_pack(frame.filename)]
    said = f"{error}" if error.__cause__ else f"{type(error).__name__}: {error}"
    return "\n".join([said + _remedy(root), *(entry.rstrip() for entry in traceback.format_list(frames))])


def _is_of_the_pack(filename: str) -> bool:
    return not filename.startswith((MODULES, "<frozen"))


def _remedy(error: BaseException) -> str:
    """What to do about a module that is not there."""
    if not isinstance(error, ImportError) or not error.name:
        return ""
    package = error.name.partition(".")[0]
    if package in {entry.name.partition(".")[0] for entry in Path(MODULES).iterdir()}:
        lists = "`python -m comfyui_api_stubs compare --comfyui PATH` lists what it has not"
        return f". The embedded host does not have it ({lists}): try this pack in a ComfyUI"
    if isinstance(error, ModuleNotFoundError) and package.isidentifier():
        return f". Install what the pack requires; {package} is not installed"
    return ""


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
    """ "api" or "editor"; None when the file is not a workflow."""
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


def is_broken_example(path: Path) -> bool:
    """Whether a file lies where examples do and is not JSON."""
    if path.parent.name not in EXAMPLES:
        return False
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return True
    return False


def converted(data: dict, path: Path, classes: dict[str, Any], titles: dict[str, str]) -> dict[str, Any]:
    """A workflow of the editor in the API format. Raises CannotRun when only a browser can read it, Failed when the
    file is broken.
    """
    try:
        return workflow.parse(data, str(path)).graph(catalogue(classes, titles))
    except WorkflowError as error:
        if all(one.unread for one in error.problems):
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
        details = error.get("details") or ""
        if error.get("type") == "prompt_no_outputs":
            details = "end it with a node that shows or saves something (Preview Image, or one with OUTPUT_NODE = True)"
        lines = [f"{error['message']}: {details}" if details else error["message"]]
    raise Failed("\n".join(lines))
