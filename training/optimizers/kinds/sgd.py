"""Stochastic gradient descent with momentum, torch's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..option_readers import BELOW_ONE, FLAG
from ..record import BuildRequest, OptimizerRecord

OPTIONS = {"momentum": BELOW_ONE, "nesterov": FLAG}


def check_options(options: Mapping[str, Any]) -> list[str]:
    """Errors of momentum and nesterov together."""
    if options.get("nesterov") and options.get("momentum") == 0:
        return ["nesterov needs a momentum above 0"]
    return []


def _build(request: BuildRequest) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        request.groups, lr=request.learning_rate, weight_decay=request.weight_decay, **request.options
    )


RECORD = OptimizerRecord(
    name="sgd",
    help="plain gradient descent with momentum; needs a much higher learning rate",
    full_name="torch.optim.sgd.SGD",
    build=_build,
    options=OPTIONS,
    option_defaults={"momentum": 0.9},
    element_wise=True,
    usual_rates=(1e-2, 10.0),
    check_options=check_options,
)
