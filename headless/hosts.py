"""Chooses the host that runs a workflow (a real ComfyUI or the embedded host) and opens it in this process."""

from __future__ import annotations

import asyncio
import errno
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from ..storage.printable import pip_install
from . import embedded, log, signals
from .embedded import Caching, HostError

PACKAGE = Path(__file__).absolute().parent.parent
INSTALLED_IN = ("site-packages", "dist-packages")
# What the import of a package raises that does not fit the installed torch, as torchaudio and torchvision often do not.
BROKEN_PACKAGE = (ImportError, OSError, RuntimeError, AttributeError)
LANDMARKS = ("comfy/model_management.py", "execution.py", "nodes.py", "folder_paths.py", "server.py")


@dataclass(frozen=True)
class Choice:
    """The host to use: the folder of a ComfyUI, or None for the embedded host; `reason` says how it was chosen."""

    root: Path | None
    reason: str

    def __str__(self) -> str:
        if self.root is None:
            return f"Graft {graft_version()}'s embedded host ({self.reason})"
        return f"ComfyUI {comfyui_version(self.root)} at {self.root} ({self.reason})"


@dataclass(frozen=True)
class Host(embedded.Host):
    """An open host with Graft's nodes, and how it was chosen."""

    choice: Choice
    not_imported: list[str] = field(default_factory=list)
    scratch: tempfile.TemporaryDirectory[str] | None = None  # what a ComfyUI makes goes here, if it may make nothing

    @property
    def name(self) -> str:
        if self.choice.root is None:
            return "embedded"
        return "ComfyUI"


