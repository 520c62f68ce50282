"""Prodigy-Plus-ScheduleFree (LoganBooker's): Prodigy's step size (2306.06101) for schedule-free AdamW (2405.15682)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..by_tensor import ByGroup, at_least, rms, widest_float
from ..option_readers import ABOVE_ZERO, BELOW_ONE, FLAG, POSITIVE_BETAS, number
from ..record import OptimizerRecord, RunFacts, SamplingWeights, SettingsView
from . import schedulefree

_EACH = 11  # of a tensor's numbers, the step size is found from every 11th
_FACTORED_FROM = 32  # a matrix with a side of that has its second moment in rows and columns
_GROWTH = 2**0.25  # of the step size in a step
_LEAST_RATE = 1e-3
_BETAS = (0.9, 0.99)
_LEAST_LENGTH = 4  # of an average, for RAdam to take a step
_SMALLEST_MEAN = 1e-30


class ProdigyPlus(ByGroup):
    """Gradients g are taken at y. With the step size d and the rate r = d lr:

    v += (1 - beta2) (d^2 g^2 - v); u = d g / (sqrt(v) + d eps), over the root of its root mean square where that is
    above 1, plus weight_decay y; y += c (z - y), z -= r u, y -= r (1 - beta1 (1 - c)) u, where c is the share of r^2 in
    the sum of all so far. The weights to sample with are x, of which y = x + (1 - beta1) (z - x).

    d is the largest found so far of d_coef sum(d^2 <g, z_0 - z>) / |sum(d^2 g)|, both sums with the factor beta3 a
    step, for all tensors of a group together, from every 11th of their numbers.

    With `factored`, v is Adafactor's: rows times columns over the mean of the rows. The authors' package 2.0.1 does
    that where the larger side comes last, and leaves the rows out of v where it comes first.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1.0,
        betas: tuple[float, float] = _BETAS,
        beta3: float | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        d0: float = 1e-6,
        d_coef: float = 1.0,
        d_limiter: bool = True,
        factored: bool = True,
        use_stableadamw: bool = True,
        use_bias_correction: bool = False,
        schedulefree_c: float = 0.0,
    ) -> None:
        if beta3 is None:
            beta3 = math.sqrt(betas[1])
        settings = {"lr": lr, "betas": betas, "beta3": beta3, "eps": eps, "weight_decay": weight_decay, "d0": d0}
        settings |= {"d_coef": d_coef, "d_limiter": d_limiter, "factored": factored, "use_stableadamw": use_stableadamw}
        settings |= {"use_bias_correction": use_bias_correction, "schedulefree_c": schedulefree_c}
        super().__init__(params, {**settings, "k": 0, "d": d0, "d_numerator": 0.0, "weight_sum": 0.0})
        self._found: list[tuple[dict[str, Any], Tensor]] = []  # not read yet

    def _step_group(self, group: dict[str, Any]) -> None:
        """Move every tensor that has a gradient; the step size of the next step is found when `unread` is read."""
        if self._found:
            self.take([number.item() for number in self.unread()])
        moving = [p for p in group["params"] if p.grad is not None]
        group["k"] += 1
        rate, share = group["d"] * group["lr"], 1 - group["betas"][1]
        is_corrected = True
        if group["use_bias_correction"]:
            rectified, share = _bias_correction(group["betas"][1], group["k"])
            rate, is_corrected = rate * rectified, rectified > 0
        group["weight_sum"] += rate * rate
        average = 0.0
        if group["weight_sum"]:
            average = rate * rate / group["weight_sum"]
        if group["schedulefree_c"]:
            average = min(1.0, average * (1 - group["betas"][0]) * group["schedulefree_c"])
        found = [self._move_(p, p.grad, group, rate, share, average, is_corrected) for p in moving]
        if found:
            self._found.append((group, torch.stack([one.to(found[0].device) for one in found]).sum(0)))
            if found[0].device.type == "cpu":  # where nobody waits
                self.take([number.item() for number in self.unread()])

    def unread(self) -> list[Tensor]:
        """What the last step has found of the step size of the next one, on the device."""
        return [number for _, sums in self._found for number in sums]

    def take(self, numbers: Iterable[float]) -> None:
        """The step size of the next step, from the numbers of `unread`."""
        pairs = iter(numbers)
        waiting, self._found = self._found, []
        for group, _ in waiting:
            _find_step_size(group, next(pairs), next(pairs))

    def _move_(
        self,
        p: Tensor,
        gradient: Tensor,
        group: Mapping[str, Any],
        rate: float,
        share: float,
        average: float,
        ready: bool,
    ) -> Tensor:
        """Move one tensor; gives its parts of the step size's numerator and denominator."""
        state, d = self.state[p], group["d"]
        if not state:
            state.update(_first_state(p, group["factored"]))
        z = state["z"]
        root = _second_moment(state, gradient, share, d * d)
        update = gradient.clone()
        if ready:
            update.mul_(d).div_(root.add_(d * group["eps"]))
        if group["use_stableadamw"]:
            size = at_least(rms(update), 1.0)
            update.div_(size.sqrt() if isinstance(size, Tensor) else math.sqrt(size))
        found = _toward(state, gradient, z, group)
        update.add_(p, alpha=group["weight_decay"])
        p.lerp_(z, average)
        z.sub_(update, alpha=rate)
        p.sub_(update, alpha=rate * (1 - group["betas"][0] * (1 - average)))
        return found


