"""Stochastic gradient descent with momentum, torch's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..option_readers import BELOW_ONE, FLAG
from ..record import BuildRequest, OptimizerRecord, RunFacts, SettingsView

MOMENTUM = 0.9
_LEAST, _MOST = 1e-2, 10.0
_SMALLEST_STEP = 1e-6  # of a weight: a hundredth of AdamW's at its usual rate
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


def _cannot_learn(settings: SettingsView, rate: float, run: RunFacts | None) -> list[str]:
    """A clipped gradient has at most that norm, over all weights together: the more there are, the less each moves."""
    if run is None or not settings.clip_norm:
        return []
    weights = sum(tensor.numel() for tensor in run.trained.values())
    momentum = settings.parsed_options.get("momentum", MOMENTUM)
    step = rate * settings.clip_norm / (1 - momentum) / math.sqrt(weights)
    if rate >= _LEAST or step > _SMALLEST_STEP:
        return []
    return [
        f"learning rate {rate:g} is below what is usual for sgd ({_LEAST:g} to {_MOST:g}), and with maximum gradient"
        f" norm {settings.clip_norm:g} a step moves each of {weights:,} weights by at most {step:.1g} on average, so"
        " nothing would be learned: set learning rate to 0.1"
    ]


RECORD = OptimizerRecord(
    name="sgd",
    help="plain gradient descent with momentum; needs a much higher learning rate",
    full_name="torch.optim.sgd.SGD",
    build=_build,
    options=OPTIONS,
    option_defaults={"momentum": MOMENTUM},
    element_wise=True,
    usual_rates=(_LEAST, _MOST),
    cannot_learn=_cannot_learn,
    check_options=check_options,
)
