"""A step and a validation of VAE training: crops of pictures are encoded, decoded and compared with themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from ..data.batches import Batch
from ..data.dataset import DatasetImage
from ..data.stored_latent import read_latent
from ..memory.offload import to_device
from ..objective import perceptual
from ..objective.autoencoder import Autoencoder, kl_divergence, reconstruction_losses
from ..optimizers.precision import autocast
from ..trainable.autoencoder import AutoencoderSettings, last_layer, side_of
from .workspace import Workspace

Box = tuple[slice, slice]
MOST_TILES = 64  # that the movement of the latents is measured on


class LatentsMoved(RuntimeError):
    """The latent space is not the base's any more."""


def settings_of(work: Workspace) -> AutoencoderSettings | None:
    """The settings of VAE training; None where a diffusion model is trained."""
    return work.start_state.start.autoencoder


def batch_losses(work: Workspace, batch: Batch, generator: torch.Generator) -> Tensor:
    """Losses (B,) of one group of pictures, with the graph that leads to the trained weights.

    `generator` draws where each picture is cut, and the latents where there is a KL loss.
    """
    settings, coder = _parts(work)
    boxes = [_drawn_box(picture, settings.crop, coder.factor, generator) for picture in batch.latents]
    mask = None
    if batch.mask is not None:
        mask = _cut(batch.mask, boxes)
    return _losses(work, _cut(batch.latents, boxes), mask, generator)


@torch.no_grad()
def held_out_losses(work: Workspace, image: DatasetImage) -> Tensor:
    """The losses (tiles,) of a held-out picture, cut into squares of the crop size, one after the other."""
    settings, coder = _parts(work)
    picture, losses = read_latent(image.latent), []
    with work.stepper.evaluated():
        for box in tiles(picture, settings.crop, coder.factor):
            mask = None
            if image.mask is not None:
                mask = _cut(image.mask[None], [box])
            losses.append(_losses(work, _cut(picture[None], [box]), mask, None))
    return torch.cat(losses)


@torch.no_grad()
def check_latents(work: Workspace) -> None:
    """Raises LatentsMoved when the latents of held-out pictures are too far from the base's."""
    if settings_of(work) is None:
        return
    settings, coder = _parts(work)
    if not settings.trains_encoder:
        return
    images = work.dataset.held_out
    with work.stepper.evaluated():
        now = latents_of(coder, images, settings.crop)
    if not work.base_latents:
        with work.plain():
            work.base_latents = latents_of(coder, images, settings.crop)
    moved = movement(work.base_latents, now)
    if moved <= settings.latent_bound:
        return
    raise LatentsMoved(
        f"Step {work.step}: the latents of held-out pictures have moved by {moved:.3g} of their standard deviation, and"
        f" latent bound allows {settings.latent_bound:g}. Models that were made for this latent space would not fit any"
        " more. Use a lower learning rate or fewer steps, train the decoder only, or raise latent bound of Start VAE"
        " Training."
    )


def movement(base: Sequence[Tensor], now: Sequence[Tensor]) -> float:
    """How far latents have moved: the root mean square of the change, in standard deviations of the base's latents."""
    before, after = (torch.cat([one.flatten().to("cpu", torch.float64) for one in latents]) for latents in (base, now))
    return float((after - before).square().mean().sqrt() / before.std().clamp(min=1e-12))


def tiles(picture: Tensor, crop: int, factor: int) -> Iterator[Box]:
    """The squares of a picture (C, H, W) of the crop size, row by row; the last ones end with the picture."""
    height, width = (side_of(length, crop, factor) for length in picture.shape[-2:])
    for top in _starts(picture.shape[-2], height):
        for left in _starts(picture.shape[-1], width):
            yield slice(top, top + height), slice(left, left + width)


def _starts(length: int, side: int) -> list[int]:
    starts = list(range(0, length - side + 1, side))
    if length - side - starts[-1] >= side // 8:  # a rest that is worth a tile
        starts.append(length - side)
    return starts


