"""AdamW with its moments in 8 bits (2110.02861), from bitsandbytes."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ..record import BuildRequest, OptimizerRecord, Package
from . import adamw


def _build(request: BuildRequest) -> torch.optim.Optimizer:
    library: Any = importlib.import_module("bitsandbytes")
    return library.optim.AdamW8bit(
        request.groups, lr=request.learning_rate, weight_decay=request.weight_decay, **request.options
    )


RECORD = OptimizerRecord(
    name="adamw8bit",
    help="adamw with a quarter of its optimizer memory",
    full_name="bitsandbytes.optim.adamw.AdamW8bit",
    package=Package("bitsandbytes", "bitsandbytes"),
    build=_build,
    options=adamw.OPTIONS,
    option_defaults=adamw.DEFAULTS,
    element_wise=False,
    usual_rates=adamw.USUAL_RATES,
    diverges_from=0.1,
)
