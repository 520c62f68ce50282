"""Timestep embedding and noise schedules of diffusion UNets."""

import math

import torch


def timestep_embedding(timesteps, dim, max_period=10000, repeat_only=False):
    """(B,) timesteps, fractions allowed, to (B, dim): cosines, then sines, of geometrically spaced frequencies (Vaswani
    2017).
    """
    if repeat_only:
        return timesteps[:, None].expand(-1, dim)
    half = dim // 2
    steps = torch.arange(half, dtype=torch.float32, device=timesteps.device)
    angles = timesteps[:, None].float() * torch.exp(-math.log(max_period) * steps / half)[None]
    embedding = torch.cat([angles.cos(), angles.sin()], dim=-1)
    return torch.nn.functional.pad(embedding, (0, dim % 2))


def make_beta_schedule(schedule, n_timestep, linear_start=1e-4, linear_end=2e-2, cosine_s=8e-3):
    """The (n_timestep,) float64 betas of a named schedule: linear (in the square root), sqrt_linear, sqrt or cosine."""
    if schedule == "linear":
        return torch.linspace(linear_start**0.5, linear_end**0.5, n_timestep, dtype=torch.float64) ** 2
    if schedule == "sqrt_linear":
        return torch.linspace(linear_start, linear_end, n_timestep, dtype=torch.float64)
    if schedule == "sqrt":
        return torch.linspace(linear_start, linear_end, n_timestep, dtype=torch.float64) ** 0.5
    if schedule == "cosine":
        t = torch.arange(n_timestep + 1, dtype=torch.float64) / n_timestep + cosine_s
        alphas = torch.cos(t / (1 + cosine_s) * math.pi / 2) ** 2
        return (1 - alphas[1:] / alphas[:-1]).clamp(0, 0.999)
    raise ValueError(
        f"unknown noise schedule {schedule!r}; the embedded host knows linear, sqrt_linear, sqrt and cosine"
    )
