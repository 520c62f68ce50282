"""A patch discriminator (PatchGAN, arXiv 1611.07004), and the losses that VQGAN trains a VAE with beside it (arXiv
2012.09841).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEAST_SIDE = 24  # pixels: of smaller pictures no patch is left
MOST_WEIGHT = 1e4  # of the adaptive weight
_SPREAD = 0.02  # standard deviation of first weights
_KERNEL = 4


class PatchDiscriminator(nn.Module):
    """Pictures (B, 3, H, W) to a number for each patch of 70 x 70 pixels (B, 1, h, w): the higher, the more real.

    It is built without weights, which each call gets (`judged`).
    """

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            layers: list[nn.Module] = [nn.Conv2d(3, 64, _KERNEL, stride=2, padding=1), nn.LeakyReLU(0.2)]
            for channels, out, stride in ((64, 128, 2), (128, 256, 2), (256, 512, 1)):
                layers.append(nn.Conv2d(channels, out, _KERNEL, stride=stride, padding=1, bias=False))
                layers.append(nn.BatchNorm2d(out, track_running_stats=False))
                layers.append(nn.LeakyReLU(0.2))
            layers.append(nn.Conv2d(512, 1, _KERNEL, padding=1))
            self.layers = nn.Sequential(*layers)

    def forward(self, pictures: Tensor) -> Tensor:
        """How real each patch is.

        Args:
            pictures: (B, 3, H, W).

        Returns:
            A number for each patch (B, 1, h, w): the higher, the more real.
        """
        return self.layers(pictures)

    def first_weights(self, generator: torch.Generator) -> dict[str, Tensor]:
        """The weights to begin with, as pix2pix draws them: normal with deviation 0.02, scales around 1, biases 0.

        Args:
            generator: what they are drawn with, on the CPU.

        Returns:
            The weights by parameter name, in float32.
        """
        weights = {}
        for name, parameter in self.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator) * _SPREAD
            if name.endswith("bias"):
                weights[name] = torch.zeros(parameter.shape)
            elif parameter.ndim == 1:
                weights[name] = 1 + drawn
            else:
                weights[name] = drawn
        return weights

    def judge(self, pictures: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """What the discriminator says of pictures with these weights.

        Args:
            pictures: (B, 3, H, W).
            weights: by parameter name, as `first_weights` gives them. They may be leaves of another optimizer.

        Returns:
            A number for each patch (B, 1, h, w), differentiable in both.
        """
        return torch.func.functional_call(self, dict(weights), (pictures,))


def hinge_losses(real: Tensor, fake: Tensor) -> Tensor:
    """The discriminator's loss (Lim 2017, arXiv 1705.02894): 1/2 mean(max(0, 1 - real)) + 1/2 mean(max(0, 1 + fake)).

    Args:
        real: what it says of real pictures (B, 1, h, w).
        fake: what it says of their reconstructions, of the same shape.

    Returns:
        The losses (B,).
    """
    return 0.5 * (_mean(F.relu(1 - real)) + _mean(F.relu(1 + fake)))


def adversarial_losses(fake: Tensor) -> Tensor:
    """The VAE's loss: -mean(fake).

    Args:
        fake: what the discriminator says of its reconstructions (B, 1, h, w).

    Returns:
        The losses (B,).
    """
    return -_mean(fake)


def adaptive_weight(reconstruction: Tensor, adversarial: Tensor, last_layer: Tensor) -> Tensor:
    """The weight of the adversarial loss that makes both move the decoder's last layer equally far (VQGAN, Esser 2021,
    arXiv 2012.09841, equation 7):

        |d reconstruction / d last_layer| / (|d adversarial / d last_layer| + 1e-4)

    Args:
        reconstruction: all other losses, a tensor without dimensions.
        adversarial: the adversarial loss, a tensor without dimensions.
        last_layer: the weight whose gradients are compared, of any shape. The graph of both losses is kept.

    Returns:
        The weight, without a graph, from 0 to `MOST_WEIGHT`.
    """
    norms = []
    for loss in (reconstruction, adversarial):
        (gradient,) = torch.autograd.grad(loss, last_layer, retain_graph=True)
        norms.append(gradient.float().norm())
    return (norms[0] / (norms[1] + 1e-4)).clamp(0.0, MOST_WEIGHT)


def _mean(values: Tensor) -> Tensor:
    return values.flatten(1).mean(1)