def graft_version() -> str:
    """Graft's version: from the installed package, else from pyproject.toml."""
    installed = installed_version("graft-nodes")
    if installed is not None:
        return installed
    match = re.search(r'^version = "([^"]+)"', (PACKAGE / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    if match:
        return match.group(1)
    return "of unknown version"


def comfyui_version(root: Path) -> str:
    """The version of the ComfyUI in a folder."""
    path = root / "comfyui_version.py"
    if path.is_file():
        match = re.search(r'__version__ = "([^"]+)"', path.read_text(encoding="utf-8"))
    else:
        match = None
    if match:
        return match.group(1)
    return "of unknown version"


def choose(comfyui: str | None, embedded: bool, environment: Mapping[str, str], package: Path = PACKAGE) -> Choice:
    """Choose the host: --comfyui, else COMFYUI_PATH, else the ComfyUI that Graft is installed in, else the embedded
    host.

    Raises HostError if the named folder is not a ComfyUI; it never falls back to another host then.
    """
    if embedded:
        return Choice(None, "asked for by --embedded")
    for folder, reason in ((comfyui, "named by --comfyui"), (environment.get("COMFYUI_PATH"), "named by COMFYUI_PATH")):
        if folder:
            root = folder_named(folder, reason)
            missing = [name for name in LANDMARKS if not (root / name).is_file()]
            if missing:
                raise HostError(f"{root} ({reason}) is not a ComfyUI: it has no {', '.join(missing)}")
            return Choice(root, reason)
    for package_folder in (package, package.resolve()):
        root = package_folder.parent.parent
        if package_folder.parent.name == "custom_nodes" and all((root / name).is_file() for name in LANDMARKS):
            return Choice(root, "Graft is installed in it")
    return Choice(None, "no ComfyUI was named")


def folder_named(name: str, what: str) -> Path:
    """The absolute path of a folder named in an argument. Raises HostError if the name is not valid."""
    try:
        path = Path(name).expanduser().absolute()
        os.stat(path)
    except FileNotFoundError:
        return path
    except (OSError, ValueError, RuntimeError) as error:
        raise HostError(f"{what}: {name[:100]!r} is not a valid folder name ({error})"[:400]) from error
    return path


def open_host(
    choice: Choice,
    cpu: bool,
    input_folder: str | None,
    output_folder: str | None,
    caching: Caching = Caching(),  # noqa: B008  (it cannot be changed)
    make_folders: bool = True,
) -> Host:
    """Import the host's modules, set its folders, and load its nodes and Graft's. Raises HostError that says what to do
    if that fails.
    """
    if input_folder is not None and not folder_named(input_folder, "--input").is_dir():
        raise HostError(f"--input {input_folder}: no such folder")
    if output_folder is not None:
        folder_named(output_folder, "--output")
    with signals.stopping():
        return _open(choice, cpu, input_folder, output_folder, caching, make_folders)


def _open(
    choice: Choice,
    cpu: bool,
    input_folder: str | None,
    output_folder: str | None,
    caching: Caching,
    make_folders: bool,
) -> Host:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    scratch = None
    if choice.root is None:
        _import_embedded()
    else:
        if not make_folders:
            scratch = tempfile.TemporaryDirectory(prefix="graft-doctor-")
        _import_comfyui(choice.root, scratch)
    import comfy.cli_args

    try:
        if cpu or not _accelerator():
            comfy.cli_args.args.cpu = True
        names = ("folder_paths", "comfy.utils", "execution", "nodes", "server", "comfy.model_management")
        folders, utils, execution, nodes, server, management = (importlib.import_module(name) for name in names)
    except BROKEN_PACKAGE as error:
        raise HostError(_import_failure(choice, error)) from error
    if choice.root is not None:
        _configure_comfyui(choice.root, folders)
    caching.type_in(execution)
    prompt_server = server.PromptServer(loop)
    host = Host(
        loop,
        prompt_server,
        nodes,
        execution,
        folders,
        management,
        utils,
        caching,
        graft_version() if choice.root is None else comfyui_version(choice.root),
        choice,
        scratch=scratch,
    )
    if choice.root is not None and scratch is not None:
        load_nodes(host)  # some nodes make folders too
        for kind in ("input", "output", "temp"):
            getattr(folders, f"set_{kind}_directory")(str(choice.root / kind))
    _set_folders(host, input_folder, output_folder)
    _see_to_folders(host, make_folders)
    if scratch is None:
        load_nodes(host)
    return host


def load_other_packs(host: Host) -> None:
    """Load the other custom nodes (and the API nodes) of a real ComfyUI."""
    with signals.stopping():
        for name in ("init_builtin_api_nodes", "init_external_custom_nodes"):
            host.loop.run_until_complete(getattr(host.nodes, name)())


def pack_paths(packs: Sequence[str]) -> list[Path]:
    """The folders or files of packs. Raises HostError for one that cannot be a pack."""
    paths = [folder_named(pack, "--pack") for pack in packs]
    for pack, path in zip(packs, paths, strict=True):
        if not path.exists():
            raise HostError(f"--pack {pack}: no such folder")
        if path.is_dir() and not (path / "__init__.py").is_file():
            raise HostError(f"--pack {pack}: this folder is not a node pack; it has no __init__.py")
        if path.is_file() and path.suffix != ".py":
            raise HostError(f"--pack {pack}: expected a folder with __init__.py, or a .py file")
    return paths


def load_packs(host: Host, packs: Sequence[str]) -> None:
    """Load other packs by their folder or file. Raises HostError if one does not load."""
    for pack, path in zip(packs, pack_paths(packs), strict=True):
        known = set(host.nodes.NODE_CLASS_MAPPINGS)
        with signals.stopping():
            loaded = host.loop.run_until_complete(host.nodes.load_custom_node(str(path), ignore=known))
        if not loaded:
            raise HostError(f"--pack {pack} did not load; the log above says why")


def missing_requirements(root: Path) -> list[str]:
    """The packages of a ComfyUI's requirements.txt that are not installed here."""
    path = root / "requirements.txt"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    names = [re.split(r"[ <>=!~;\[]", line.strip(), maxsplit=1)[0] for line in lines]
    return [name for name in names if name and not name.startswith(("#", "-")) and installed_version(name) is None]


def installed_version(name: str) -> str | None:
    """The version of an installed package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _accelerator() -> bool:
    import torch

    xpu = getattr(torch, "xpu", None)
    return torch.cuda.is_available() or torch.backends.mps.is_available() or bool(xpu and xpu.is_available())


def _import_embedded() -> None:
    if not embedded.install():
        spec = importlib.util.find_spec("comfy")
        locations = ", ".join(spec.submodule_search_locations or []) if spec else "?"
        raise HostError(
            f"the embedded host cannot start: another package named 'comfy' is importable from {locations}; run from"
            " another folder, or name that ComfyUI with --comfyui"
        )


def _import_comfyui(root: Path, scratch: tempfile.TemporaryDirectory[str] | None) -> None:
    """Add a ComfyUI folder to sys.path and import its options, without letting it parse our command line.

    With a scratch folder ComfyUI makes its folders there: it makes `input` and `user` as soon as it is imported.
    """
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
        from comfy.cli_args import args

        if scratch is not None:
            args.base_directory = scratch.name
            sys.dont_write_bytecode = True
        import utils.extra_config  # noqa: F401  (before ComfyUI adds comfy/, which has its own utils, to sys.path)
    except BROKEN_PACKAGE as error:
        raise HostError(_import_failure(Choice(root, "chosen"), error)) from error
    if installed_version("comfyui-frontend-package") is None and args.front_end_root is None:
        args.front_end_root = str(PACKAGE / "web")  # any folder will do: no browser connects


def _configure_comfyui(root: Path, folders: ModuleType) -> None:
    """Add the model folders that ComfyUI adds at start: extra_model_paths.yaml and those in the output folder."""
    from utils.extra_config import load_extra_path_config

    config = root / "extra_model_paths.yaml"
    if config.is_file():
        load_extra_path_config(str(config))
    for name in ("checkpoints", "clip", "vae", "diffusion_models", "loras"):
        folders.add_model_folder_path(name, os.path.join(folders.get_output_directory(), name))


def _set_folders(host: Host, input_folder: str | None, output_folder: str | None) -> None:
    """Set the host's input and output folders."""
    for folder, setter in (
        (input_folder, host.folders.set_input_directory),
        (output_folder, host.folders.set_output_directory),
    ):
        if folder is not None:
            setter(str(folder_named(folder, "the folder")))
    if output_folder is not None:
        host.folders.add_model_folder_path("loras", os.path.join(host.folders.get_output_directory(), "loras"))


def _see_to_folders(host: Host, make: bool) -> None:
    """Create the folders that the host uses, or only see whether they could be made."""
    for getter in (
        host.folders.get_input_directory,
        host.folders.get_output_directory,
        host.folders.get_temp_directory,
    ):
        try:
            if make:
                os.makedirs(getter(), exist_ok=True)
            elif not existing(getter()).is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        except OSError as error:
            raise HostError(f"cannot create the folder {getter()}: {error.strerror}") from error


def existing(folder: str) -> Path:
    """The folder, or what is there of the way to it."""
    path = Path(folder).absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def load_nodes(host: Host) -> None:
    """Load the host's own nodes, then Graft as a custom node (unless it is already loaded)."""
    run_until_complete = host.loop.run_until_complete
    with log.quiet():
        host.not_imported.extend(
            run_until_complete(host.nodes.init_extra_nodes(init_custom_nodes=False, init_api_nodes=False)) or []
        )
    if "TrainStep" in host.nodes.NODE_CLASS_MAPPINGS:
        return
    if not run_until_complete(host.nodes.load_custom_node(str(PACKAGE), ignore=set(host.nodes.NODE_CLASS_MAPPINGS))):
        raise HostError(f"Graft itself did not load from {PACKAGE}; the log above says why")


def _import_failure(choice: Choice, error: Exception) -> str:
    message = f"{choice} cannot be imported: {error}"
    if choice.root is None:
        return (
            f"{message}. Use a Python that has torch, such as the one that runs your ComfyUI, or install Graft with"
            f" what it needs: {pip_install('-e', f'{PACKAGE}[standalone]')}"
        )
    missing, broken = missing_requirements(choice.root), _broken_package(error)
    detail = ""
    if broken is not None and not isinstance(error, ModuleNotFoundError):
        detail += (
            f"{broken} does not work here with torch {installed_version('torch')}: install versions that fit together. "
        )
    if missing:
        detail += f"Missing here: {', '.join(missing)}. "
    return (
        f"{message}. {detail}Use the Python that runs this ComfyUI (this is {sys.executable}), or install its"
        " requirements.txt"
    )


def _broken_package(error: Exception) -> str | None:
    """The installed package in whose import the error arose, with its version; torch where there is no other."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    names = [name for name in map(_package_of, files) if name is not None]
    others = [name for name in names if name != "torch"]
    if not names:
        return None
    name = (others or names)[-1]
    return f"{name} {installed_version(name) or ''}".strip()


def _package_of(file: str) -> str | None:
    """The installed package that a file belongs to, if it belongs to one."""
    parts = Path(file).parts
    for folder in INSTALLED_IN:
        if folder in parts:
            return parts[parts.index(folder) + 1].removesuffix(".py")
    return None
