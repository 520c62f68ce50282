"""Prodigy (2306.06101), from prodigyopt: estimates one step size from the gradients of all tensors."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..block_rates import parse_block_rates
from ..by_tensor import widest_float
from ..option_readers import ABOVE_ZERO, BELOW_ONE, FLAG, number
from ..record import BuildRequest, OptimizerRecord, Package, RunFacts, SettingsView, changed_settings
from . import adamw

_LEAST = 1e-3


def _build(request: BuildRequest) -> torch.optim.Optimizer:
    library: Any = importlib.import_module("prodigyopt")
    options = {"safeguard_warmup": request.warmup > 0, **request.options}
    optimizer = library.Prodigy(request.groups, lr=request.learning_rate, **options)
    read_sums_together(optimizer)
    for group in optimizer.param_groups:
        group["weight_decay"] = request.weight_decay  # not given to its constructor, which prints
    return optimizer


def read_sums_together(optimizer: torch.optim.Optimizer) -> None:
    """Let a step of the library wait for a device once. By itself it reads two numbers for each tensor, of which it
    needs nothing but their sums.
    """
    own = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        with _ReadLater():
            result = own(*args, **kwargs)
        for group in optimizer.param_groups:
            if "d_denom" in group:
                group["d_denom"] = float(group["d_denom"])
        return result

    optimizer.step = step  # type: ignore[method-assign]


class _ReadLater(TorchFunctionMode):
    """While it is entered, numbers of a device stay there until their sum is needed; then all are read."""

    def __init__(self) -> None:
        super().__init__()
        self.unread: list[_Number] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.item and args[0].device.type not in ("cpu", "meta"):
            return _Number(self, args[0])
        return func(*args, **(kwargs or {}))

    def read(self) -> None:
        """Read every number that was not."""
        waiting, self.unread = self.unread, []
        device = waiting[0].tensor.device
        numbers = torch.stack([one.tensor.to(device, widest_float(device)) for one in waiting]).tolist()
        for one, value in zip(waiting, numbers, strict=True):
            one.value = value


class _Number:
    """A number on a device, times a factor of the host."""

    def __init__(self, reader: _ReadLater, tensor: Tensor) -> None:
        self.reader, self.tensor, self.factor = reader, tensor, 1.0
        self.value: float | None = None
        reader.unread.append(self)

    def __rmul__(self, factor: float) -> _Number:
        self.factor = factor
        return self

    def __radd__(self, first: float) -> _Sum:
        return _Sum(first, [self])

    def __float__(self) -> float:
        if self.value is None:
            self.reader.read()
        assert self.value is not None
        return self.factor * self.value


class _Sum:
    """A sum of such numbers, added up in their order as soon as anything else is done with it."""

    def __init__(self, first: float, numbers: list[_Number]) -> None:
        self._first, self._numbers = first, numbers

    def __add__(self, number: _Number) -> _Sum:
        return _Sum(self._first, [*self._numbers, number])

    def __radd__(self, first: float) -> float:
        return first + float(self)

    def __rtruediv__(self, dividend: float) -> float:
        return dividend / float(self)

    def __eq__(self, other: object) -> bool:
        return float(self) == other

    __hash__ = None  # type: ignore[assignment]

    def __float__(self) -> float:
        total = self._first
        for one in self._numbers:
            total += float(one)
        return total


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
