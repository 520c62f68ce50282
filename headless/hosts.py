"""Which host runs a workflow (a real ComfyUI or the embedded one) and how it is opened in this process."""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from .. import comfyui_api_stubs
from . import log, signals
from .problem import HostError

PACKAGE = Path(__file__).absolute().parent.parent
LANDMARKS = ("comfy/model_management.py", "execution.py", "nodes.py", "folder_paths.py", "server.py")


@dataclass(frozen=True)
class Choice:
    """The host to use: the folder of a ComfyUI, or None for the embedded host; `reason` says who named it."""

    root: Path | None
    reason: str

    def __str__(self) -> str:
        if self.root is None:
            return f"Graft {graft_version()}'s embedded host ({self.reason})"
        return f"ComfyUI {comfyui_version(self.root)} at {self.root} ({self.reason})"


@dataclass(frozen=True)
class Host:
    """An open host: ComfyUI's modules (real or embedded), its event loop and its server object."""

    choice: Choice
    loop: asyncio.AbstractEventLoop
    server: Any
    nodes: ModuleType
    execution: ModuleType
    folders: ModuleType
    management: ModuleType
    utils: ModuleType
    not_imported: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        if self.choice.root is None:
            return "embedded"
        return "ComfyUI"

    @property
    def version(self) -> str:
        if self.choice.root is None:
            return graft_version()
        return comfyui_version(self.choice.root)


