"""The distributions that timesteps are drawn from, by name. To add one, list its record here.

Sources: logit-normal and mode of Stable Diffusion 3 (2403.03206); sigmoid, shift and flux_shift of kohya's scripts.
What AI-Toolkit calls shift and flux_shift is another distribution, and has its name in front.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...patches.registry import Registry
from ..random_draws import generator as seeded_generator

TOKENS_AT_1024 = 4096
NO_EXPERT, HIGH_NOISE, LOW_NOISE, BOTH_EXPERTS = EXPERTS = ("none", "high noise", "low noise", "both")
_POOL, _MOST_POOLS = 1024, 4096  # noise levels drawn at once for an expert, and how often before giving up
_HALVINGS = 40  # of the timesteps, to find the one of a noise level: float32 knows no finer ones
_FINE = 10_000  # steps of the schedule that validation chooses an expert's from


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
    @property
    def sigma_bounds(self) -> bool: ...
    @property
    def sigmoid_scale(self) -> float: ...
    @property
    def logit_mean(self) -> float: ...
    @property
    def logit_std(self) -> float: ...
    @property
    def mode_scale(self) -> float: ...
    @property
    def model_shift(self) -> bool: ...
    @property
    def expert(self) -> str: ...
    @property
    def boundary(self) -> float: ...


@dataclass(frozen=True)
class DrawRequest:
    """What is drawn for: the settings, and the patches of 2 x 2 latents that an image has."""

    settings: TimestepSettings
    tokens: int


@dataclass(frozen=True, kw_only=True)
class TimestepSampling:
    """One distribution. `draw(count, generator, request)` gives timestep shares (count,) in [0, 1), drawn on the CPU:
    0 is the cleanest, toward 1 the noisiest.
    """

    name: str
    draw: Callable[[int, torch.Generator, DrawRequest], Tensor]
    gives_levels: bool = False
    """Whether it draws the noise levels (sigmas) of a flow model themselves, so that the model's own shift does not
    count.
    """


def _uniform(count: int, generator: torch.Generator, request: DrawRequest) -> Tensor:
    return torch.rand(count, generator=generator)


def _logit_normal(count: int, generator: torch.Generator, request: DrawRequest) -> Tensor:
    normal = torch.randn(count, generator=generator)
    return (normal * request.settings.logit_std + request.settings.logit_mean).sigmoid()


def shift_timesteps(u: Tensor, shift: float) -> Tensor:
    """Move timestep shares toward noise (s above 1) or away from it (s below 1) (SD 3, Esser 2024, arXiv 2403.03206):

        s u / (1 + (s - 1) u)

    Args:
        u: shares of any shape, from 0 to 1; 0 and 1 stay.
        shift: s, above 0.
    """
    return shift * u / (1 + (shift - 1) * u)


def _draw_shifted(count: int, generator: torch.Generator, request: DrawRequest) -> Tensor:
    return shift_timesteps(torch.rand(count, generator=generator), request.settings.shift)


def _mode(count: int, generator: torch.Generator, request: DrawRequest) -> Tensor:
    u = torch.rand(count, generator=generator)
    return 1 - u - request.settings.mode_scale * (torch.cos(math.pi / 2 * u) ** 2 - 1 + u)


def _sigmoid(count: int, generator: torch.Generator, request: DrawRequest) -> Tensor:
    return (torch.randn(count, generator=generator) * request.settings.sigmoid_scale).sigmoid()


def _shift(count: int, generator: torch.Generator, request: DrawRequest) -> Tensor:
    return shift_timesteps(_sigmoid(count, generator, request), request.settings.shift)


def _shift_of_flux(tokens: int) -> float:
    """Flux's own: the logarithm of the shift rises linearly from 0.5 at 256 tokens to 1.15 at 4096."""
    return math.exp(0.5 + (1.15 - 0.5) * (tokens - 256) / (4096 - 256))


def _flux_shift(count: int, generator: torch.Generator, request: DrawRequest) -> Tensor:
    return shift_timesteps(_sigmoid(count, generator, request), _shift_of_flux(request.tokens))


def _even_flux_shift(count: int, generator: torch.Generator, request: DrawRequest) -> Tensor:
    return shift_timesteps(torch.rand(count, generator=generator), _shift_of_flux(request.tokens))


TIMESTEPS: Registry[TimestepSampling] = Registry(
    "timestep sampling",
    (
        TimestepSampling(name="uniform", draw=_uniform),
        TimestepSampling(name="logit-normal", draw=_logit_normal),
        TimestepSampling(name="shifted", draw=_draw_shifted),
        TimestepSampling(name="mode", draw=_mode),
        TimestepSampling(name="sigmoid", draw=_sigmoid, gives_levels=True),
        TimestepSampling(name="shift", draw=_shift, gives_levels=True),
        TimestepSampling(name="flux_shift", draw=_flux_shift, gives_levels=True),
        TimestepSampling(name="ai-toolkit shift", draw=_draw_shifted, gives_levels=True),
        TimestepSampling(name="ai-toolkit flux_shift", draw=_even_flux_shift, gives_levels=True),
    ),
)


