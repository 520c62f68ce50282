"""Lion (2302.06675), from lion-pytorch: keeps one moment, and changes every weight by the full learning rate."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ..option_readers import BETAS
from ..record import BuildRequest, OptimizerRecord, Package, SettingsView

_DIVERGES_FROM = 0.02
_LEAST, _MOST = 1e-7, 1e-4


def _build(request: BuildRequest) -> torch.optim.Optimizer:
    library: Any = importlib.import_module("lion_pytorch")
    return library.Lion(request.groups, lr=request.learning_rate, weight_decay=request.weight_decay, **request.options)


def _remarks(settings: SettingsView) -> list[str]:
    rate = settings.learning_rate
    if _LEAST <= rate <= _MOST or rate >= _DIVERGES_FROM:
        return []
    return [f"lion moves every weight by the whole rate ({rate:g}): a third to a tenth of AdamW's, 1e-5, is usual"]


RECORD = OptimizerRecord(
    name="lion",
    help="half of adamw's optimizer memory; try a tenth of its learning rate",
    full_name="lion_pytorch.lion_pytorch.Lion",
    package=Package("lion_pytorch", "lion-pytorch"),
    build=_build,
    options={"betas": BETAS},
    option_defaults={"betas": (0.9, 0.99)},
    element_wise=True,
    diverges_from=_DIVERGES_FROM,
    remarks=_remarks,
)
