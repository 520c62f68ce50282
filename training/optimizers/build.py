"""Builds an optimizer from its registry record, and says which packages it needs that are not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch

from ...settings.declaration import raise_errors
from ...storage.printable import pip_install
from .record import BuildRequest, OptimizerRecord
from .registry import OPTIMIZERS
from .settings import OptimizerSettings


def missing_package(optimizer: str) -> list[str]:
    """What has to be installed before this optimizer can be used, as a sentence; empty if nothing is missing."""
    return missing_for(OPTIMIZERS.get(optimizer))


def missing_for(record: OptimizerRecord) -> list[str]:
    """The same for the record of an optimizer."""
    optimizer = record.name
    if record.package is not None and not _is_installed(record.package.module):
        package = record.package.name
        extra = " (or Graft's extra `optimizers`)" if optimizer in OPTIMIZERS else ""
        return [f"optimizer {optimizer} needs the package {package}: {pip_install(package)}{extra}, or use adamw"]
    if record.torch_class is not None and not hasattr(torch.optim, record.torch_class.name):
        return [
            f"optimizer {optimizer} needs torch {record.torch_class.version} or later and this is {torch.__version__}:"
            " update torch or use adamw"
        ]
    return []


def check_installed(settings: OptimizerSettings) -> None:
    """Raises ValueError that says what to install before the optimizer of these settings can be used."""
    raise_errors("Optimizer Settings", missing_for(settings.record))


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ValueError, ModuleNotFoundError):  # a module that is in sys.modules without a spec, or without its package
        return False


def build(settings: OptimizerSettings, groups: Sequence[dict[str, Any]], part: str = "") -> torch.optim.Optimizer:
    """Build the torch optimizer that settings ask for.

    Args:
        settings: the optimizer's name, learning rate, weight decay and options.
        groups: torch's parameter groups: `params` and any further entries.
        part: which optimizer is wanted if the record has several (muon: what is not a matrix has another one).

    Raises:
        ValueError: saying what to install where the package is not there.
    """
    check_installed(settings)
    record = settings.record
    request = BuildRequest(
        groups=list(groups),
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        warmup=settings.warmup_steps,
        options={**record.option_defaults, **settings.parsed_options},
        part=part,
    )
    return record.build(request)
