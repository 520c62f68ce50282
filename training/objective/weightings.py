"""The loss weightings by name. To add one, list its record here.

Sources: min-SNR (Hang 2023, arXiv 2303.09556), debiased estimation (2310.08442), both as kohya's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...patches.registry import Registry

Metadata = Mapping[str, Any]


def _no_metadata(gamma: float) -> Metadata:
    return {}


@dataclass(frozen=True, kw_only=True)
class LossWeighting:
    """One weighting. `weights(sigma, prediction, gamma)` weighs the model's own loss at sigma (B,)."""

    name: str
    weights: Callable[[Tensor, str, float], Tensor]
    needs_snr: bool = True
    """Whether it needs a signal-to-noise ratio. Then it is not for flow models, nor for losses of denoised latents."""
    metadata: Callable[[float], Metadata] = _no_metadata
    """What LoRA metadata says of it, in kohya's words, for a gamma."""


def _snr(sigma: Tensor) -> Tensor:
    return sigma.clamp(min=1e-5) ** -2


def _equal(sigma: Tensor, prediction: str, gamma: float) -> Tensor:
    return torch.ones_like(sigma)


def _min_snr(sigma: Tensor, prediction: str, gamma: float) -> Tensor:
    """min(SNR, gamma) / SNR for eps and min(SNR, gamma) / (SNR + 1) for v."""
    snr = _snr(sigma)
    if prediction == "v":
        return snr.clamp(max=gamma) / (snr + 1)
    return (gamma / snr).clamp(max=1.0)  # no 0/0 at SNR 0


def _debiased(sigma: Tensor, prediction: str, gamma: float) -> Tensor:
    """1 / sqrt(SNR) for eps and 1 / (SNR + 1) for v, of an SNR of at most 1000."""
    snr = _snr(sigma).clamp(max=1000.0)
    if prediction == "v":
        return 1 / (snr + 1)
    return snr**-0.5


WEIGHTINGS: Registry[LossWeighting] = Registry(
    "loss weighting",
    (
        LossWeighting(name="none", weights=_equal, needs_snr=False),
        LossWeighting(name="min-snr", weights=_min_snr, metadata=lambda gamma: {"ss_min_snr_gamma": gamma}),
        LossWeighting(name="debiased", weights=_debiased, metadata=lambda gamma: {"ss_debiased_estimation": True}),
    ),
)
