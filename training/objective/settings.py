"""Objective settings (loss, weighting, noise, timesteps) and their validation against each other and the model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ...storage.digest import hashed_settings
from .loss_kinds import LOSSES
from .noise import LAST_SIGNAL
from .timesteps import EXPERTS, NO_EXPERT, TIMESTEPS
from .weightings import WEIGHTINGS

PRIORS = ("none", "regularisation", "output-preservation")
# Not part of a run's identity at their defaults, which are what runs of before had.
_LATER = frozenset(
    {
        "sigmoid_scale",
        "logit_mean",
        "logit_std",
        "mode_scale",
        "model_shift",
        "expert",
        "boundary",
        "beta",
        "sigma_bounds",
    }
)
_LEAST_SHARE = 1e-3  # what a weighting leaves of a noise level's loss, for the level to be learned at all
_MOST_MODE_SCALE = 1.75  # 2 / (pi - 2) and above it the distribution is none any more


@dataclass(frozen=True)
class ObjectiveSettings:
    """Settings of the objective; plain values, checked on creation (`check_for` checks them against a model).

    `sigmoid_scale`, `logit_mean`, `logit_std`, `mode_scale` and `shift` are those of some samplings of timesteps.
    Without `model_shift` what is drawn are the noise levels of a flow model. An `expert` of a pair gets only the noise
    levels on its side of `boundary`; 0 stands for the model's own (`experts.with_own_boundary`). `both` becomes one
    setting for each of them (`experts.of_pair`). `beta` is that of loss dpo (`preference`). With `sigma_bounds`
    minimum and maximum timestep are noise levels of a flow model, whatever its shift.
    """

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
    sigmoid_scale: float = 1.0
    logit_mean: float = 0.0
    logit_std: float = 1.0
    mode_scale: float = 1.29
    model_shift: bool = True
    expert: str = NO_EXPERT
    boundary: float = 0.0
    beta: float = 2000.0
    sigma_bounds: bool = False

    def __post_init__(self) -> None:
        errors = [*_unknown_choices(self), *_exclusions(self), *_wrong_numbers(self), *_wrong_timesteps(self)]
        errors += _wrong_expert(self)
        if errors:
            raise ValueError("Objective Settings: " + "; ".join(errors) + ".")

    @property
    def compares_pairs(self) -> bool:
        """Whether the loss is of pairs of a better and a worse picture."""
        return LOSSES.get(self.loss).of_pairs

    def identity(self) -> dict[str, Any]:
        """The settings that a run is known by, as plain values."""
        return hashed_settings(self, _LATER)


def _unknown_choices(settings: ObjectiveSettings) -> list[str]:
    errors = []
    if settings.loss not in LOSSES:
        errors.append(LOSSES.unknown(settings.loss))
    if settings.weighting not in WEIGHTINGS:
        errors.append(WEIGHTINGS.unknown(settings.weighting))
    if settings.timesteps not in TIMESTEPS:
        errors.append(TIMESTEPS.unknown(settings.timesteps))
    if settings.prior not in PRIORS:
        errors.append(f"prior preservation is {settings.prior!r}, expected one of {', '.join(PRIORS)}")
    return errors


def _exclusions(settings: ObjectiveSettings) -> list[str]:
    if settings.loss not in LOSSES or settings.weighting not in WEIGHTINGS:
        return []
    errors = []
    if LOSSES.get(settings.loss).of_denoised and WEIGHTINGS.get(settings.weighting).needs_snr:
        errors.append(
            f"loss weighting {settings.weighting} is defined on the model's own objective; with loss function"
            f" {settings.loss} use none"
        )
    if settings.compares_pairs and settings.prior != "none":
        errors.append(
            f"loss function {settings.loss} holds on to the model as it was already: set prior preservation to none"
        )
    return errors


def _wrong_numbers(settings: ObjectiveSettings) -> list[str]:
    errors = []
    if not settings.gamma > 0:  # nor NaN
        errors.append(f"min-SNR gamma is {settings.gamma}, expected above 0")
    for label, value in (
        ("noise offset", settings.offset_noise),
        ("pyramid noise discount", settings.pyramid_noise),
        ("input perturbation", settings.ip_noise),
        ("prior loss weight", settings.prior_weight),
    ):
        if not 0.0 <= value < math.inf:
            errors.append(f"{label} is {value}, expected 0 or more")
    if settings.pyramid_noise >= 1:
        errors.append(
            f"pyramid noise discount is {settings.pyramid_noise}, expected below 1 (each level is weaker by this"
            " factor)"
        )
    if not 0 < settings.beta < math.inf:
        errors.append(f"DPO beta is {settings.beta}, expected above 0 (2000 to 5000 is usual)")
    if not 0 < settings.shift < math.inf:
        errors.append(f"timestep shift is {settings.shift}, expected above 0 (1 is off)")
    if not 0.0 <= settings.conditioning_dropout <= 1.0:
        errors.append(f"conditioning dropout is {settings.conditioning_dropout}, expected from 0 to 1")
    return errors


def _wrong_timesteps(settings: ObjectiveSettings) -> list[str]:
    errors = []
    for label, value in (("sigmoid scale", settings.sigmoid_scale), ("logit deviation", settings.logit_std)):
        if not 0 < value < math.inf:
            errors.append(f"{label} is {value}, expected above 0 (1 is usual)")
    if not math.isfinite(settings.logit_mean):
        errors.append(f"logit mean is {settings.logit_mean}, expected a finite number (0 is usual)")
    if not -1.0 <= settings.mode_scale <= _MOST_MODE_SCALE:
        errors.append(f"mode scale is {settings.mode_scale}, expected from -1 to {_MOST_MODE_SCALE:g} (1.29 is usual)")
    if not 0.0 <= settings.min_timestep < settings.max_timestep <= 1.0:
        errors.append(
            f"minimum timestep is {settings.min_timestep} and maximum timestep {settings.max_timestep}, expected"
            " 0 <= minimum < maximum <= 1"
        )
    return errors


def _wrong_expert(settings: ObjectiveSettings) -> list[str]:
    errors = []
    if settings.expert not in EXPERTS:
        errors.append(f"expert is {settings.expert!r}, expected one of {', '.join(EXPERTS)}")
    if not 0.0 <= settings.boundary < 1.0:
        errors.append(f"expert boundary is {settings.boundary}, expected from 0 (the model's own) to below 1")
    if settings.expert == NO_EXPERT and settings.boundary:
        errors.append(
            f"expert boundary is {settings.boundary} and expert is {NO_EXPERT}: choose the expert that is trained, or"
            " set expert boundary to 0"
        )
    if settings.expert != NO_EXPERT and (settings.min_timestep > 0 or settings.max_timestep < 1):
        errors.append(
            f"expert {settings.expert} chooses the noise levels itself: set minimum timestep to 0 and maximum timestep"
            " to 1, and another border in expert boundary"
        )
    return errors


def remarks(settings: ObjectiveSettings) -> list[str]:
    """Warnings for the report: settings that work but are probably not meant."""
    if not settings.zero_terminal_snr:
        return []
    last = torch.tensor([(1 / LAST_SIGNAL - 1) ** 0.5])
    share = float(WEIGHTINGS.get(settings.weighting).weights(last, "v", settings.gamma))
    if share > _LEAST_SHARE:
        return []
    return [
        f"loss weighting {settings.weighting} counts the last noise level, which zero terminal SNR makes pure noise,"
        f" {share:.0e} times: next to nothing is learned there. To learn it, set loss weighting of Objective Settings"
        " to none or debiased"
    ]


def check_for(settings: ObjectiveSettings, prediction: str) -> None:
    """Raises ValueError when the settings do not suit a model that predicts `prediction`."""
    if prediction not in ("eps", "v", "flow"):
        raise ValueError(f"This model predicts {prediction}: training knows eps, v and flow.")
    if prediction == "flow" and WEIGHTINGS.get(settings.weighting).needs_snr:
        raise ValueError(
            f"Objective Settings: loss weighting {settings.weighting} needs a signal-to-noise ratio, which flow models"
            " lack; set it to none."
        )
    if prediction != "flow" and WEIGHTINGS.get(settings.weighting).only_flow:
        raise ValueError(
            f"Objective Settings: loss weighting {settings.weighting} is for flow models, and this model predicts"
            f" {prediction}: use min-snr or debiased."
        )
    if prediction != "flow" and TIMESTEPS.get(settings.timesteps).gives_levels:
        raise ValueError(
            f"Objective Settings: timestep sampling {settings.timesteps} draws the noise levels of flow models, and"
            f" this model predicts {prediction}: use uniform or logit-normal."
        )
    if prediction != "flow" and not settings.model_shift:
        raise ValueError(
            f"Objective Settings: only flow models have a shift of their own, and this model predicts {prediction}:"
            " switch model's own shift on."
        )
    if prediction != "flow" and settings.sigma_bounds:
        raise ValueError(
            "Objective Settings: bounds are sigmas is for flow models, whose noise levels go from 0 to 1,"
            f" and this model predicts {prediction}: switch it off. They are fractions of the schedule then."
        )
    if prediction != "flow" and settings.expert != NO_EXPERT:
        raise ValueError(
            f"Objective Settings: expert {settings.expert} is for flow models such as Wan 2.2, and this model predicts"
            f" {prediction}: set expert to {NO_EXPERT}."
        )
    if settings.zero_terminal_snr and prediction == "eps":
        raise ValueError(
            "Objective Settings: zero terminal SNR needs a model that predicts v. This one predicts eps: at a level"
            " without signal its input is the noise that it should predict, so there is nothing to learn there. Switch"
            " it off, or train a v model."
        )
    if settings.zero_terminal_snr and prediction == "flow":
        raise ValueError(
            "Objective Settings: zero terminal SNR is for v models; a flow model begins at pure noise already. Switch"
            " it off."
        )
