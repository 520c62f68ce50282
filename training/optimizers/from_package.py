"""Any optimizer class of a package, by its import path, such as `pytorch_optimizer.AdEMAMix`.

An import path comes from a workflow, and importing a module runs its code. So only the packages in `PACKAGES` are
imported, and those that the owner of the machine names in the environment variable GRAFT_OPTIMIZER_PACKAGES; and what
is found there must be a class that derives from torch.optim.Optimizer. Nothing else of a package is called.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import os
import re
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch

from .option_readers import OptionReader
from .record import DEFAULT_WEIGHT_DECAY, BuildRequest, OptimizerRecord, Package

VARIABLE = "GRAFT_OPTIMIZER_PACKAGES"
PACKAGES = {  # what may be imported, and its name on the package index
    "torch.optim": "torch",
    "pytorch_optimizer": "pytorch-optimizer",
    "bitsandbytes.optim": "bitsandbytes",
    "adv_optm": "adv_optm",
    "optimi": "torch-optimi",
    "lion_pytorch": "lion-pytorch",
    "prodigyopt": "prodigyopt",
}
OWN_ARGUMENTS = ("params", "lr", "weight_decay")  # that come from other settings
_PATH = re.compile(r"[A-Za-z]\w*(\.[A-Za-z]\w*)+")
_WORD = re.compile(r"[A-Za-z][\w-]*")
_CONSTANTS = {"true": True, "false": False, "none": None}


class UnfitClassError(ValueError):
    """A class that is not an optimizer, or not one that its settings suit."""


def find_record(path: str) -> OptimizerRecord:
    """The record of an optimizer class. Nothing is imported yet.

    Args:
        path: its import path.

    Raises:
        ValueError: where it is not a path, or one of a package that is not allowed.
    """
    if not _PATH.fullmatch(path):
        raise ValueError(
            f"optimizer class is {path!r}, expected the import path of a class, such as pytorch_optimizer.AdEMAMix"
        )
    allowed = {**PACKAGES, **{name: name for name in _owners_packages()}}
    module = next((name for name in allowed if path.startswith(f"{name}.")), None)
    if module is None:
        raise ValueError(
            f"optimizer class {path} is of a package that is not allowed, as importing one runs its code. Allowed are"
            f" {', '.join(allowed)}. If you trust this one, set the environment variable {VARIABLE} to"
            f" {path.partition('.')[0]} where ComfyUI starts"
        )
    return _record(path, Package(module, allowed[module]))


def _owners_packages() -> list[str]:
    """The packages that the owner allows; without what cannot name a package."""
    names = [name.strip() for name in os.environ.get(VARIABLE, "").split(",")]
    return [name for name in names if name.isidentifier() or _PATH.fullmatch(name)]


@functools.lru_cache(maxsize=64)
def _record(path: str, package: Package) -> OptimizerRecord:
    def build(request: BuildRequest) -> torch.optim.Optimizer:
        return _build(find_class(path, package.module), path, request)

    return OptimizerRecord(
        name=path,
        help="",
        full_name=path,
        build=build,
        options=AnyOptions(),
        element_wise=False,
        package=package,
        joint_step=True,
        finds_group_numbers=True,
        state_layout=lambda options: (path, sorted(options.items())),
    )


def find_class(path: str, module: str) -> type[torch.optim.Optimizer]:
    """The class of an allowed path.

    Args:
        path: its import path.
        module: the allowed package that it begins with; no other module is imported.

    Raises:
        UnfitClassError: where there is none, or no optimizer.
    """
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise UnfitClassError(f"optimizer class {path}: {module} cannot be imported: {error}") from error
    for name in path.removeprefix(f"{module}.").split("."):
        found = getattr(found, name, None) if isinstance(found, ModuleType) else None
    if not isinstance(found, type):
        raise UnfitClassError(f"optimizer class {path}: {module} has no such class")
    if not issubclass(found, torch.optim.Optimizer) or found is torch.optim.Optimizer:
        raise UnfitClassError(
            f"optimizer class {path} is not an optimizer: expected a class that derives from torch.optim.Optimizer"
        )
    return found


class AnyOptions(Mapping[str, OptionReader]):
    """A reader for options of any name; which of them the class has is known once it is imported."""

    def __getitem__(self, name: str) -> OptionReader:
        if name in OWN_ARGUMENTS or not name.isidentifier():
            raise KeyError(name)
        return OptionReader("numbers, true, false, none or a word", _read)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _read(text: str) -> Any:
    values = [_read_one(part) for part in text.split()]
    if len(values) == 1:
        return values[0]
    if not values or not all(isinstance(value, int | float) for value in values):
        raise ValueError
    return tuple(values)


def _read_one(text: str) -> Any:
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    if _WORD.fullmatch(text):
        return text
    try:
        return int(text)
    except ValueError:
        return float(text)


def _build(kind: type[torch.optim.Optimizer], path: str, request: BuildRequest) -> torch.optim.Optimizer:
    """Matrices and other tensors get groups of their own, marked with `use_muon` as Muon's author has it."""
    known = _arguments(kind)
    if "lr" not in known:
        raise UnfitClassError(f"optimizer class {path} takes no learning rate (lr)")
    unknown = [name for name in request.options if name not in known]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"only {', '.join(known)}"
        raise UnfitClassError(f"optimizer options: {path} has no {unknown[0]!r}, {remedy}")
    arguments = {"lr": request.learning_rate, **request.options}
    if "weight_decay" in known:
        arguments["weight_decay"] = request.weight_decay
    elif request.weight_decay not in (0.0, DEFAULT_WEIGHT_DECAY):
        raise UnfitClassError(f"optimizer class {path} has no weight decay: set weight decay to 0")
    groups = []
    for group in request.groups:
        for is_matrix in (True, False):
            members = [tensor for tensor in group["params"] if (tensor.ndim == 2) == is_matrix]
            if members:
                groups.append({**group, "params": members, "use_muon": is_matrix})
    return kind(groups, **arguments)


def _arguments(kind: type) -> list[str]:
    """The names of the arguments that its constructor declares."""
    parameters = inspect.signature(kind).parameters.values()
    return [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
