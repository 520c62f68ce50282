"""The optimisers, each from its well-kept library; those that are not part of torch are imported when they are asked
for.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch

from . import options
from .adacoor import AdaCoor
from .settings import ADACOOR_STEP, OptimizerSettings

_ADAM = {"betas": (0.9, 0.999), "eps": 1e-8}
_LION_BETAS = (0.9, 0.99)
_MOMENTUM = 0.9  # sgd's

# Module and class, as kohya's scripts write them into a LoRA.
FULL_NAMES = {
    "adamw": "torch.optim.adamw.AdamW",
    "adamw8bit": "bitsandbytes.optim.adamw.AdamW8bit",
    "adafactor": "torch.optim._adafactor.Adafactor",
    "lion": "lion_pytorch.lion_pytorch.Lion",
    "prodigy": "prodigyopt.prodigy.Prodigy",
    "schedulefree": "schedulefree.adamw_schedulefree.AdamWScheduleFree",
    "muon": "torch.optim._muon.Muon",
    "adacoor": "graft_nodes.training.adacoor.AdaCoor",
    "sgd": "torch.optim.sgd.SGD",
}

# optimizer -> (module, name on the package index)
_PACKAGES = {
    "adamw8bit": ("bitsandbytes", "bitsandbytes"),
    "lion": ("lion_pytorch", "lion-pytorch"),
    "prodigy": ("prodigyopt", "prodigyopt"),
    "schedulefree": ("schedulefree", "schedulefree"),
}
_NEW_IN_TORCH = {"adafactor": ("Adafactor", "2.5"), "muon": ("Muon", "2.9")}

Groups = Sequence[dict[str, Any]]


def missing(optimizer: str) -> list[str]:
    """What must be installed before this optimiser can be used, in a sentence; empty when nothing is missing."""
    module, package = _PACKAGES.get(optimizer, ("", ""))
    if module and not _installed(module):
        return [
            f"optimizer {optimizer} needs the package {package}: pip install {package} (or Graft's extra `optimizers`),"
            " or use adamw"
        ]
    name, version = _NEW_IN_TORCH.get(optimizer, ("", ""))
    if name and not hasattr(torch.optim, name):
        return [
            f"optimizer {optimizer} needs torch {version} or later and this is {torch.__version__}: update torch or use"
            " adamw"
        ]
    return []


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # a module that is in sys.modules without a spec
        return False


def build(settings: OptimizerSettings, groups: Groups, matrices: bool = False) -> torch.optim.Optimizer:
    """An optimiser over parameter groups (`params` and any further entries); with muon, `matrices` says which of its
    two is wanted.

    Raises ValueError that says what to install.
    """
    lacking = missing(settings.optimizer)
    if lacking:
        raise ValueError("GraftOptimizer: " + "; ".join(lacking) + ".")
    rate, decay, said = (
        settings.learning_rate,
        settings.weight_decay,
        options.parse(settings.optimizer, settings.options),
    )
    if settings.optimizer == "adacoor":
        return AdaCoor(list(groups), **{"eps": ADACOOR_STEP, **said})
    if settings.optimizer == "sgd":
        return torch.optim.SGD(list(groups), lr=rate, weight_decay=decay, **{"momentum": _MOMENTUM, **said})
    if settings.optimizer == "adafactor":
        return torch.optim.Adafactor(list(groups), lr=rate, weight_decay=decay, **said)
    if settings.optimizer == "muon":
        own = {name: value for name, value in said.items() if (name not in _ADAM) == matrices}
        if matrices:  # a rate as AdamW's, which moves the tensors that are no matrices
            return torch.optim.Muon(list(groups), lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw", **own)
        said = own
    if settings.optimizer in ("adamw", "muon"):
        devices = {p.device.type for group in groups for p in group["params"]}
        return torch.optim.AdamW(
            list(groups), lr=rate, weight_decay=decay, fused=devices <= {"cpu", "cuda"}, **{**_ADAM, **said}
        )
    return _from_package(settings, list(groups), said)


def _from_package(
    settings: OptimizerSettings, groups: list[dict[str, Any]], said: dict[str, Any]
) -> torch.optim.Optimizer:
    library: Any = importlib.import_module(_PACKAGES[settings.optimizer][0])
    rate, decay = settings.learning_rate, settings.weight_decay
    if settings.optimizer == "adamw8bit":
        return library.optim.AdamW8bit(groups, lr=rate, weight_decay=decay, **{**_ADAM, **said})
    if settings.optimizer == "lion":
        return library.Lion(groups, lr=rate, weight_decay=decay, **{"betas": _LION_BETAS, **said})
    if settings.optimizer == "schedulefree":
        made = library.AdamWScheduleFree(groups, lr=rate, weight_decay=decay, **{**_ADAM, **said})
        made.train()
        return made
    made = library.Prodigy(groups, lr=rate, **{**_ADAM, "safeguard_warmup": settings.warmup > 0, **said})
    for group in made.param_groups:
        group["weight_decay"] = decay  # not to its constructor, which prints
    return made
