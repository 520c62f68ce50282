"""Opens a trainer's checkout. What it imports and these files do not use is stood in for; its math never is."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from pathlib import Path

# trainer: (folder of the checkout to import from, what is stood in for where it is not installed)
CHECKOUTS = {
    "sd_scripts": (".", ("cv2", "torchvision", "imagesize")),
    "onetrainer": (".", ("gguf", "mgds", "cv2", "torchvision")),
    "ai_toolkit": (".", ("torchvision", "optimum", "torchao", "cv2", "albumentations")),
    # its text encoder asks for a GPU when it is imported
    "musubi": ("src", ("cv2", "torchvision", "ftfy", "musubi_tuner.wan.modules.t5")),
}


class _Answers(type):
    """Classes whose every public attribute is such a class."""

    def __getattr__(cls, name: str) -> type:
        return _answer(name)


def _answer(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Answers(name, (), {"__init__": lambda self, *values, **named: None})


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules that answer a class for every name, in the place of packages that are not there."""

    def __init__(self, names: Sequence[str]):
        self.names = tuple(names)

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if any(name == known or name.startswith(f"{known}.") for known in self.names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = _answer  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing: every name is answered."""


def stood_in_for(trainer: str) -> list[str]:
    """What a trainer imports that is not installed here, and parts of its own that are left out."""
    _, names = CHECKOUTS[trainer]
    return [name for name in names if "." in name or not _is_installed(name)]


def _is_installed(name: str) -> bool:
    """Whether a package is there; a stand-in for ComfyUI's own imports has no loader."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.loader is not None


def open_checkout(trainer: str, checkout: str) -> list[str]:
    """Make a trainer's modules importable; returns what is stood in for."""
    missing = stood_in_for(trainer)
    for name in list(sys.modules):
        if any(name == known or name.startswith(f"{known}.") for known in missing):
            del sys.modules[name]  # a stand-in that knows fewer names
    sys.meta_path.insert(0, StandIns(missing))
    sys.path.insert(0, str(Path(checkout, CHECKOUTS[trainer][0]).resolve()))
    return missing
