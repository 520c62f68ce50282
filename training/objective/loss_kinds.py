"""The losses by name: mean square, kohya's Huber losses, and dpo for pairs. To add one, list its record here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...patches.registry import Registry

PREFERENCE = "preference"
HUBER_DELTA = 0.1  # where Huber losses turn from square to linear: kohya's default


@dataclass(frozen=True, kw_only=True)
class LossKind:
    """One loss function.

    `compute(error, prediction, sigma)` gives the loss of each number of an error (B, C, …, h, w), at noise levels that
    broadcast to it.
    """

    name: str
    kohya_name: str
    """What LoRA metadata calls it (ss_loss_type)."""
    compute: Callable[[Tensor, str, Tensor], Tensor]
    of_denoised: bool = False
    """Whether the error is that of the denoised latents and not that of the model's own output."""
    task: str = ""
    """The kind of training that this loss makes of a run that denoises (`training.tasks.registry`), "" where it is none
    of its own. dpo is the error of each picture of a pair, which `preference` compares with that of the model as it
    was.
    """


def _mse(error: Tensor, prediction: str, sigma: Tensor) -> Tensor:
    return error.square()


def _pseudo_huber(error: Tensor, delta: Tensor) -> Tensor:
    return (error.square() + delta**2).sqrt() - delta


def _huber(error: Tensor, prediction: str, sigma: Tensor) -> Tensor:
    delta = torch.full_like(sigma, HUBER_DELTA)
    return 2 * delta * _pseudo_huber(error, delta)


def _smooth_l1(error: Tensor, prediction: str, sigma: Tensor) -> Tensor:
    return 2 * _pseudo_huber(error, torch.full_like(sigma, HUBER_DELTA))


def _scheduled_huber(error: Tensor, prediction: str, sigma: Tensor) -> Tensor:
    delta = scheduled_delta(prediction, sigma)
    return 2 * delta * _pseudo_huber(error, delta)


def scheduled_delta(prediction: str, sigma: Tensor) -> Tensor:
    """Where scheduled-huber turns from square to linear (Khrapov 2024, arXiv 2403.16728), with c = `HUBER_DELTA`:

        eps, v    (1 - c) / (1 + sigma)^2 + c    kohya's `snr` schedule
        flow      c^sigma                        kohya's `exponential` one, as flow models have no SNR

    Both are 1 without noise and c at the noisiest.

    Args:
        prediction: what the network predicts: eps, v or flow.
        sigma: noise levels of any shape; of flow models from 0 to 1.

    Returns:
        The deltas, of the shape of `sigma`.
    """
    if prediction == "flow":
        return HUBER_DELTA**sigma
    return (1 - HUBER_DELTA) / (1 + sigma) ** 2 + HUBER_DELTA


LOSSES: Registry[LossKind] = Registry(
    "loss function",
    (
        LossKind(name="mse", kohya_name="l2", compute=_mse),
        LossKind(name="huber", kohya_name="huber", compute=_huber),
        LossKind(name="smooth-l1", kohya_name="smooth_l1", compute=_smooth_l1),
        LossKind(name="scheduled-huber", kohya_name="huber", compute=_scheduled_huber),
        LossKind(name="x0-mse", kohya_name="x0-mse", compute=_mse, of_denoised=True),
        LossKind(name="dpo", kohya_name="dpo", compute=_mse, task=PREFERENCE),
    ),
)
