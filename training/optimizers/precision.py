"""Mixed precision: autocast (bf16, fp16), and the loss scale that keeps fp16 gradients from vanishing (1710.03740)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..memory.allocations import META, AutocastOnMeta
from .settings import OptimizerSettings

LEAST_SCALE = 2.0**-10  # if the loss overflows even so, scaling cannot help
_SLOT = "grad_scaler"


def autocast(settings: OptimizerSettings, device: torch.device) -> AbstractContextManager[Any]:
    """The autocast context of a forward pass; auto is bf16 on a CUDA device that has it, else the model's own types."""
    kind = settings.precision
    if kind in ("bf16", "full-bf16") or (kind == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported()):
        if device == META:
            return AutocastOnMeta(torch.bfloat16)
        return torch.autocast(device.type, torch.bfloat16)
    if kind == "fp16":
        return torch.autocast(device.type, torch.float16)
    return nullcontext()


class LossScale:
    """The loss scale of fp16 training (torch's GradScaler).

    Its scale and count are part of a run's state, and a step that overflows is computed again.
    """

    def __init__(self, device: torch.device, saved: Mapping[str, Tensor]) -> None:
        self._scaler = torch.amp.GradScaler(device.type)
        self._has_passed = False
        if f"{_SLOT}/scale" in saved:
            state = self._scaler.state_dict()
            state["scale"], state["_growth_tracker"] = saved[f"{_SLOT}/scale"].item(), int(saved[f"{_SLOT}/count"])
            self._scaler.load_state_dict(state)

    @property
    def scale(self) -> float:
        """What the loss is multiplied by."""
        return self._scaler.get_scale()

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return self._scaler.scale(loss)

    def unscale_(self, trained: Mapping[str, Tensor]) -> bool:
        """Divide the gradients by the scale; returns whether every gradient is finite. Otherwise the scale falls."""
        gradients = _Gradients([t for t in trained.values() if t.grad is not None])
        if not gradients.param_groups[0]["params"]:
            return True
        self._scaler.unscale_(gradients)  # type: ignore[arg-type]
        finite = bool(self._scaler.step(gradients))  # type: ignore[arg-type]
        self._has_passed = finite
        if not finite:
            self._scaler.update()
        return finite

    def step_(self) -> None:
        """Count a step whose gradients were finite, for the scale to grow. Without any gradient nothing is counted."""
        if self._has_passed:
            self._scaler.update()
        self._has_passed = False

    def state(self) -> dict[str, Tensor]:
        """The scale and the number of good steps, for the run's state."""
        scaler_state = self._scaler.state_dict()
        numbers = {
            "scale": (scaler_state["scale"], torch.float64),
            "count": (scaler_state["_growth_tracker"], torch.int64),
        }
        return {f"{_SLOT}/{name}": torch.tensor(value, dtype=dtype) for name, (value, dtype) in numbers.items()}


class _Gradients:
    """A stand-in for an optimizer that GradScaler steps: it only notes whether the step was allowed."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.param_groups = [{"params": tensors}]

    def step(self) -> bool:
        return True
