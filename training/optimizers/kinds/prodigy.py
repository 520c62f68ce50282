"""Prodigy (2306.06101), from prodigyopt: estimates one step size from the gradients of all tensors."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from ..block_rates import parse_block_rates
from ..option_readers import ABOVE_ZERO, BELOW_ONE, FLAG, number
from ..record import BuildRequest, OptimizerRecord, Package, RunFacts, SettingsView, changed_settings
from . import adamw

_LEAST = 1e-3


def _build(request: BuildRequest) -> torch.optim.Optimizer:
    library: Any = importlib.import_module("prodigyopt")
    options = {"safeguard_warmup": request.warmup > 0, **request.options}
    optimizer = library.Prodigy(request.groups, lr=request.learning_rate, **options)
    for group in optimizer.param_groups:
        group["weight_decay"] = request.weight_decay  # not given to its constructor, which prints
    return optimizer


def _check_settings(settings: SettingsView) -> list[str]:
    unused = (
        ("text encoder learning rate", settings.text_encoder_rate, settings.text_encoder_rate != 0),
        ("LoRA+ ratio", settings.lora_plus, settings.lora_plus != 1),
        ("block learning rates", settings.block_rates, _has_several_rates(settings.block_rates)),
    )
    return changed_settings("prodigy estimates one step size for all tensors", unused)


def _has_several_rates(block_rates: str) -> bool:
    """Whether blocks have learning rates other than 0 and the common one, which the library does not support."""
    try:
        rates = parse_block_rates(block_rates)
    except ValueError:
        return False  # the settings themselves report unreadable text
    return any(factor not in (0.0, 1.0) for _, factor in rates)


def _remarks(settings: SettingsView) -> list[str]:
    rate = settings.learning_rate
    if rate == 1:
        return []
    return [f"prodigy finds the rate itself and multiplies it by the learning rate, which is {rate:g}: 1 is usual"]


def _has_mean_of_gradients(options: Mapping[str, Any]) -> bool:
    """Whether the state has a mean of gradients: the library keeps none if the first beta is 0."""
    return "betas" not in options or options["betas"][0] > 0


def _cannot_learn(settings: SettingsView, rate: float, run: RunFacts | None) -> list[str]:
    """What it finds grows only when the weights have moved further than that, which takes 1 / rate steps."""
    if rate >= _LEAST or "d0" in settings.parsed_options:
        return []
    return [
        f"prodigy multiplies the rate that it finds by the learning rate, and at {rate:g} it does not find one within"
        " thousands of steps, so nothing would be learned: set learning rate to 1, which is usual"
    ]


RECORD = OptimizerRecord(
    name="prodigy",
    help="finds the learning rate itself; set learning rate to 1",
    full_name="prodigyopt.prodigy.Prodigy",
    package=Package("prodigyopt", "prodigyopt"),
    build=_build,
    options={
        **adamw.OPTIONS,
        "beta3": BELOW_ONE,
        "d0": ABOVE_ZERO,
        "d_coef": ABOVE_ZERO,
        "growth_rate": number(1.0),
        "decouple": FLAG,
        "use_bias_correction": FLAG,
        "safeguard_warmup": FLAG,
    },
    option_defaults=adamw.DEFAULTS,
    element_wise=False,
    joint_step=True,
    diverges_from=10.0,
    check_settings=_check_settings,
    remarks=_remarks,
    cannot_learn=_cannot_learn,
    group_numbers={"k": int, "d": float, "d_max": float, "d_numerator": float},
    state_layout=_has_mean_of_gradients,
)
