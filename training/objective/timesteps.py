"""The distributions that timesteps are drawn from, by name. To add one, list its record here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...patches.registry import Registry


@dataclass(frozen=True, kw_only=True)
class TimestepSampling:
    """One timestep sampling.

    `draw(count, generator, shift)` gives timesteps (count,) as fractions in [0, 1), drawn on the CPU: 0 is the
    cleanest, toward 1 the noisiest.
    """

    name: str
    draw: Callable[[int, torch.Generator, float], Tensor]


class TimestepSettings(Protocol):
    """The objective settings that timesteps depend on."""

    @property
    def timesteps(self) -> str: ...
    @property
    def shift(self) -> float: ...
    @property
    def min_timestep(self) -> float: ...
    @property
    def max_timestep(self) -> float: ...


def _uniform(count: int, generator: torch.Generator, shift: float) -> Tensor:
    return torch.rand(count, generator=generator)


def _logit_normal(count: int, generator: torch.Generator, shift: float) -> Tensor:
    return torch.randn(count, generator=generator).sigmoid()


def _shifted(count: int, generator: torch.Generator, shift: float) -> Tensor:
    """u moved to s u / (1 + (s - 1) u): towards noise with s above 1."""
    u = torch.rand(count, generator=generator)
    return shift * u / (1 + (shift - 1) * u)


TIMESTEPS: Registry[TimestepSampling] = Registry(
    "timesteps",
    (
        TimestepSampling(name="uniform", draw=_uniform),
        TimestepSampling(name="logit-normal", draw=_logit_normal),
        TimestepSampling(name="shifted", draw=_shifted),
    ),
)


def draw_timesteps(settings: TimestepSettings, count: int, generator: torch.Generator) -> Tensor:
    """Timestep shares (count,) in [0, 1) of the chosen distribution.

    `min_timestep` and `max_timestep` squeeze the whole distribution between them, as kohya's do.
    """
    u = TIMESTEPS.get(settings.timesteps).draw(count, generator, settings.shift)
    if settings.min_timestep > 0 or settings.max_timestep < 1:
        u = settings.min_timestep + (settings.max_timestep - settings.min_timestep) * u
    return u.clamp(0.0, 1 - 2**-24)
