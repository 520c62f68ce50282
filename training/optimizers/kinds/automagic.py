"""Automagic (AI-Toolkit): a learning rate for each number, which rises while its updates keep their sign."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..by_tensor import ByTensor, clip_rms_, inverse_root_, new_moment
from ..option_readers import ABOVE_ZERO, BELOW_ONE
from ..record import OptimizerRecord, SettingsView, changed_settings, rate_settings

_SMALLEST_SQUARE = 1e-30
_LEAST, _MOST = 1e-7, 1e-3
_STEEPEST_START = 1e-4


class Automagic(ByTensor):
    """Adafactor's update u = g / sqrt(v), clipped to a root mean square of 1, times a rate of its own for each number.

    A rate begins at the `lr` of the first step. It rises by `lr_bump` if u has the sign of the step before, else it
    falls by as much; it stays from `min_lr` to `max_lr`. Before the first step a sign is taken to be negative. The
    rates are float32, where AI-Toolkit rounds them to 8 bits.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        min_lr: float = _LEAST,
        max_lr: float = _MOST,
        lr_bump: float = 1e-6,
        beta2: float = 0.999,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "min_lr": min_lr, "max_lr": max_lr, "lr_bump": lr_bump, "beta2": beta2}
        super().__init__(params, {**defaults, "weight_decay": weight_decay})

    def _move_(self, p: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        state, share = self.state[p], 1 - group["beta2"]
        if not state:
            state["rate"] = torch.full_like(gradient, group["lr"])
            state["positive"] = torch.zeros_like(gradient, dtype=torch.bool)
            state.update(new_moment(gradient, "row_var", "col_var", "variance"))
        square = gradient.square().add_(_SMALLEST_SQUARE)
        if gradient.dim() < 2:
            scale = state["variance"].lerp_(square, share).rsqrt()
        else:
            scale = inverse_root_(state["row_var"], state["col_var"], square, share)
        update = clip_rms_(scale.mul_(gradient), 1.0)
        positive = update > 0
        direction = (positive == state["positive"]).to(update.dtype).mul_(2).sub_(1)
        rate = state["rate"].add_(direction, alpha=group["lr_bump"]).clamp_(group["min_lr"], group["max_lr"])
        state["positive"] = positive
        p.sub_(update.add_(p, alpha=group["weight_decay"]).mul_(rate))


def _check_options(options: Mapping[str, Any]) -> list[str]:
    least, most = options.get("min_lr", _LEAST), options.get("max_lr", _MOST)
    if least > most:
        return [f"min_lr is {least:g} and max_lr {most:g}: set min_lr below it"]
    return []


def _check_settings(settings: SettingsView) -> list[str]:
    return changed_settings("automagic sets the rate of each number itself", rate_settings(settings))


def _remarks(settings: SettingsView) -> list[str]:
    rate = settings.learning_rate
    if rate <= _STEEPEST_START:
        return []
    return [f"learning rate is {rate:g}: automagic begins with it and raises it itself, 1e-6 is usual"]


RECORD = OptimizerRecord(
    name="automagic",
    help="a learning rate for each number, which it finds itself; set learning rate to 1e-6",
    full_name="graft_nodes.training.optimizers.kinds.automagic.Automagic",
    build=Automagic.build,
    options={"min_lr": ABOVE_ZERO, "max_lr": ABOVE_ZERO, "lr_bump": ABOVE_ZERO, "beta2": BELOW_ONE},
    option_defaults={"min_lr": _LEAST, "max_lr": _MOST, "lr_bump": 1e-6, "beta2": 0.999},
    element_wise=False,
    check_options=_check_options,
    check_settings=_check_settings,
    remarks=_remarks,
)