def _first_state(p: Tensor, factored: bool) -> dict[str, Tensor]:
    """The state of a tensor before its first step."""
    numbers = p.detach().flatten()[::_EACH].clone(memory_format=torch.contiguous_format)
    state = {"z": p.detach().clone(), "p0": numbers, "s": torch.zeros_like(numbers)}
    if not factored or p.dim() < 2 or max(p.shape) < _FACTORED_FROM:
        return {**state, "exp_avg_sq": torch.zeros_like(p)}
    rows, columns = _sides(p)
    means = {"row_var": p.detach().mean(columns, keepdim=True), "col_var": p.detach().mean(rows, keepdim=True)}
    return {**state, **{name: torch.zeros_like(mean) for name, mean in means.items()}}


def _sides(p: Tensor) -> tuple[int, int]:
    """The two largest dimensions, the larger one last."""
    rows, columns = sorted(range(p.dim()), key=lambda at: (p.shape[at], at))[-2:]
    return rows, columns


def _second_moment(state: Mapping[str, Tensor], gradient: Tensor, share: float, scale: float) -> Tensor:
    """The root of the second moment, into which a share of `scale` times the squares has come."""
    square = gradient.square().mul_(scale)
    if "exp_avg_sq" in state:
        return state["exp_avg_sq"].lerp_(square, share).sqrt()
    rows, columns = _sides(gradient)
    row = state["row_var"].lerp_(square.mean(columns, keepdim=True), share)
    column = state["col_var"].lerp_(square.mean(rows, keepdim=True), share)
    return (row / row.mean(rows, keepdim=True).add_(_SMALLEST_MEAN)).mul(column).sqrt_()


def _toward(state: Mapping[str, Tensor], gradient: Tensor, z: Tensor, group: Mapping[str, Any]) -> Tensor:
    """What a tensor adds to the numerator, and its part of the denominator, in float64 where the device has it."""
    wide = widest_float(gradient.device)
    weight = group["d"] ** 2 / math.sqrt(group["d0"])
    numbers = gradient.flatten()[::_EACH]
    numerator = torch.dot(numbers.to(wide), (state["p0"] - z.flatten()[::_EACH]).to(wide)).mul_(weight)
    s = state["s"].mul_(group["beta3"]).add_(numbers, alpha=weight)
    return torch.stack([numerator, s.abs().sum(dtype=wide)])


