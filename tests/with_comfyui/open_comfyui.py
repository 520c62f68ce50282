"""Opens a real ComfyUI checkout on the CPU inside this process, with every folder it writes to in a temporary place."""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
import types


class _Anything:
    """What a stand-in module answers for any public name: can be built with any arguments, called, and subclassed."""

    def __init__(self, *args: object, **kwargs: object):
        pass

    def __call__(self, value: object = None, *args: object, **kwargs: object) -> object:
        return value


def _usable(name: str) -> bool:
    """Whether the package imports; a build for another torch fails with one of these errors."""
    if importlib.util.find_spec(name) is None:
        return False
    try:
        importlib.import_module(name)
    except (ImportError, OSError, RuntimeError, AttributeError):
        for key in [key for key in sys.modules if key == name or key.startswith(name + ".")]:
            del sys.modules[key]
        return False
    return True


def _answer(name: str) -> type[_Anything]:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything


def stand_in(name: str, *submodules: str) -> None:
    """Put stand-in modules into sys.modules for a package that has no build for the installed torch; ComfyUI imports
    few names of it.
    """
    if name in sys.modules or _usable(name):
        return
    for path in (name, *(f"{name}.{sub}" for sub in submodules)):
        module = types.ModuleType(path)
        module.__getattr__ = _answer  # type: ignore[method-assign]
        module.__path__ = []
        module.__spec__ = importlib.util.spec_from_loader(path, loader=None)
        module.__version__ = "0.0"
        sys.modules[path] = module
        parent, _, leaf = path.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)


def stand_in_for_missing() -> None:
    """Stand-ins for what has no build for the CPU's torch and of which ComfyUI imports few names."""
    stand_in("torchvision", "transforms", "transforms.functional", "transforms.v2", "ops", "io", "models", "utils")
    stand_in("torchaudio", "transforms", "functional")


def open_checkout(path: str, *flags: str, cpu: bool = True) -> str:
    """Make `import comfy`, `nodes`, `execution`, `folder_paths` … mean the checkout at `path`; returns its base folder
    (temporary).

    ComfyUI parses its command line on import, so it is given one: CPU, a base directory and an (empty) front end of its
    own, and `flags`. Without `cpu` it takes the device that it finds. The working directory is left alone.
    """
    root = os.path.abspath(os.path.expanduser(path))
    if not os.path.isfile(os.path.join(root, "comfy", "model_patcher.py")):
        raise FileNotFoundError(f"{root} is not a ComfyUI checkout: it has no comfy/model_patcher.py")
    if "comfy" in sys.modules:
        raise RuntimeError(f"comfy is imported already, from {sys.modules['comfy'].__path__}: open the checkout first")
    base = tempfile.mkdtemp(prefix="graft_comfyui_")
    atexit.register(shutil.rmtree, base, ignore_errors=True)
    for folder in ("input", "output", "temp", "user", "models", "custom_nodes", "web"):
        os.makedirs(os.path.join(base, folder))
    stand_in_for_missing()
    sys.path.insert(0, root)
    argv, sys.argv = (
        sys.argv,
        [
            "comfyui",
            *(["--cpu"] if cpu else []),
            *flags,
            "--base-directory",
            base,
            "--front-end-root",
            os.path.join(base, "web"),
            "--database-url",
            "sqlite:///:memory:",
        ],
    )
    try:
        import comfy.options

        comfy.options.enable_args_parsing()
        import comfy.cli_args
    finally:
        sys.argv = argv
    assert comfy.cli_args.args.cpu == cpu and comfy.cli_args.args.base_directory == base
    import utils.install_util  # noqa: F401  (nodes.py puts comfy/ on the path, where another `utils` lies)

    return base
