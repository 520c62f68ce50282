"""What a pass over a batch draws: noise levels, noise, and the noise of input perturbation, in this order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...patches.token_downsampling.unet import EVALUATING
from ..data.parts import Parts
from ..memory.offload import to_device
from ..objective.denoiser import Denoiser
from ..objective.noise import nearest, noise_like
from ..objective.settings import ObjectiveSettings
from ..objective.timesteps import NO_EXPERT, draw_expert_levels, draw_timesteps, expert_levels_at, levels_at, tokens_of
from ..random_draws import generator as seeded_generator

NOISE_LEVELS = 4  # of each held-out image


class NoiseDraw(NamedTuple):
    """What was drawn for latents (B, C, …, h, w): noise levels (B,), noise, and the noise of input perturbation."""

    sigma: Tensor
    noise: Tensor
    extra: Tensor | None = None

    def twice(self) -> NoiseDraw:
        """The same for the worse pictures of pairs, behind those for the better ones."""
        extra = self.extra
        if extra is not None:
            extra = torch.cat([extra, extra])
        return NoiseDraw(torch.cat([self.sigma, self.sigma]), torch.cat([self.noise, self.noise]), extra)


class Draws:
    """Draws for one pass of a training step. `generator` is the pass's own; `options` are what the pass tells patches
    of the model. `number` is that of a held-out picture, None in training.
    """

    def __init__(self, generator: torch.Generator, options: Mapping[str, Any], number: int | None = None) -> None:
        self.generator, self.options, self.number = generator, options, number

    def draw(self, objective: ObjectiveSettings, denoiser: Denoiser, clean: Tensor, parts: Parts) -> NoiseDraw:
        """Noise levels and noise for clean latents (B, C, …, h, w), by the objective's settings."""
        shape = parts[0] if parts else clean.shape[1:]
        sigma = self._levels(objective, denoiser, len(clean), tokens_of(shape))
        noise = self._noise(objective, clean, parts)
        for _ in range(1, objective.noise_candidates):
            noise = nearest(clean, noise, self._noise(objective, clean, parts))
        if not objective.ip_noise:
            return NoiseDraw(sigma, noise)
        return NoiseDraw(sigma, noise, objective.ip_noise * self._normal(clean))

    def _levels(self, objective: ObjectiveSettings, denoiser: Denoiser, count: int, tokens: int) -> Tensor:
        """Noise levels (B,) for so many latents of so many tokens, on the model's device."""
        device = denoiser.device
        if objective.expert != NO_EXPERT:
            return to_device(draw_expert_levels(objective, count, self.generator, tokens, denoiser.sigma), device)
        drawn = to_device(draw_timesteps(objective, count, self.generator, tokens, denoiser.sigma), device)
        return levels_at(objective, drawn, denoiser.sigma)

    def _noise(self, objective: ObjectiveSettings, clean: Tensor, parts: Parts) -> Tensor:
        strengths = objective.offset_noise, objective.pyramid_noise
        return to_device(noise_like(clean, *strengths, self.generator, parts, objective.pyramid_kind), clean.device)

    def _normal(self, clean: Tensor) -> Tensor:
        return to_device(torch.randn(clean.shape, generator=self.generator), clean.device)


class HeldOutDraws(Draws):
    """Draws for a held-out picture: they depend on the run's seed and the picture's number alone. The noise levels are
    spread evenly over the model's schedule, or over the expert's part of it, and the noise is plain.
    """

    def __init__(self, seed: int, number: int) -> None:
        super().__init__(seeded_generator(seed, number, "validation"), {EVALUATING: True}, number)

    def draw(self, objective: ObjectiveSettings, denoiser: Denoiser, clean: Tensor, parts: Parts) -> NoiseDraw:
        """The same levels and noise at every step, for copies (B, C, …, h, w) of one picture's latents."""
        offset = torch.rand((), generator=self.generator)
        shares = (torch.arange(len(clean)) + offset) / len(clean)
        if objective.expert != NO_EXPERT:
            sigma = to_device(expert_levels_at(objective, shares, denoiser.sigma), denoiser.device)
        else:
            sigma = denoiser.sigma(to_device(shares, denoiser.device))
        return NoiseDraw(sigma, self._normal(clean))
