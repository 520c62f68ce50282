"""Noise that training adds to latents, and the levels it is added at.

Sources: offset noise (crosslabs.org), pyramid noise (Whitaker 2023, "Multi-Resolution Noise for Diffusion Model
Training", which EveryDream2 has, and kohya's form of it), input perturbation (Ning 2023, arXiv 2301.11706), nearest
noise (Li 2024, arXiv 2406.12303), zero terminal SNR (Lin 2023, arXiv 2305.08891).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.parts import Parts, pack_parts, unpack_parts

# alpha-bar that stands for 0 at the last timestep, which has no finite sigma: the host's own number
LAST_SIGNAL = 4.8973451890853435e-08

PYRAMIDS = {"kohya": 6, "everydream2": 10}  # kinds of pyramid noise, and how many levels they have at most


def noise_like(
    latents: Tensor,
    offset: float,
    pyramid: float,
    generator: torch.Generator,
    parts: Parts = (),
    pyramid_kind: str = "kohya",
) -> Tensor:
    """Draw noise on the CPU: normal, plus noise offset, plus pyramid noise.

    Args:
        latents: what the noise is for, (B, C, …, h, w), of sound (B, C, T); its values don't matter.
        offset: the strength of a noise offset, one normal number for each channel. 0 draws none.
        pyramid: the discount of pyramid noise, the strength of a level as a share of the next finer one's. 0 draws
            none.
        generator: what everything is drawn with, in this order.
        parts: the parts that latents are packed of; each gets its own noise.
        pyramid_kind: one of `PYRAMIDS`.

    Returns:
        Noise of the shape of `latents`, in float32. Its standard deviation is 1 with pyramid noise, and
        sqrt(1 + offset^2) with an offset alone.
    """
    if parts:
        return pack_parts(
            [
                noise_like(part, offset, pyramid, generator, pyramid_kind=pyramid_kind)
                for part in unpack_parts(latents, parts)
            ]
        )
    shape = latents.shape
    noise = torch.randn(shape, generator=generator)
    if offset:
        noise = noise + offset * torch.randn(*shape[:2], *[1] * (len(shape) - 2), generator=generator)
    if pyramid:
        sides = shape[2:][-2:]
        noise = _pyramid(noise.reshape(shape[0], -1, *sides), pyramid, generator, pyramid_kind).reshape(shape)
    return noise


def _pyramid(noise: Tensor, discount: float, generator: torch.Generator, kind: str) -> Tensor:
    """Add pyramid noise: coarser and coarser noise, enlarged bilinearly (over time alone: linearly); the result has
    standard deviation 1.

    The sides of level i are divided by r^i with r uniform in [2, 4), and its strength is discount^i; i starts at 0.
    kohya divides the sides of the latents, everydream2 those of the level before.
    """
    b, c, *sides = noise.shape
    mode = "bilinear" if len(sides) == 2 else "linear"
    size = sides
    for level in range(PYRAMIDS[kind]):
        r = float(torch.rand((), generator=generator)) * 2 + 2
        divided = sides if kind == "kohya" else size
        size = [max(1, int(side / r**level)) for side in divided]
        coarse = torch.randn(b, c, *size, generator=generator)
        noise = noise + F.interpolate(coarse, size=sides, mode=mode) * discount**level
        if 1 in size:
            break
    return noise / noise.std()


def nearest(latents: Tensor, noise: Tensor, other: Tensor) -> Tensor:
    """The nearer one of two noises for each image, by mean square: where images get noise that is near to them, their
    paths cross less (Immiscible Diffusion, Li 2024, arXiv 2406.12303). Each image chooses among its own draws, as in
    ostris/ai-toolkit (`get_optimal_noise` in jobs/process/BaseSDTrainProcess.py); the paper assigns the noises of a
    batch to its images.

    Args:
        latents: the images (B, C, …).
        noise: an earlier draw (B, C, …), which stays where the other is not nearer.
        other: the next draw (B, C, …).

    Returns:
        Noise of the same shape.
    """
    distances = [(latents - one).square().flatten(1).mean(1) for one in (noise, other)]
    is_nearer = (distances[1] < distances[0]).view(-1, *[1] * (latents.ndim - 1))
    return torch.where(is_nearer, other, noise)


def perturbation(prediction: str, sigma: Tensor) -> Tensor:
    """By how much the denoised target moves per unit of input perturbation (Ning 2023, arXiv 2301.11706):

        eps, flow    sigma
        v            sigma / (1 + sigma^2)

    The network still has to predict noise, velocity or flow without the perturbation. Turned into denoised latents at
    the perturbed input, that is the clean latents plus this factor times the perturbation.

    Args:
        prediction: what the network predicts: eps, v or flow.
        sigma: noise levels (B,).

    Returns:
        The factors (B,).
    """
    if prediction == "v":
        return sigma / (1 + sigma**2)
    return sigma


def zero_terminal(sigmas: Tensor) -> Tensor:
    """Zero terminal SNR (Lin 2023, arXiv 2305.08891, algorithm 1): change a table of noise levels such that the last
    one has no signal.

    sqrt(alpha-bar) is shifted and scaled; the first level stays as it is. A table that ends without signal already is
    returned unchanged.

    Args:
        sigmas: the model's noise levels (T,), rising.

    Returns:
        The new levels (T,), float64 on the CPU.
    """
    sigmas64 = sigmas.to("cpu", torch.float64)
    signal = (1 + sigmas64**2) ** -0.5
    if float(signal[-1] ** 2) <= LAST_SIGNAL * 1.01:
        return sigmas64
    bar = ((signal - signal[-1]) * signal[0] / (signal[0] - signal[-1])) ** 2
    bar[-1] = LAST_SIGNAL
    return ((1 - bar) / bar).sqrt()
