"""Adafactor (1804.04235): row and column averages in place of a second moment. torch's own, whose steps are relative to
each weight's size; without that, or with a rate of its own, the class here, with transformers' formulas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from ....patches.adapters.registry import trainable_kind
from ..by_tensor import ByTensor, at_least, clip_rms_, inverse_root_, new_moment, rms, subtract_
from ..option_readers import FLAG, number
from ..record import (
    BuildRequest,
    OptimizerRecord,
    RunFacts,
    SettingsView,
    TorchClass,
    changed_settings,
    rate_settings,
)

SMALLEST_SIZE = 1e-3  # that a weight is taken to have: eps2 of torch and of transformers
_SMALLEST_SQUARE = 1e-30
_ADAMWS_RATE = 1e-4
_SMALLEST_RATE, _LARGEST_RATE = 1e-6, 1e-2  # of relative_step: the first with warmup_init, for each step so far


class Adafactor(ByTensor):
    """transformers' Adafactor without momentum. With `relative_step` the rate is min(0.01, 1/sqrt(step)), or
    min(1e-6 step, 1/sqrt(step)) with `warmup_init`, and a group's `lr` is ignored. With `scale_parameter` the rate is
    multiplied by the RMS of the weight, at least 0.001. The state has torch's names and shapes.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        weight_decay: float = 0.0,
        beta2_decay: float = -0.8,
        d: float = 1.0,
        scale_parameter: bool = True,
        relative_step: bool = False,
        warmup_init: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "beta2_decay": beta2_decay, "d": d})
        self.scale_parameter, self.relative_step, self.warmup_init = scale_parameter, relative_step, warmup_init

    def _move_(self, p: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)
            state.update(new_moment(gradient, "row_var", "col_var", "variance"))
        state["step"] += 1
        step = float(state["step"])
        update = _scale_by_moment(gradient, state, step ** group["beta2_decay"])
        clip_rms_(update, group["d"])
        rate = self._rate(p, group["lr"], step)
        p.mul_(1 - rate * group["weight_decay"])
        subtract_(p, update, rate)

    def _rate(self, p: Tensor, rate: float, step: float) -> Tensor | float:
        if self.relative_step:
            largest = _LARGEST_RATE
            if self.warmup_init:
                largest = _SMALLEST_RATE * step
            rate = min(largest, 1 / math.sqrt(step))
        if self.scale_parameter:
            return at_least(rms(p), SMALLEST_SIZE) * rate
        return rate