def graft_version() -> str:
    """Graft's own version: of the installed distribution, else of the pyproject.toml beside the package."""
    try:
        return importlib.metadata.version("graft-nodes")
    except importlib.metadata.PackageNotFoundError:
        found = re.search(
            r'^version = "([^"]+)"', (PACKAGE / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
        )
        if found:
            return found.group(1)
        return "of unknown version"


def comfyui_version(root: Path) -> str:
    """The version that a ComfyUI folder says it has."""
    path = root / "comfyui_version.py"
    if path.is_file():
        found = re.search(r'__version__ = "([^"]+)"', path.read_text(encoding="utf-8"))
    else:
        found = None
    if found:
        return found.group(1)
    return "of unknown version"


def choose(comfyui: str | None, embedded: bool, environment: Mapping[str, str], package: Path = PACKAGE) -> Choice:
    """The host that --comfyui, COMFYUI_PATH or the folder that Graft is installed in names, else the embedded one.

    Raises HostError when what is named is not a ComfyUI: nothing else is taken in its place."""
    if embedded:
        return Choice(None, "asked for by --embedded")
    for folder, reason in ((comfyui, "named by --comfyui"), (environment.get("COMFYUI_PATH"), "named by COMFYUI_PATH")):
        if folder:
            root = folder_named(folder, reason)
            missing = [name for name in LANDMARKS if not (root / name).is_file()]
            if missing:
                raise HostError(f"{root} ({reason}) is not a ComfyUI: it has no {', '.join(missing)}")
            return Choice(root, reason)
    for place in (package, package.resolve()):
        root = place.parent.parent
        if place.parent.name == "custom_nodes" and all((root / name).is_file() for name in LANDMARKS):
            return Choice(root, "Graft is installed in it")
    return Choice(None, "no ComfyUI was named")


def folder_named(name: str, what: str) -> Path:
    """The absolute path of a folder that an argument names; HostError when no folder can be called so."""
    try:
        path = Path(name).expanduser().absolute()
        os.stat(path)
    except FileNotFoundError:
        return path
    except (OSError, ValueError, RuntimeError) as error:
        raise HostError(f"{what}: {name[:100]!r} is not a valid folder name ({error})"[:400]) from error
    return path


def open_host(choice: Choice, cpu: bool, input_folder: str | None, output_folder: str | None) -> Host:
    """Import the host's modules, set its folders and load its own nodes and Graft's. Raises HostError with what to do
    when that fails.
    """
    if input_folder is not None and not folder_named(input_folder, "--input").is_dir():
        raise HostError(f"--input {input_folder}: no such folder")
    if output_folder is not None:
        folder_named(output_folder, "--output")
    with signals.stopping():
        return _opened(choice, cpu, input_folder, output_folder)


def _opened(choice: Choice, cpu: bool, input_folder: str | None, output_folder: str | None) -> Host:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    if choice.root is None:
        _import_embedded()
    else:
        _import_comfyui(choice.root)
    import comfy.cli_args

    if cpu or not _accelerator():
        comfy.cli_args.args.cpu = True
    try:
        names = ("folder_paths", "comfy.utils", "execution", "nodes", "server", "comfy.model_management")
        folders, utils, execution, nodes, server, management = (importlib.import_module(name) for name in names)
    except ImportError as error:
        raise HostError(_import_failure(choice, error)) from error
    if choice.root is not None:
        _configure_comfyui(choice.root, folders)
    host = Host(choice, loop, server.PromptServer(loop), nodes, execution, folders, management, utils)
    _set_folders(host, input_folder, output_folder)
    load_nodes(host)
    return host


def load_other_packs(host: Host) -> None:
    """Load the other custom nodes (and the API nodes) of a real ComfyUI."""
    with signals.stopping():
        for name in ("init_builtin_api_nodes", "init_external_custom_nodes"):
            host.loop.run_until_complete(getattr(host.nodes, name)())


def missing_requirements(root: Path) -> list[str]:
    """The packages of a ComfyUI's requirements.txt that are not installed here."""
    path = root / "requirements.txt"
    if path.is_file():
        lines = path.read_text(encoding="utf-8").splitlines()
    else:
        lines = []
    names = [re.split(r"[ <>=!~;\[]", line.strip(), maxsplit=1)[0] for line in lines]
    return [name for name in names if name and not name.startswith(("#", "-")) and not _installed(name)]


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _accelerator() -> bool:
    import torch

    xpu = getattr(torch, "xpu", None)
    return torch.cuda.is_available() or torch.backends.mps.is_available() or bool(xpu and xpu.is_available())


def _import_embedded() -> None:
    if not comfyui_api_stubs.install():
        spec = importlib.util.find_spec("comfy")
        if spec:
            where = ", ".join(spec.submodule_search_locations or [])
        else:
            where = "?"
        raise HostError(
            f"the embedded host cannot start: another package named 'comfy' is importable from {where}; run from"
            " another folder, or name that ComfyUI with --comfyui"
        )


def _import_comfyui(root: Path) -> None:
    """Put a ComfyUI's folder on the path and import its options (not parsing our command line)."""
    if "comfy" in sys.modules:
        opened = Path(next(iter(sys.modules["comfy"].__path__))).parent
        if opened.resolve() != root.resolve():
            raise HostError(
                f"another host is open in this process already, at {opened}; start a new process for {root}"
            )
        return
    sys.path.insert(0, str(root))
    try:
        import comfy.options  # noqa: F401
        import utils.extra_config  # noqa: F401  (before ComfyUI puts comfy/, which has a utils of its own, on the path)
        from comfy.cli_args import args
    except ImportError as error:
        raise HostError(_import_failure(Choice(root, "chosen"), error)) from error
    if not _installed("comfyui-frontend-package") and args.front_end_root is None:
        args.front_end_root = str(PACKAGE / "web")  # no browser is served; ComfyUI only wants a folder


def _configure_comfyui(root: Path, folders: ModuleType) -> None:
    """The model folders that ComfyUI's own start-up adds: extra_model_paths.yaml and those below the output folder."""
    from utils.extra_config import load_extra_path_config

    config = root / "extra_model_paths.yaml"
    if config.is_file():
        load_extra_path_config(str(config))
    for name in ("checkpoints", "clip", "vae", "diffusion_models", "loras"):
        folders.add_model_folder_path(name, os.path.join(folders.get_output_directory(), name))


def _set_folders(host: Host, input_folder: str | None, output_folder: str | None) -> None:
    """Point the host's input and output folders where asked, and make the folders it works with."""
    for folder, setter in (
        (input_folder, host.folders.set_input_directory),
        (output_folder, host.folders.set_output_directory),
    ):
        if folder is not None:
            setter(str(folder_named(folder, "the folder")))
    if output_folder is not None:
        host.folders.add_model_folder_path("loras", os.path.join(host.folders.get_output_directory(), "loras"))
    for getter in (
        host.folders.get_input_directory,
        host.folders.get_output_directory,
        host.folders.get_temp_directory,
    ):
        try:
            os.makedirs(getter(), exist_ok=True)
        except OSError as error:
            raise HostError(f"cannot create the folder {getter()}: {error.strerror}") from error


def load_nodes(host: Host) -> None:
    """The host's own nodes, then Graft as a custom node (unless it is there already)."""
    run = host.loop.run_until_complete
    with log.quiet():
        host.not_imported.extend(run(host.nodes.init_extra_nodes(init_custom_nodes=False, init_api_nodes=False)) or [])
    if "TrainStep" in host.nodes.NODE_CLASS_MAPPINGS:
        return
    if not run(host.nodes.load_custom_node(str(PACKAGE), ignore=set(host.nodes.NODE_CLASS_MAPPINGS))):
        raise HostError(f"Graft itself did not load from {PACKAGE}; the log above says why")


def _import_failure(choice: Choice, error: ImportError) -> str:
    what = f"{choice} cannot be imported: {error}"
    if choice.root is None:
        return f"{what}; install Graft with its 'standalone' extra"
    missing = missing_requirements(choice.root)
    if missing:
        lacking = f"Missing here: {', '.join(missing)}. "
    else:
        lacking = ""
    return (
        f"{what}. {lacking}Use the Python that runs this ComfyUI (this is {sys.executable}), or install its"
        " requirements.txt"
    )
