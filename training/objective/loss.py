"""What training minimises: the model's own objective (noise, velocity or flow), recovered from its denoised output, and
its weights.

Sources: min-SNR (Hang 2023, arXiv 2303.09556), debiased estimation (2310.08442); Huber, its schedules and masks are as
kohya's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.dataset import Conditioning

LOSSES = ("mse", "huber", "smooth-l1", "scheduled-huber", "x0-mse")
WEIGHTINGS = ("none", "min-snr", "debiased")
TIMESTEPS = ("uniform", "logit-normal", "shifted")
PRIORS = ("none", "regularisation", "output-preservation")
HUBER_DELTA = 0.1  # kohya's default for its Huber losses


class Denoiser(Protocol):
    """A diffusion model as training needs it; the host's is built by `host.denoiser.denoiser`, a test's may be a few
    lines.
    """

    module: nn.Module
    """The network whose weights are trained; trained names are paths inside it."""
    prediction: str
    """What the network predicts: "eps", "v" or "flow"."""
    device: torch.device
    """Where latents and noise are to be."""
    text_encoder: nn.Module | None
    """The text encoder when it is trained too; its trained names are `text_encoders.` and paths inside it."""
    encode: Callable[[Sequence[str], Sequence[Conditioning]], Sequence[Conditioning]] | None
    """With a text encoder: conditionings of captions as it computes now, given the dataset's for the rest."""

    def process_in(self, latents: Tensor) -> Tensor:
        """Scale latents of the VAE (B, C, h, w) to what the network sees."""

    def sigma(self, u: Tensor) -> Tensor:
        """Noise level (B,) of timestep shares u (B,) in [0, 1): 0 is the cleanest, towards 1 the noisiest."""

    def noisy(self, clean: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
        """Clean latents (B, C, h, w) with noise of level sigma (B,)."""

    def denoise(
        self, x: Tensor, sigma: Tensor, conditionings: Sequence[Conditioning], transformer_options: Mapping[str, Any]
    ) -> Tensor:
        """Denoised latents in float32 (B, C, h, w), differentiable; one conditioning an image."""


@dataclass(frozen=True)
class ObjectiveSettings:
    """Settings of the objective; plain values, checked on creation (`check_for` checks them against a model)."""

    loss: str = "mse"
    weighting: str = "none"
    gamma: float = 5.0
    offset_noise: float = 0.0
    pyramid_noise: float = 0.0
    ip_noise: float = 0.0
    zero_terminal_snr: bool = False
    timesteps: str = "uniform"
    shift: float = 1.0
    conditioning_dropout: float = 0.05
    prior: str = "none"
    prior_weight: float = 1.0
    min_timestep: float = 0.0
    max_timestep: float = 1.0

    def __post_init__(self) -> None:
        wrong = []
        if self.loss not in LOSSES:
            wrong.append(f"loss is {self.loss!r}, expected one of {', '.join(LOSSES)}")
        if self.weighting not in WEIGHTINGS:
            wrong.append(f"weighting is {self.weighting!r}, expected one of {', '.join(WEIGHTINGS)}")
        if self.loss == "x0-mse" and self.weighting != "none":
            wrong.append(
                f"weighting {self.weighting} is defined on the model's own objective; with loss x0-mse use none"
            )
        if self.gamma <= 0:
            wrong.append(f"gamma is {self.gamma}, expected above 0")
        for name in ("offset_noise", "pyramid_noise", "ip_noise", "prior_weight"):
            if not 0.0 <= getattr(self, name) < math.inf:
                wrong.append(f"{name} is {getattr(self, name)}, expected 0 or more")
        if self.pyramid_noise >= 1:
            wrong.append(
                f"pyramid_noise is {self.pyramid_noise}, expected below 1 (each level is weaker by this factor)"
            )
        if self.timesteps not in TIMESTEPS:
            wrong.append(f"timesteps is {self.timesteps!r}, expected one of {', '.join(TIMESTEPS)}")
        if not 0 < self.shift < math.inf:
            wrong.append(f"shift is {self.shift}, expected above 0 (1 is off)")
        if not 0.0 <= self.conditioning_dropout <= 1.0:
            wrong.append(f"conditioning_dropout is {self.conditioning_dropout}, expected from 0 to 1")
        if self.prior not in PRIORS:
            wrong.append(f"prior is {self.prior!r}, expected one of {', '.join(PRIORS)}")
        if not 0.0 <= self.min_timestep < self.max_timestep <= 1.0:
            wrong.append(
                f"min_timestep is {self.min_timestep} and max_timestep {self.max_timestep}, expected 0 <= min < max"
                " <= 1"
            )
        if wrong:
            raise ValueError("GraftObjective: " + "; ".join(wrong) + ".")


def check_for(settings: ObjectiveSettings, prediction: str) -> None:
    """Raise ValueError when the settings make no sense for a model that predicts `prediction`."""
    if prediction not in ("eps", "v", "flow"):
        raise ValueError(f"This model predicts {prediction}: training knows eps, v and flow.")
    if prediction == "flow" and settings.weighting != "none":
        raise ValueError(
            f"GraftObjective: weighting {settings.weighting} needs a signal-to-noise ratio, which flow models lack; set"
            " none."
        )
    if settings.zero_terminal_snr and prediction == "eps":
        raise ValueError(
            "GraftObjective: zero_terminal_snr needs a model that predicts v. This one predicts eps: at a level without"
            " signal its input is the noise that it should predict, so there is nothing to learn there. Switch it off,"
            " or train a v model."
        )
    if settings.zero_terminal_snr and prediction == "flow":
        raise ValueError(
            "GraftObjective: zero_terminal_snr is for v models; a flow model begins at pure noise already. Switch it"
            " off."
        )


def shares(settings: ObjectiveSettings, count: int, draws: torch.Generator) -> Tensor:
    """Timestep shares (count,) in [0, 1) of the chosen distribution; `shift` s moves u to s u / (1 + (s - 1) u).

    `min_timestep` and `max_timestep` squeeze the whole distribution between them, as kohya's do.
    """
    normal = settings.timesteps == "logit-normal"
    if normal:
        u = torch.randn(count, generator=draws).sigmoid()
    else:
        u = torch.rand(count, generator=draws)
    if settings.timesteps == "shifted":
        u = settings.shift * u / (1 + (settings.shift - 1) * u)
    if settings.min_timestep > 0 or settings.max_timestep < 1:
        u = settings.min_timestep + (settings.max_timestep - settings.min_timestep) * u
    return u.clamp(0.0, 1 - 2**-24)


def own_scale(prediction: str, sigma: Tensor) -> Tensor:
    """Factor from an error of denoised latents to an error of the model's own output: 1/sigma (eps, flow), sqrt(SNR +
    1) (v).
    """
    sigma = sigma.clamp(min=1e-5)
    if prediction == "v":
        return (1 + sigma**-2).sqrt()
    return 1 / sigma


def step_weights(settings: ObjectiveSettings, prediction: str, sigma: Tensor) -> Tensor:
    """Weight (B,) of the model's own loss at sigma (B,): min-SNR is min(SNR, g)/SNR for eps and min(SNR, g)/(SNR + 1)
    for v.
    """
    if settings.weighting == "none":
        return torch.ones_like(sigma)
    snr = sigma.clamp(min=1e-5) ** -2
    if settings.weighting == "min-snr":
        if prediction == "v":
            return snr.clamp(max=settings.gamma) / (snr + 1)
        return (settings.gamma / snr).clamp(max=1.0)  # no 0/0 at SNR 0
    snr = snr.clamp(max=1000.0)
    if prediction == "v":
        return 1 / (snr + 1)
    return snr**-0.5


def huber_delta(settings: ObjectiveSettings, prediction: str, sigma: Tensor) -> Tensor:
    """Where Huber losses turn from square to linear, (B,), at sigma (B,).

    Scheduled (2403.16728): (1 - c) / (1 + sigma)^2 + c, kohya's `snr` schedule; flow models, which have no SNR, get its
    `exponential` one, c^t at the noise level t: 1 without noise in both, c at the noisiest.
    """
    if settings.loss != "scheduled-huber":
        return torch.full_like(sigma, HUBER_DELTA)
    if prediction == "flow":
        return HUBER_DELTA**sigma
    return (1 - HUBER_DELTA) / (1 + sigma) ** 2 + HUBER_DELTA


def losses(
    settings: ObjectiveSettings,
    prediction: str,
    denoised: Tensor,
    target: Tensor,
    sigma: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """Loss an image (B,) in float32 or wider, from denoised latents and what they should be (B, C, …, h, w), at sigma
    (B,).

    `mask` (B, 1, h, w) from 0 to 1 weights each place; as kohya does, the mean still goes over every place, masked or
    not.
    """
    wide = torch.promote_types(denoised.dtype, torch.float32)
    error = denoised.to(wide) - target.to(wide)
    sigma = sigma.to(wide)
    each = [-1] + [1] * (error.ndim - 1)
    if settings.loss != "x0-mse":
        error = error * own_scale(prediction, sigma).view(each)
    if settings.loss in ("mse", "x0-mse"):
        value = error.square()
    else:
        delta = huber_delta(settings, prediction, sigma).view(each)
        size = (error.square() + delta**2).sqrt() - delta
        if settings.loss == "smooth-l1":
            value = 2 * size
        else:
            value = 2 * delta * size
    if mask is not None:
        value = value * fitted(mask.to(value), value)
    return value.flatten(1).mean(1) * step_weights(settings, prediction, sigma)


def fitted(mask: Tensor, latents: Tensor) -> Tensor:
    """A mask (B, 1, H, W) at the size of latents (B, C, …, h, w), by area."""
    if mask.shape[-2:] != latents.shape[-2:]:
        mask = F.interpolate(mask, size=latents.shape[-2:], mode="area")
    return mask.view(mask.shape[0], *[1] * (latents.ndim - 3), *mask.shape[-2:])