def _find_step_size(group: dict[str, Any], numerator: float, denominator: float) -> None:
    """The step size of the next step: it never falls, and what speaks against the first counts only once it grows."""
    group["d_numerator"] *= group["beta3"]
    if group["d"] > group["d0"] or numerator > 0:
        group["d_numerator"] += numerator
    if denominator > 0:
        found = group["d_numerator"] / denominator
        if group["d_limiter"]:
            found = min(found, group["d"] * _GROWTH)
        group["d"] = max(group["d"], found * group["d_coef"])


def _longest(beta2: float) -> float:
    """How many steps an average of RAdam's (1908.03265) reaches back in the end."""
    return 2 / (1 - beta2) - 1


def _bias_correction(beta2: float, k: int) -> tuple[float, float]:
    """RAdam's (1908.03265): the factor of the rate, 0 until the second moment is worth something, and the share of a
    step in the second moment.
    """
    rest = 1 - beta2**k
    longest = _longest(beta2)
    length = longest - 2 * k * beta2**k / rest
    share = (1 - beta2) / rest
    if length <= _LEAST_LENGTH:
        return 0.0, share
    part = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    return math.sqrt(part), share


def _remarks(settings: SettingsView) -> list[str]:
    remarks = []
    if settings.learning_rate != 1:
        remarks.append(
            "prodigyplus finds the rate itself and multiplies it by the learning rate, which is"
            f" {settings.learning_rate:g}: 1 is usual"
        )
    if settings.clip_norm and settings.parsed_options.get("use_stableadamw", True):
        remarks.append(
            f"maximum gradient norm is {settings.clip_norm:g}, and prodigyplus finds the rate from gradients as they"
            " are and limits its updates itself: 0 is usual"
        )
    return remarks


def _cannot_learn(settings: SettingsView, rate: float, run: RunFacts | None) -> list[str]:
    options = settings.parsed_options
    if options.get("use_bias_correction") and _longest(options.get("betas", _BETAS)[1]) <= _LEAST_LENGTH:
        return [
            "prodigyplus with use_bias_correction and a second beta of at most 0.6 takes no step at all, so nothing"
            " would be learned: set betas to 0.9 0.99, or leave out use_bias_correction"
        ]
    if rate >= _LEAST_RATE or "d0" in options:
        return []
    return [
        f"prodigyplus multiplies the rate that it finds by the learning rate, and at {rate:g} it does not find one"
        " within thousands of steps, so nothing would be learned: set learning rate to 1, which is usual"
    ]


def _state_layout(options: Mapping[str, Any]) -> object:
    """Whether second moments are kept in rows and columns."""
    return bool(options.get("factored", True))


RECORD = OptimizerRecord(
    name="prodigyplus",
    help="Prodigy-Plus-ScheduleFree: finds the learning rate itself and needs no schedule; set learning rate to 1",
    full_name="graft_nodes.training.optimizers.kinds.prodigyplus.ProdigyPlus",
    build=ProdigyPlus.build,
    options={
        "betas": POSITIVE_BETAS,  # computing x divides by the first one
        "beta3": BELOW_ONE,
        "eps": ABOVE_ZERO,
        "d0": ABOVE_ZERO,
        "d_coef": ABOVE_ZERO,
        "d_limiter": FLAG,
        "factored": FLAG,
        "use_stableadamw": FLAG,
        "use_bias_correction": FLAG,
        "schedulefree_c": number(0.0),
    },
    option_defaults={"betas": _BETAS, "eps": 1e-8},
    element_wise=False,
    joint_step=True,
    diverges_from=10.0,
    check_settings=schedulefree.check_settings_of("prodigyplus"),
    check_run=schedulefree.check_run_of("prodigyplus"),
    remarks=_remarks,
    cannot_learn=_cannot_learn,
    group_numbers={"k": int, "d": float, "d_numerator": float, "weight_sum": float},
    sampling_weights=SamplingWeights("y", schedulefree.average),
    state_layout=_state_layout,
)
