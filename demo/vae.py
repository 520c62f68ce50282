"""A small VAE with weights for the demo model's latents, to train: it encodes by the mean of 8 x 8 cells and decodes by
enlarging, with a second layer that can learn to draw edges.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .model import LATENT_CHANNELS, SCALE, PixelVAE

WIDTH = 48
_LEAST_LOG_VARIANCE = -30.0
_NOISE = 0.06  # of the decoder's weights at damage 1
_CAST = (-0.5, 0.3, 0.1)  # what damage 1 adds to red, green and blue


class DemoAutoencoder(nn.Module):
    """(B, 3, H, W) in -1..1 <-> latents (B, 3, H // 8, W // 8). It begins as the demo's VAE, but for linear in place of
    bicubic enlarging.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Conv2d(LATENT_CHANNELS, 2 * LATENT_CHANNELS, SCALE, stride=SCALE)
        self.regularization = Mode()
        self.decoder = Decoder()

    def encode(self, pixels: Tensor) -> Tensor:
        """Latents of pictures."""
        return self.regularization(self.encoder(pixels))

    def decode(self, latents: Tensor) -> Tensor:
        """Pictures of latents."""
        return self.decoder(latents)


class Decoder(nn.Module):
    """Enlarges latents, and adds what a second layer draws."""

    def __init__(self) -> None:
        super().__init__()
        self.enlarge = _convolution(LATENT_CHANNELS, LATENT_CHANNELS * SCALE**2)
        self.look = _convolution(LATENT_CHANNELS, WIDTH)
        self.draw = _convolution(WIDTH, LATENT_CHANNELS * SCALE**2)

    def forward(self, latents: Tensor) -> Tensor:
        """(B, 3, h, w) -> (B, 3, 8h, 8w)."""
        return F.pixel_shuffle(self.enlarge(latents) + self.draw(F.silu(self.look(latents))), SCALE)


def _convolution(channels: int, out: int) -> nn.Conv2d:
    return nn.Conv2d(channels, out, 3, padding=1, padding_mode="replicate")


class Mode(nn.Module):
    """The means of moments (B, 2C, h, w)."""

    def forward(self, moments: Tensor) -> Tensor:
        """(B, C, h, w)."""
        return moments.chunk(2, dim=1)[0]


@torch.no_grad()
def initialize_(network: DemoAutoencoder, damage: float = 0.0, seed: int = 0) -> None:
    """First weights, in place. `damage` adds noise and a color cast to the decoder."""
    generator = torch.Generator().manual_seed(seed)
    channels = range(LATENT_CHANNELS)
    network.encoder.weight.zero_()
    for channel in channels:
        network.encoder.weight[channel, channel] = 1.0 / SCALE**2
    assert network.encoder.bias is not None
    network.encoder.bias.copy_(torch.tensor([0.0] * LATENT_CHANNELS + [_LEAST_LOG_VARIANCE] * LATENT_CHANNELS))
    enlarge, look, draw = network.decoder.enlarge, network.decoder.look, network.decoder.draw
    assert enlarge.bias is not None and look.bias is not None and draw.bias is not None
    enlarge.weight.zero_()
    taps = _linear_taps()
    for channel in channels:
        enlarge.weight[channel * SCALE**2 : (channel + 1) * SCALE**2, channel] = taps
    enlarge.bias.zero_()
    look.weight.copy_(torch.randn(look.weight.shape, generator=generator) * look.weight[0].numel() ** -0.5)
    look.bias.zero_()
    draw.weight.zero_()
    draw.bias.zero_()
    enlarge.weight.add_(damage * _NOISE * torch.randn(enlarge.weight.shape, generator=generator))
    enlarge.bias.add_(damage * torch.tensor(_CAST).repeat_interleave(SCALE**2))


def _linear_taps() -> Tensor:
    """(64, 3, 3): how much each pixel of a cell takes of its cell and of the cells around it."""
    ways = []
    for place in range(SCALE):
        offset = (place + 0.5) / SCALE - 0.5
        ways.append(torch.tensor([max(0.0, -offset), 1.0 - abs(offset), max(0.0, offset)]))
    across = torch.stack(ways)
    return torch.einsum("ya,xb->yxab", across, across).flatten(0, 1)


class DemoVAE(PixelVAE):
    """The demo's VAE with weights. Has the methods and attributes of ComfyUI's `comfy.sd.VAE` that nodes use."""

    def __init__(self, network: DemoAutoencoder, patcher: Any, load: Callable[[Any], object]) -> None:
        self.first_stage_model, self.patcher, self._load = network, patcher, load

    @staticmethod
    def process_input(pixels: Tensor) -> Tensor:
        """0..1 to -1..1."""
        return pixels * 2.0 - 1.0

    @staticmethod
    def process_output(pixels: Tensor) -> Tensor:
        """-1..1 to 0..1."""
        return (pixels * 0.5 + 0.5).clamp(0.0, 1.0)

    @torch.no_grad()
    def encode(self, pixel_samples: Tensor) -> Tensor:
        """(B, H, W, 3 or more) in 0..1 -> (B, 3, H // 8, W // 8); a rest of less than 8 pixels is
        cropped off evenly.
        """
        self._load(self.patcher)
        h, w = (side // SCALE * SCALE for side in pixel_samples.shape[1:3])
        top, left = (pixel_samples.shape[1] - h) // 2, (pixel_samples.shape[2] - w) // 2
        pixels = pixel_samples[:, top : top + h, left : left + w, :3].movedim(-1, 1).float()
        return self.first_stage_model.encode(self.process_input(pixels).to(self.patcher.load_device)).cpu()

    @torch.no_grad()
    def decode(self, samples_in: Tensor, vae_options: Any = None) -> Tensor:
        """(B, 3, h, w) -> (B, 8h, 8w, 3) in 0..1."""
        self._load(self.patcher)
        decoded = self.first_stage_model.decode(samples_in.float().to(self.patcher.load_device))
        return self.process_output(decoded).cpu().movedim(1, -1)

    def get_sd(self) -> dict[str, Tensor]:
        """The weights, for saving."""
        return self.first_stage_model.state_dict()
