"""Mixed precision: autocast (bf16, fp16), and the loss scale that keeps fp16 gradients from vanishing (1710.03740)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from ..memory.allocations import META, AutocastOnMeta
from .settings import OptimizerSettings

LEAST_SCALE = 2.0**-10  # if the loss overflows even so, scaling cannot help
_FIRST_SCALE = 2.0**16
_LARGEST_SCALE = 2.0**127  # the largest power of two in float32
_GOOD_STEPS = 2000  # after which the scale is doubled
_SLOT = "grad_scaler"


class Network(Protocol):
    """What precision depends on, of a `training.objective.denoiser.Denoiser`."""

    device: torch.device
    auto_type: torch.dtype | None
    own_type: torch.dtype


def autocast_type(settings: OptimizerSettings, network: Network) -> torch.dtype | None:
    """The type that a forward pass is cast to.

    Args:
        settings: the training precision.
        network: the model, which knows what auto means on its device.

    Returns:
        None where it computes in the model's own types.
    """
    if settings.precision in ("bf16", "full-bf16"):
        return torch.bfloat16
    if settings.precision == "fp16":
        return torch.float16
    if settings.precision == "auto":
        return network.auto_type
    return None


def autocast(settings: OptimizerSettings, network: Network) -> AbstractContextManager[Any]:
    """The autocast context of a forward pass; on tensors without memory it only casts shapes.

    Args:
        settings: the training precision.
        network: the model.
    """
    dtype = autocast_type(settings, network)
    if dtype is None:
        return nullcontext()
    if network.device == META:
        return AutocastOnMeta(dtype)
    return torch.autocast(network.device.type, dtype)


def computes_in_fp16(settings: OptimizerSettings, network: Network) -> bool:
    """Whether gradients may vanish or overflow for want of exponents: under autocast, or because the model was loaded
    so.
    """
    return (autocast_type(settings, network) or network.own_type) == torch.float16


class LossScale:
    """The loss scale of fp16 training: doubled after 2,000 good steps, halved when a gradient overflows.

    Its scale and count are part of a run's state, and a step that overflows is computed again. It needs no kernel of
    its own, as torch's GradScaler does, so that it works on any device.
    """

    def __init__(self, saved: Mapping[str, Tensor]) -> None:
        self.scale = _FIRST_SCALE  # what the loss is multiplied by: a power of two, so that nothing is rounded
        self._good_steps = 0
        self._has_passed = False
        if f"{_SLOT}/scale" in saved:
            self.scale, self._good_steps = saved[f"{_SLOT}/scale"].item(), int(saved[f"{_SLOT}/count"])

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss to call backward on.

        Args:
            loss: a tensor without dimensions.
        """
        return loss * self.scale

    @torch.no_grad()
    def unscale_(self, trained: Mapping[str, Tensor]) -> bool:
        """Divide the gradients by the scale. Where one is not finite, the scale is halved and the step has to be made
        again.

        Args:
            trained: the trained tensors by name; their `.grad` changes.

        Returns:
            Whether every gradient is finite.
        """
        gradients = [tensor.grad for tensor in trained.values() if tensor.grad is not None and tensor.grad.numel()]
        if not gradients:
            return True
        torch._foreach_mul_(gradients, 1.0 / self.scale)
        self._has_passed = _all_finite(gradients)
        if not self._has_passed:
            self.scale, self._good_steps = self.scale / 2, 0
        return self._has_passed

    def step_(self) -> None:
        """Count a step whose gradients were finite, for the scale to grow. Without any gradient nothing is counted."""
        if self._has_passed:
            self._good_steps += 1
        if self._good_steps == _GOOD_STEPS:
            self.scale, self._good_steps = min(2 * self.scale, _LARGEST_SCALE), 0
        self._has_passed = False

    def state(self) -> dict[str, Tensor]:
        """The scale and the number of good steps, for the run's state."""
        return {
            f"{_SLOT}/scale": torch.tensor(self.scale, dtype=torch.float64),
            f"{_SLOT}/count": torch.tensor(self._good_steps, dtype=torch.int64),
        }


def _all_finite(tensors: Sequence[Tensor]) -> bool:
    """Waits once for the device of the first."""
    largest = [torch.linalg.vector_norm(tensor, ord=torch.inf, dtype=torch.float32) for tensor in tensors]
    return bool(torch.stack([number.to(largest[0].device) for number in largest]).isfinite().all())
