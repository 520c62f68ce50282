"""Samplers and noise schedules: Euler and ancestral Euler (Karras 2022; k-diffusion), DPM-Solver++ 2M (Lu 2022)."""

# mypy: disable-error-code="import-untyped"
# tqdm's types are a package of their own.

import math

import torch
from tqdm.auto import trange

import comfy.model_sampling

from . import utils


def append_zero(x):
    """The schedule with its end, no noise."""
    return torch.cat([x, x.new_zeros([1])])


def get_sigmas_karras(n, sigma_min, sigma_max, rho=7.0, device="cpu"):
    """n noise levels evenly spaced in sigma^(1/rho), then 0 (Karras 2022, equation 5)."""
    high, low = sigma_max ** (1 / rho), sigma_min ** (1 / rho)
    return append_zero((high + torch.linspace(0, 1, n, device=device) * (low - high)) ** rho)


def get_sigmas_exponential(n, sigma_min, sigma_max, device="cpu"):
    """n noise levels evenly spaced in the logarithm, then 0."""
    return append_zero(torch.linspace(math.log(sigma_max), math.log(sigma_min), n, device=device).exp())


def to_d(x, sigma, denoised):
    """The derivative of x with respect to sigma."""
    return (x - denoised) / utils.append_dims(sigma, x.ndim)


def get_ancestral_step(sigma_from, sigma_to, eta=1.0):
    """(level to step down to, noise to add) so that both make sigma_to."""
    if not eta:
        return sigma_to, 0.0
    up = min(sigma_to, eta * (sigma_to**2 * (sigma_from**2 - sigma_to**2) / sigma_from**2) ** 0.5)
    return (sigma_to**2 - up**2) ** 0.5, up


def default_noise_sampler(x, seed=None):
    """A function of (sigma, next sigma) that draws noise like x from a generator of its own, or the global one without
    a seed.

    On the CPU the seed is one higher, so that the noise of steps is not the noise that sampling started from (ComfyUI
    0.4 and later).
    """
    generator = None
    if seed is not None:
        generator = torch.Generator(device=x.device).manual_seed(seed + (x.device.type == "cpu"))
    return lambda sigma, sigma_next: torch.randn(
        x.size(), dtype=x.dtype, layout=x.layout, device=x.device, generator=generator
    )


def _steps(model, x, sigmas, extra_args, disable):
    """Yields (i, sigma, next sigma, denoise) for each step; denoise(x, sigma) is the model's x0."""
    extra_args, ones = extra_args or {}, x.new_ones([x.shape[0]])
    for i in trange(len(sigmas) - 1, disable=disable):
        yield i, sigmas[i], sigmas[i + 1], lambda x, sigma: model(x, sigma * ones, **extra_args)


def _tell(callback, x, i, sigma, sigma_hat, denoised):
    if callback is not None:
        callback({"x": x, "i": i, "sigma": sigma, "sigma_hat": sigma_hat, "denoised": denoised})


@torch.no_grad()
def sample_euler(
    model,
    x,
    sigmas,
    extra_args=None,
    callback=None,
    disable=None,
    s_churn=0.0,
    s_tmin=0.0,
    s_tmax=float("inf"),
    s_noise=1.0,
):
    """Euler steps, with noise churned in when asked for (Karras 2022, algorithm 2)."""
    for i, sigma, sigma_next, denoise in _steps(model, x, sigmas, extra_args, disable):
        sigma_hat = sigma
        if s_churn > 0 and s_tmin <= sigma <= s_tmax:
            sigma_hat = sigma * (1 + min(s_churn / (len(sigmas) - 1), 2**0.5 - 1))
            x = x + torch.randn_like(x) * s_noise * (sigma_hat**2 - sigma**2) ** 0.5
        denoised = denoise(x, sigma_hat)
        _tell(callback, x, i, sigma, sigma_hat, denoised)
        x = x + to_d(x, sigma_hat, denoised) * (sigma_next - sigma_hat)
    return x


@torch.no_grad()
def sample_euler_ancestral(
    model, x, sigmas, extra_args=None, callback=None, disable=None, eta=1.0, s_noise=1.0, noise_sampler=None
):
    """Euler steps a little too far down, and fresh noise back up."""
    if isinstance(model.inner_model.inner_model.model_sampling, comfy.model_sampling.CONST):
        return sample_euler_ancestral_RF(model, x, sigmas, extra_args, callback, disable, eta, s_noise, noise_sampler)
    draw = default_noise_sampler(x, seed=(extra_args or {}).get("seed")) if noise_sampler is None else noise_sampler
    for i, sigma, sigma_next, denoise in _steps(model, x, sigmas, extra_args, disable):
        denoised = denoise(x, sigma)
        down, up = get_ancestral_step(sigma, sigma_next, eta=eta)
        _tell(callback, x, i, sigma, sigma, denoised)
        if down == 0:
            x = denoised
            continue
        x = x + to_d(x, sigma, denoised) * (down - sigma) + draw(sigma, sigma_next) * s_noise * up
    return x


@torch.no_grad()
def sample_euler_ancestral_RF(
    model, x, sigmas, extra_args=None, callback=None, disable=None, eta=1.0, s_noise=1.0, noise_sampler=None
):
    """The same for rectified flow, where signal shrinks as noise grows."""
    draw = default_noise_sampler(x, seed=(extra_args or {}).get("seed")) if noise_sampler is None else noise_sampler
    for i, sigma, sigma_next, denoise in _steps(model, x, sigmas, extra_args, disable):
        denoised = denoise(x, sigma)
        _tell(callback, x, i, sigma, sigma, denoised)
        if sigma_next == 0:
            x = denoised
            continue
        down = sigma_next * (1 + (sigma_next / sigma - 1) * eta)
        x = down / sigma * x + (1 - down / sigma) * denoised
        if eta > 0:
            signal = (1 - sigma_next) / (1 - down)
            x = signal * x + draw(sigma, sigma_next) * s_noise * (sigma_next**2 - down**2 * signal**2) ** 0.5
    return x


@torch.no_grad()
def sample_dpmpp_2m(model, x, sigmas, extra_args=None, callback=None, disable=None):
    """DPM-Solver++ with the previous prediction for second order."""
    previous, h_previous = None, None
    for i, sigma, sigma_next, denoise in _steps(model, x, sigmas, extra_args, disable):
        denoised = denoise(x, sigma)
        _tell(callback, x, i, sigma, sigma, denoised)
        h = sigma.log() - sigma_next.log()
        target = denoised
        if previous is not None and sigma_next != 0:
            r = h_previous / h
            target = (1 + 1 / (2 * r)) * denoised - 1 / (2 * r) * previous
        x = sigma_next / sigma * x - torch.expm1(-h) * target
        previous, h_previous = denoised, h
    return x
