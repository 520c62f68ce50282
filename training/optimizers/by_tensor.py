"""Optimizers of Graft's own: a loop over the tensors that have a gradient, and Adafactor's factored second moment."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .record import BuildRequest


@cache
def widest_float(device: torch.device) -> torch.dtype:
    """float64, or float32 on a device that does not compute it, as MPS and some of Intel's do not."""
    try:
        torch.ones((), dtype=torch.float64, device=device).add_(1.0)
    except (RuntimeError, TypeError):
        return torch.float32
    return torch.float64


class ByGroup(torch.optim.Optimizer):
    """An optimizer that moves one group of tensors after the other."""

    @classmethod
    def build(cls, request: BuildRequest) -> torch.optim.Optimizer:
        """The optimizer of a request, with its learning rate, weight decay and options as arguments."""
        rates: dict[str, Any] = {"lr": request.learning_rate, "weight_decay": request.weight_decay}
        return cls(request.groups, **rates, **request.options)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move every tensor that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def unread(self) -> list[Tensor]:
        """Numbers on the device that the next step depends on. They go to `take`, read together with what else is."""
        return []

    def take(self, numbers: Iterable[float]) -> None:
        """The numbers of `unread`."""

    @abstractmethod
    def _step_group(self, group: dict[str, Any]) -> None:
        """Move the tensors of a group that have a gradient."""


class ByTensor(ByGroup):
    """An optimizer that moves each tensor by its own gradient and state alone."""

    def _step_group(self, group: dict[str, Any]) -> None:
        for p in group["params"]:
            if p.grad is not None:
                self._move_(p, p.grad, group)

    @abstractmethod
    def _move_(self, p: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        """Update the state of one tensor, then the tensor."""


def new_moment(tensor: Tensor, row: str, column: str, whole: str) -> dict[str, Tensor]:
    """A second moment of zeros: means of rows and columns (of the last two dimensions), or whole for a vector."""
    if tensor.dim() < 2:
        return {whole: torch.zeros_like(tensor)}
    return {row: torch.zeros_like(tensor[..., :1]), column: torch.zeros_like(tensor[..., :1, :])}


def inverse_root_(rows: Tensor, columns: Tensor, square: Tensor, share: float) -> Tensor:
    """Take a share of `square` into the means of rows and columns, and give 1 / sqrt of the second moment that they
    stand for: rows x columns / mean of rows.
    """
    rows.lerp_(square.mean(-1, keepdim=True), share)
    columns.lerp_(square.mean(-2, keepdim=True), share)
    return (rows / rows.mean(-2, keepdim=True)).rsqrt() * columns.rsqrt()


def rms(tensor: Tensor) -> Tensor | float:
    """The root of the mean square; on a device a tensor without dimensions, so that nobody waits for it."""
    if tensor.device.type == "cpu":
        return float(tensor.norm()) / math.sqrt(tensor.numel())
    return tensor.norm().to(widest_float(tensor.device)) / math.sqrt(tensor.numel())


def at_least(number: Tensor | float, least: float) -> Tensor | float:
    """The larger of two numbers."""
    return number.clamp(min=least) if isinstance(number, Tensor) else max(least, number)


def clip_rms_(update: Tensor, largest: float) -> Tensor:
    """Scale an update down in place until its root mean square is at most `largest`."""
    return update.div_(at_least(rms(update) / largest, 1.0))


def subtract_(p: Tensor, update: Tensor, rate: Tensor | float) -> None:
    """Move a tensor by -rate times an update, which may change."""
    if isinstance(rate, Tensor):
        p.sub_(update.mul_(rate))
    else:
        p.add_(update, alpha=-rate)
