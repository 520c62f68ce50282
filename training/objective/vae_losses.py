"""The interface of a VAE that training needs, and the losses between a picture and its reconstruction."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..trainable.vae_parts import VaeSettings

_SOBEL = ((-1.0, 0.0, 1.0), (-2.0, 0.0, 2.0), (-1.0, 0.0, 1.0))


class VaeCoder(Protocol):
    """The interface of a VAE for training. ComfyUI's get it from `host.trainable_vae.open_vae`."""

    module: nn.Module
    """The network whose weights are trained; trained names are paths inside it. `encode` and `decode` call it, so that
    its hooks run.
    """
    device: torch.device
    """Where pictures and latents are to be."""
    auto_type: torch.dtype | None
    """As of a `Denoiser`."""
    own_type: torch.dtype
    """As of a `Denoiser`."""
    factor: int
    """How many pixels a latent is wide."""

    def scale_pixels(self, pixels: Tensor) -> Tensor:
        """Pictures in the scale of what the decoder gives.

        Args:
            pixels: (B, 3, H, W) from 0 to 1.
        """

    def encode(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        """The distribution of a picture's latents, differentiable.

        Args:
            pixels: (B, 3, H, W) from 0 to 1.

        Returns:
            (means, logarithms of the variances), both (B, C, h, w); None in place of the latter where the VAE has none.
        """

    def decode(self, latents: Tensor) -> Tensor:
        """Reconstructions, differentiable.

        Args:
            latents: (B, C, h, w) as `encode` gives them.

        Returns:
            Pictures (B, 3, H, W) in float32, in the scale of `scale_pixels`.
        """

    def to_pictures(self, pixels: Tensor) -> Tensor:
        """Reconstructions to look at.

        Args:
            pixels: pictures (B, 3, H, W) from 0 to 1.

        Returns:
            Pictures (B, H, W, 3) from 0 to 1, as ComfyUI has them.
        """


def reconstruction_losses(settings: VaeSettings, decoded: Tensor, pixels: Tensor, mask: Tensor | None = None) -> Tensor:
    """l1 * mean|d| + mse * mean(d^2) + edge * mean|sobel(d)|, of the difference d of a picture and its reconstruction.

    Args:
        settings: the three factors.
        decoded: reconstructions (B, 3, H, W).
        pixels: the pictures, of that shape and in the same scale.
        mask: how much each pixel counts (B, 1, H, W), from 0 to 1; the means go over what counts.

    Returns:
        The losses (B,).
    """
    difference = decoded - pixels
    losses = settings.l1 * _mean(difference.abs(), mask) + settings.mse * _mean(difference.square(), mask)
    if settings.edge:
        losses = losses + settings.edge * _mean(edges(difference).abs(), mask)
    return losses


def edges(pictures: Tensor) -> Tensor:
    """Sobel's differences across and down, divided by 8, so that a ramp of slope 1 has edges of 1; the border is
    repeated.

    Args:
        pictures: (B, C, H, W).

    Returns:
        (B, 2C, H, W): of each channel across, then down.
    """
    across = torch.tensor(_SOBEL, dtype=pictures.dtype, device=pictures.device) / 8
    kernels = torch.stack([across, across.T])[:, None].repeat(pictures.shape[1], 1, 1, 1)
    padded = F.pad(pictures, (1, 1, 1, 1), mode="replicate")
    return F.conv2d(padded, kernels, groups=pictures.shape[1])


def kl_divergence(mean: Tensor, log_variance: Tensor) -> Tensor:
    """KL divergence of latents from a standard normal distribution, summed over each picture's latents as in latent
    diffusion (Rombach 2022, arXiv 2112.10752):

        1/2 sum(mean^2 + variance - 1 - log variance)

    Args:
        mean: means of the latents (B, C, h, w).
        log_variance: logarithms of their variances, of the same shape.

    Returns:
        The divergences (B,), in nats.
    """
    terms = mean.square() + log_variance.exp() - 1 - log_variance
    return 0.5 * terms.flatten(1).sum(1)


def _mean(values: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return values.flatten(1).mean(1)
    weights = mask.to(values).expand_as(values).flatten(1)
    return (values.flatten(1) * weights).sum(1) / weights.sum(1).clamp(min=1e-6)
