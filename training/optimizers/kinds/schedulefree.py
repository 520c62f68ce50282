"""Schedule-free AdamW (2405.15682), from schedulefree: takes gradients at y, steps z, samples with x."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..option_readers import ABOVE_ZERO, POSITIVE_BETAS, number
from ..record import BuildRequest, OptimizerRecord, Package, RunFacts, SamplingWeights, SettingsView
from . import adamw


def _build(request: BuildRequest) -> torch.optim.Optimizer:
    library: Any = importlib.import_module("schedulefree")
    optimizer = library.AdamWScheduleFree(
        request.groups, lr=request.learning_rate, weight_decay=request.weight_decay, **request.options
    )
    optimizer.train()
    return optimizer


def check_settings_of(name: str) -> Callable[[SettingsView], list[str]]:
    """Errors for settings that do not work with a schedule-free optimizer of that name."""

    def check(settings: SettingsView) -> list[str]:
        if settings.schedule == "constant":
            return []
        return [
            f"optimizer {name} takes the place of learning rate schedule {settings.schedule}: use constant (warmup"
            " steps work)"
        ]

    return check


def check_run_of(name: str) -> Callable[[RunFacts], list[str]]:
    """Errors for a run that a schedule-free optimizer of that name cannot train."""

    def check(run: RunFacts) -> list[str]:
        errors = []
        if run.averaged:
            errors.append(
                f"{name} is an average of the weights itself: disconnect EMA Settings or use another optimizer"
            )
        if run.max_norm:
            errors.append(
                f"{name} keeps two sets of weights and maximum weight norm {run.max_norm:g} would scale one: set it"
                " to 0 in Adapter Settings"
            )
        return errors

    return check


def average(live: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor | None:
    """The weights to sample with, x of the schedule-free method (Defazio 2024, arXiv 2405.15682). The live weights y
    lie between x and z: y = beta1 x + (1 - beta1) z.

    Args:
        live: the weights that are trained (y), of any shape.
        state: the optimizer's state of the tensor, with z.
        group: its parameter group, with the betas.

    Returns:
        x in float32, None before the first step.
    """
    z = state.get("z")
    if z is None:
        return None
    y = live.detach().float()
    return y.lerp(z.to(y.device), 1 - 1 / group["betas"][0])


RECORD = OptimizerRecord(
    name="schedulefree",
    help="adamw that keeps its own average and needs no schedule",
    full_name="schedulefree.adamw_schedulefree.AdamWScheduleFree",
    package=Package("schedulefree", "schedulefree"),
    build=_build,
    options={
        "betas": POSITIVE_BETAS,  # computing x divides by the first one
        "eps": ABOVE_ZERO,
        "r": number(0.0),
        "weight_lr_power": number(0.0),
    },
    option_defaults=adamw.DEFAULTS,
    element_wise=True,
    usual_rates=(1e-6, 1e-2),
    diverges_from=0.1,
    check_settings=check_settings_of("schedulefree"),
    check_run=check_run_of("schedulefree"),
    group_numbers={"k": int, "weight_sum": float, "lr_max": float},
    sampling_weights=SamplingWeights("y", average),
)
