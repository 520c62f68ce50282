"""The loss weightings by name. To add one, list its record here.

Sources: min-SNR (Hang 2023, arXiv 2303.09556), debiased estimation (2310.08442), both as kohya's; AI-Toolkit's timestep
type weighted.
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
    only_flow: bool = False
    """Whether it is for flow models alone, whose noise levels are from 0 to 1."""
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


# Noise levels and weights between which AI-Toolkit's thousand weights lie on straight lines, to within half a percent.
# It measured them on Flex.1-alpha; their mean is 1.
_MEASURED = (
    (0.001, 0.4473),
    (0.002, 0.4454),
    (0.011, 0.4524),
    (0.019, 0.4721),
    (0.053, 0.5937),
    (0.076, 0.669),
    (0.097, 0.7122),
    (0.12, 0.7311),
    (0.232, 0.7137),
    (0.295, 0.7287),
    (0.369, 0.7769),
    (0.452, 0.8618),
    (0.554, 1.0065),
    (0.82, 1.4733),
    (0.868, 1.521),
    (0.908, 1.4996),
    (0.93, 1.4601),
    (0.94, 1.4132),
    (0.957, 1.3483),
    (0.972, 1.2426),
    (0.978, 1.1867),
    (0.979, 1.1896),
    (0.982, 1.1438),
    (0.983, 1.1559),
    (0.986, 1.1016),
    (0.987, 1.1149),
    (0.99, 1.0429),
    (0.991, 1.0393),
    (0.994, 0.9692),
    (0.995, 0.9622),
    (0.999, 0.9098),
    (1.0, 0.9057),
)


def _weighted(sigma: Tensor, prediction: str, gamma: float) -> Tensor:
    """A straight line between the two measured weights beside sigma."""
    levels, weights = (torch.tensor(column).to(sigma) for column in zip(*_MEASURED, strict=True))
    inside = sigma.clamp(_MEASURED[0][0], _MEASURED[-1][0])
    after = torch.searchsorted(levels, inside.contiguous()).clamp(1, len(levels) - 1)
    share = (inside - levels[after - 1]) / (levels[after] - levels[after - 1])
    return torch.lerp(weights[after - 1], weights[after], share)


WEIGHTINGS: Registry[LossWeighting] = Registry(
    "loss weighting",
    (
        LossWeighting(name="none", weights=_equal, needs_snr=False),
        LossWeighting(name="min-snr", weights=_min_snr, metadata=lambda gamma: {"ss_min_snr_gamma": gamma}),
        LossWeighting(name="debiased", weights=_debiased, metadata=lambda gamma: {"ss_debiased_estimation": True}),
        LossWeighting(name="ai-toolkit weighted", weights=_weighted, needs_snr=False, only_flow=True),
    ),
)
