"""What a model predicts (eps, v, flow) and its noise levels, from ComfyUI's model sampling."""

from __future__ import annotations

import copy

import torch

from ..patches.core.clones import put_object
from .comfyui_objects import Model, Sampling

# ComfyUI's model samplings whose prediction training does not know.
_UNKNOWN = {"EDM", "X0", "IMG_TO_IMG", "V_PREDICTION_DDPM", "IMG_TO_IMG_FLOW"}


def prediction_type(sampling: Sampling) -> str:
    """What a model with this model sampling predicts: "eps", "v", "flow", or the class's own names when training does
    not know it.
    """
    import comfy.model_sampling as known

    names = {cls.__name__ for cls in type(sampling).__mro__}
    if isinstance(sampling, known.CONST) and "IMG_TO_IMG_FLOW" not in names:
        return "flow"
    if has_cosmos_levels(sampling):
        return "flow"
    if names & _UNKNOWN or not isinstance(sampling, known.EPS):
        bases = [cls.__name__ for cls in type(sampling).__mro__[1:] if cls not in (torch.nn.Module, object)]
        return "/".join(bases) or type(sampling).__name__
    if isinstance(sampling, known.V_PREDICTION):
        return "v"
    return "eps"


def has_cosmos_levels(sampling: Sampling) -> bool:
    """Whether a model is a flow whose noise levels ComfyUI counts from 0 to about 80, as Cosmos Predict 2's.

    Its noisy latents are clean + s * noise. Divided by 1 + s they are those of a flow, (1 - t) * clean + t * noise with
    t = s / (1 + s). That is what the network gets, and what it predicts is a flow's, noise - clean.
    """
    return any(cls.__name__ == "COSMOS_RFLOW" for cls in type(sampling).__mro__)


def noisy_latents(sampling: Sampling, clean: torch.Tensor, noise: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """Clean latents (B, C, …, h, w) with noise of level sigma (B,), which is from 0 to 1 for every flow."""
    level = _broadcast_to(sigma, clean)
    if has_cosmos_levels(sampling):
        return (1 - level) * clean + level * noise
    return sampling.noise_scaling(level, noise, clean)


def to_comfyui_scale(sampling: Sampling, x: torch.Tensor, sigma: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy latents and their noise levels as ComfyUI's model takes them, from training's."""
    if not has_cosmos_levels(sampling):
        return x, sigma
    signal = (1 - sigma).clamp(min=torch.finfo(sigma.dtype).eps)  # a drawn level may be rounded to 1
    return x / _broadcast_to(signal, x), sigma / signal


def _broadcast_to(sigma: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    """Noise levels (B,) as (B, 1, …), to be computed with latents."""
    return sigma.view(-1, *[1] * (latents.ndim - 1))


def sigma_at(sampling: Sampling, u: torch.Tensor) -> torch.Tensor:
    """Noise levels (B,) of a model sampling at timesteps from 0 to 1 (B,): from its table, or with its own shift for
    flows.
    """
    if has_cosmos_levels(sampling):
        largest = float(sampling.sigma_max)
        return u.to(torch.float32).clamp(max=largest / (1 + largest))
    if hasattr(sampling, "log_sigmas"):  # continuous schedules (EDM) have a table too, but other timesteps
        table = sampling.sigmas.to(u.device, torch.float32)
        return table[(u * len(table)).long().clamp(max=len(table) - 1)]
    return sampling.sigma(u * getattr(sampling, "multiplier", 1.0)).to(torch.float32)


def timestep_of(sampling: Sampling, sigma: torch.Tensor) -> torch.Tensor:
    """The timesteps (B,) of noise levels as ComfyUI counts them, from 0 (no noise) to 1000: diffusers' timesteps of
    models with a table, and a thousand times the level of a flow.
    """
    if has_cosmos_levels(sampling):
        return 1000 * sigma / (1 + sigma)
    if prediction_type(sampling) == "flow":
        return 1000 * sigma
    if not hasattr(sampling, "log_sigmas"):  # Stable Cascade
        return 1000 * sampling.timestep(sigma) / getattr(sampling, "multiplier", 1.0)
    table = sampling.log_sigmas.to(sigma.device)
    nearest = (sigma.log().unsqueeze(1) - table).abs().argmin(dim=1)
    return nearest.float() * (1000 / len(table))


def with_zero_terminal_snr(patcher: Model, enabled: bool) -> Model:
    """A MODEL whose noise levels reach zero terminal SNR (Lin 2023) when that is enabled and it is a v model; else the
    MODEL itself.

    Raises ValueError for a v model whose schedule is not discrete.
    """
    from ..training.objective.noise import zero_terminal

    sampling = patcher.get_model_object("model_sampling")
    if not enabled or prediction_type(sampling) != "v":
        return patcher
    if not hasattr(sampling, "set_sigmas"):
        raise ValueError(
            "Objective Settings: zero terminal SNR needs a model with discrete noise levels, and this model's are"
            f" continuous, up to sigma {float(sampling.sigma_max):g}"
            f" ({'/'.join(cls.__name__ for cls in type(sampling).__bases__)}). Switch it off."
        )
    sampling = copy.deepcopy(sampling)
    sampling.set_sigmas(zero_terminal(sampling.sigmas).float().to(sampling.sigmas.device))
    clone = patcher.clone()
    put_object(clone, "model_sampling", sampling)
    return clone