class TorchsAdafactor(ByTensor):
    """The formulas of torch's Adafactor, which reads two numbers for each tensor from its device. This one reads none.

    The rate is min(lr, 1/sqrt(step)) times the RMS of the weight, at least 0.001. Weights decay by the learning rate
    itself. Second moments are at least the square of the type's epsilon, and their divisor is at least epsilon.
    """

    def __init__(
        self, params: Any, lr: float, weight_decay: float = 0.0, beta2_decay: float = -0.8, d: float = 1.0
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "beta2_decay": beta2_decay, "d": d})

    def _move_(self, p: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        state, least = self.state[p], torch.finfo(p.dtype).eps
        if not state:
            state["step"] = torch.tensor(0.0)
            state.update(new_moment(gradient, "row_var", "col_var", "variance"))
        state["step"] += 1
        step = float(state["step"])
        share, rate = step ** group["beta2_decay"], min(group["lr"], 1 / math.sqrt(step))
        size = at_least(rms(p), SMALLEST_SIZE)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        if gradient.dim() < 2:
            moment = state["variance"].lerp_(gradient * gradient, share).clone()
        else:
            rows = state["row_var"].lerp_(_mean_square(gradient, -1), share)
            columns = state["col_var"].lerp_(_mean_square(gradient, -2), share)
            moment = (rows @ columns).div_(rows.mean(-2, keepdim=True).clamp_(min=least))
        update = moment.clamp_(min=least * least).rsqrt_().mul_(gradient)
        subtract_(p, update, size * rate / at_least(rms(update) / group["d"], 1.0))


def _mean_square(tensor: Tensor, dim: int) -> Tensor:
    return tensor.norm(dim=dim, keepdim=True).square_().div_(tensor.shape[dim])


def _scale_by_moment(gradient: Tensor, state: Mapping[str, Tensor], share: float) -> Tensor:
    """The gradient by the root of its second moment, into which this gradient goes with a share."""
    square = gradient.square().add_(_SMALLEST_SQUARE)
    if gradient.dim() < 2:
        return state["variance"].lerp_(square, share).rsqrt().mul_(gradient)
    return inverse_root_(state["row_var"], state["col_var"], square, share) * gradient


def _build(request: BuildRequest) -> torch.optim.Optimizer:
    options = dict(request.options)
    relative = options.pop("relative_step", False)
    warmup_init = options.pop("warmup_init", False)
    scale = options.pop("scale_parameter", True)
    rates: dict[str, Any] = {"lr": request.learning_rate, "weight_decay": request.weight_decay}
    if scale and not relative:
        on_host = all(p.device.type == "cpu" for group in request.groups for p in group["params"])
        kind: Any = torch.optim.Adafactor if on_host else TorchsAdafactor
        return cast(torch.optim.Optimizer, kind(request.groups, **rates, **options))
    return Adafactor(
        request.groups, scale_parameter=scale, relative_step=relative, warmup_init=warmup_init, **rates, **options
    )


def _check_options(options: Mapping[str, Any]) -> list[str]:
    if options.get("warmup_init") and not options.get("relative_step"):
        return ["warmup_init is the warm-up of relative_step: set relative_step = true, or use warmup steps"]
    return []


def _options(settings: SettingsView) -> Mapping[str, Any]:
    try:
        return settings.parsed_options
    except ValueError:
        return {}  # the settings report text that cannot be read


def _check_settings(settings: SettingsView) -> list[str]:
    if not _options(settings).get("relative_step"):
        return []
    return changed_settings("adafactor with relative_step = true sets the rate itself", rate_settings(settings))


def _remarks(settings: SettingsView) -> list[str]:
    options, rate = _options(settings), settings.learning_rate
    if options.get("relative_step"):
        return [f"adafactor with relative_step = true sets the rate itself and ignores the learning rate ({rate:g})"]
    if not options.get("scale_parameter", True):
        if 1e-6 <= rate <= 5e-3:
            return []
        return [f"learning rate is {rate:g}: adafactor with scale_parameter = false takes AdamW's, 1e-4 is usual"]
    if rate >= 1e-3:
        return []
    return [
        f"adafactor multiplies the learning rate ({rate:g}) by the size of each weight, at least {SMALLEST_SIZE:g},"
        " and LoRA up weights begin at 0, so they hardly move: 0.01 is usual, or 1e-4 with the option scale_parameter"
        " = false"
    ]


def _cannot_learn(settings: SettingsView, rate: float, run: RunFacts | None) -> list[str]:
    """An adapter has weights that begin at 0: at AdamW's rate it takes thousands of steps to move them as far as AdamW
    does in one.
    """
    options = _options(settings)
    if options.get("relative_step") or not options.get("scale_parameter", True) or rate > _ADAMWS_RATE or run is None:
        return []
    if trainable_kind(run.kind).full_weights or not any(map(_is_at_zero, run.trained.values())):
        return []
    return [
        f"adafactor multiplies the learning rate ({rate:g}) by the size of each weight, at least {SMALLEST_SIZE:g}, and"
        " an adapter has weights that begin at 0, so they would hardly move: set learning rate to 0.01, which is usual,"
        " or keep it and set the option scale_parameter = false"
    ]


def _is_at_zero(weight: Tensor) -> bool:
    return weight.device.type == "meta" or not bool(weight.any())


RECORD = OptimizerRecord(
    name="adafactor",
    help="almost no optimizer memory; try learning rate 0.01",
    full_name="torch.optim._adafactor.Adafactor",
    torch_class=TorchClass("Adafactor", "2.5"),
    build=_build,
    options={
        "beta2_decay": number(-10.0, 0.0),
        "d": number(1.0),
        "scale_parameter": FLAG,
        "relative_step": FLAG,
        "warmup_init": FLAG,
    },
    element_wise=False,
    diverges_from=3.0,
    check_options=_check_options,
    check_settings=_check_settings,
    remarks=_remarks,
    cannot_learn=_cannot_learn,
)