def _parts(work: Workspace) -> tuple[AutoencoderSettings, Autoencoder]:
    settings = settings_of(work)
    assert settings is not None
    return settings, cast(Autoencoder, work.denoiser)


def _drawn_box(picture: Tensor, crop: int, factor: int, generator: torch.Generator) -> Box:
    box = []
    for length in picture.shape[-2:]:
        side = side_of(length, crop, factor)
        start = int(torch.randint(length - side + 1, (), generator=generator))
        box.append(slice(start, start + side))
    return box[0], box[1]


def _cut(pictures: Tensor, boxes: list[Box]) -> Tensor:
    return torch.stack([picture[..., rows, columns] for picture, (rows, columns) in zip(pictures, boxes, strict=True)])


def as_pixels(pictures: Tensor, device: torch.device) -> Tensor:
    """Pictures of a dataset, 0..255 in uint8, as float32 in 0..1 on a device."""
    return to_device(pictures, device, torch.float32) / 255


def _losses(work: Workspace, pictures: Tensor, mask: Tensor | None, generator: torch.Generator | None) -> Tensor:
    """Losses (B,) of pictures in uint8. With a generator it is a training step: discriminator and KL loss count."""
    settings, coder = _parts(work)
    pixels = as_pixels(pictures, coder.device)
    if mask is not None:
        mask = to_device(mask, coder.device)
    with autocast(work.start_state.settings.optimizer, coder):
        with torch.set_grad_enabled(torch.is_grad_enabled() and settings.trains_encoder):
            mean, log_variance = coder.encode(pixels)
        latents = mean
        if settings.kl and generator is not None:
            latents = _drawn_latents(mean, log_variance, generator)
        decoded = coder.decode(latents)
    wanted = coder.scaled(pixels)
    losses = reconstruction_losses(settings, decoded, wanted, mask)
    if mask is not None:  # the other losses see the picture itself where no pixel counts
        decoded = torch.lerp(wanted, decoded, mask)
    if work.perceptual is not None:
        looks = [_from_minus_1_to_1(coder, pictures) for pictures in (decoded, wanted)]
        losses = losses + settings.lpips * perceptual.distances(work.perceptual, *looks)
    if work.discriminator is not None and generator is not None and work.step >= settings.discriminator_start:
        last = work.trained[last_layer(work.trained)]
        adversarial = work.discriminator.losses(wanted, decoded, losses, last)
        losses = losses + settings.discriminator * adversarial
    if settings.kl and generator is not None and log_variance is not None:
        losses = losses + settings.kl * kl_divergence(mean.float(), log_variance.float())
    return losses


def _from_minus_1_to_1(coder: Autoencoder, pictures: Tensor) -> Tensor:
    """Pictures in the scale of what the decoder gives, in the scale -1..1."""
    black, white = (coder.scaled(torch.full((1, 3, 1, 1), value, device=coder.device)) for value in (0.0, 1.0))
    return (pictures - black) / (white - black) * 2 - 1


def _drawn_latents(mean: Tensor, log_variance: Tensor | None, generator: torch.Generator) -> Tensor:
    if log_variance is None:
        raise ValueError(
            "Start VAE Training: KL weight is above 0, and the encoder of this VAE gives no variances. Set KL weight to"
            " 0."
        )
    noise = to_device(torch.randn(mean.shape, generator=generator), mean.device)
    return mean + (0.5 * log_variance).exp() * noise.to(mean.dtype)


@torch.no_grad()
def latents_of(coder: Autoencoder, images: Sequence[DatasetImage], crop: int) -> list[Tensor]:
    """The latents of the first tiles of pictures, in float32 on the CPU."""
    latents: list[Tensor] = []
    for image in images:
        picture = read_latent(image.latent)
        for box in tiles(picture, crop, coder.factor):
            if len(latents) == MOST_TILES:
                return latents
            mean, _ = coder.encode(as_pixels(_cut(picture[None], [box]), coder.device))
            latents.append(mean.float().cpu())
    return latents