def draw_timesteps(
    settings: TimestepSettings,
    count: int,
    generator: torch.Generator,
    tokens: int = TOKENS_AT_1024,
    sigma: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Draw timestep shares from the chosen distribution, squeezed between the minimum and the maximum timestep as
    kohya's is.

    Args:
        settings: the distribution and its bounds.
        count: how many are drawn.
        generator: what they are drawn with, on the CPU.
        tokens: how many patches of 2 x 2 latents an image has (`tokens_of`), for distributions that shift with it.
        sigma: from shares to the noise levels of a flow model, with its shift. With `sigma_bounds` it says at which
            shares the bounds lie; else it may be left out.

    Returns:
        Shares (count,) in [0, 1): 0 is the cleanest.

    Raises:
        ValueError: where a model has no noise levels between bounds that are noise levels.
    """
    u = TIMESTEPS.get(settings.timesteps).draw(count, generator, DrawRequest(settings, tokens))
    if settings.min_timestep > 0 or settings.max_timestep < 1:
        least, most = _shares_of_bounds(settings, sigma)
        u = least + (most - least) * u
    return u.clamp(0.0, 1 - 2**-24)


def draw_levels(
    settings: TimestepSettings,
    count: int,
    generator: torch.Generator,
    tokens: int,
    sigma: Callable[[Tensor], Tensor],
) -> Tensor:
    """Draw noise levels from the chosen distribution, of an expert on its side of the boundary.

    Args:
        settings: the distribution, its bounds and the expert.
        count: how many are drawn.
        generator: what they are drawn with, on the CPU.
        tokens: how many patches of 2 x 2 latents an image has (`tokens_of`).
        sigma: from shares to the model's noise levels, with its shift.

    Returns:
        Noise levels (count,) on the CPU.

    Raises:
        ValueError: where the settings leave no noise levels to draw.
    """
    if settings.expert != NO_EXPERT:
        return draw_expert_levels(settings, count, generator, tokens, sigma)
    return levels_at(settings, draw_timesteps(settings, count, generator, tokens, sigma), sigma)


def levels_at(settings: TimestepSettings, drawn: Tensor, sigma: Callable[[Tensor], Tensor]) -> Tensor:
    """The noise levels of what `draw_timesteps` has drawn.

    Args:
        settings: those that it was drawn with.
        drawn: shares (B,) in [0, 1).
        sigma: from shares to the model's noise levels, with its shift. A distribution that `gives_levels` doesn't use
            it.

    Returns:
        The levels (B,).
    """
    levels = drawn
    if not gives_levels(settings):
        levels = sigma(drawn)
    if settings.sigma_bounds:  # rounded, a level may lie beside its bound
        levels = levels.clamp(settings.min_timestep, settings.max_timestep)
    return levels


def bounds_as_levels(settings: TimestepSettings, sigma: Callable[[Tensor], Tensor]) -> tuple[float, float]:
    """The noise levels of the minimum and the maximum timestep.

    Args:
        settings: the bounds, which are shares, or noise levels with `sigma_bounds`.
        sigma: from shares to the model's noise levels, with its shift.
    """
    if settings.sigma_bounds or gives_levels(settings):
        return settings.min_timestep, settings.max_timestep
    least, most = sigma(torch.tensor([settings.min_timestep, settings.max_timestep])).tolist()
    return least, most


def _shares_of_bounds(settings: TimestepSettings, sigma: Callable[[Tensor], Tensor] | None) -> tuple[float, float]:
    """Between which shares timesteps are drawn.

    Raises ValueError when a model has no noise levels between bounds that are noise levels.
    """
    bounds = settings.min_timestep, settings.max_timestep
    if not settings.sigma_bounds or gives_levels(settings) or sigma is None:
        return bounds
    wanted = torch.tensor(bounds)
    below, above = torch.zeros(2), torch.ones(2)
    for _ in range(_HALVINGS):
        middle = (below + above) / 2
        is_below = sigma(middle) < wanted
        below, above = torch.where(is_below, middle, below), torch.where(is_below, above, middle)
    least, most = above.tolist()
    if settings.min_timestep == 0:
        least = 0.0
    if least >= most:
        raise ValueError(
            f"Objective Settings: this model has no noise levels (sigma) from minimum timestep {bounds[0]:g} to maximum"
            f" timestep {bounds[1]:g}: its highest is {float(sigma(torch.ones(1))):.3g}."
        )
    return least, most


def _at_least(number: float, dtype: torch.dtype) -> float:
    """The smallest number of a type that is not below another: to compare exactly on a device without float64."""
    nearest = torch.tensor(number, dtype=dtype)
    if nearest.item() < number:
        nearest = torch.nextafter(nearest, torch.tensor(math.inf, dtype=dtype))
    return nearest.item()


def belongs(settings: TimestepSettings, sigma: Tensor) -> Tensor:
    """Which noise levels are the expert's: the boundary itself is the high-noise one's, as in samplers.

    Args:
        settings: the expert and its boundary, a noise level.
        sigma: noise levels (B,).

    Returns:
        Booleans (B,).
    """
    is_high = sigma >= _at_least(settings.boundary, sigma.dtype)
    if settings.expert == HIGH_NOISE:
        return is_high
    return ~is_high


def draw_expert_levels(
    settings: TimestepSettings,
    count: int,
    generator: torch.Generator,
    tokens: int,
    sigma: Callable[[Tensor], Tensor],
) -> Tensor:
    """Draw noise levels from the chosen distribution on the expert's side of the boundary.

    Levels of the other side are drawn again, as musubi-tuner does: the shape of the distribution stays, and the two
    experts of a pair together see what one model would.

    Args:
        settings: the distribution, the expert and its boundary.
        count: how many are drawn.
        generator: what they are drawn with, on the CPU.
        tokens: how many patches of 2 x 2 latents an image has (`tokens_of`).
        sigma: from shares to the model's noise levels, with its shift.

    Returns:
        Noise levels (count,) on the CPU.

    Raises:
        ValueError: where the distribution has next to none there, or no boundary is set.
    """
    if not settings.boundary:
        raise ValueError("Objective Settings: expert boundary is 0, and was not replaced by the model's own.")
    found = torch.empty(0)
    for _ in range(_MOST_POOLS):
        levels = levels_at(settings, draw_timesteps(settings, max(count, _POOL), generator, tokens), sigma)
        found = torch.cat([found, levels[belongs(settings, levels)]])
        if len(found) >= count:
            return found[:count]
    raise ValueError(
        f"Objective Settings: timestep sampling {settings.timesteps} draws next to no noise levels for expert"
        f" {settings.expert} (boundary {settings.boundary:g}). Set timestep sampling to uniform."
    )


def expert_levels_at(settings: TimestepSettings, shares: Tensor, sigma: Callable[[Tensor], Tensor]) -> Tensor:
    """Noise levels spread over the expert's part of the model's schedule, for validation.

    Args:
        settings: the expert and its boundary.
        shares: where in that part (B,), from 0, its cleanest, to below 1.
        sigma: from shares to the model's noise levels, with its shift.

    Returns:
        The levels (B,).

    Raises:
        ValueError: where the schedule has none on the expert's side.
    """
    schedule = sigma((torch.arange(_FINE) + 0.5) / _FINE)
    own = schedule[belongs(settings, schedule)]
    if not len(own):
        raise ValueError(
            f"Objective Settings: this model's schedule has no noise levels for expert {settings.expert} (boundary"
            f" {settings.boundary:g}). Set expert boundary to 0."
        )
    return own[(shares * len(own)).long()]


def gives_levels(settings: TimestepSettings) -> bool:
    """Whether what is drawn are the noise levels of a flow model, without its own shift."""
    return TIMESTEPS.get(settings.timesteps).gives_levels or not settings.model_shift


def tokens_of(shape: Sequence[int]) -> int:
    """How many patches of 2 x 2 latents a frame has, which distributions of Flux shift with.

    Args:
        shape: the sizes of latents (…, C, [frames,] h, w), or of sound (C, T) without the batch, whose tokens are its T
            places.
    """
    if len(shape) == 2:
        return shape[1]
    return (shape[-2] // 2) * (shape[-1] // 2)


def describe_levels(settings: TimestepSettings, sigma: Callable[[Tensor], Tensor], tokens: int) -> str:
    """A line for the report of a flow model: which noise levels are drawn, from 10,000 draws of their own.

    Args:
        settings: the distribution, its bounds and the expert.
        sigma: from shares to the model's noise levels, with its shift.
        tokens: how many patches of 2 x 2 latents an image has (`tokens_of`).
    """
    generator = seeded_generator(0, 0, "noise levels of the report")
    shift = "without the model's own shift"
    if not gives_levels(settings):
        shift = "on top of the model's own shift"
    levels = draw_levels(settings, 10_000, generator, tokens, sigma).to("cpu", torch.float64)
    least, median, most = levels.quantile(torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)).tolist()
    return (
        f"timestep sampling {settings.timesteps}, {shift}: half of the noise levels (sigma) are above {median:.2f}, 90%"
        f" of them from {least:.2f} to {most:.2f}{_describe_bounds(settings, sigma)}"
    )


def _describe_bounds(settings: TimestepSettings, sigma: Callable[[Tensor], Tensor]) -> str:
    if settings.min_timestep == 0 and settings.max_timestep == 1:
        return ""
    least, most = bounds_as_levels(settings, sigma)
    return (
        f"; none below {least:.3g} (minimum timestep {settings.min_timestep:g}) or above {most:.3g} (maximum timestep"
        f" {settings.max_timestep:g})"
    )
