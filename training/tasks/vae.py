"""Training a VAE: crops of pictures are encoded, decoded and compared with themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ..data.batches import Batch, BatchItem, collate
from ..data.dataset import Dataset, DatasetImage
from ..data.stored_latent import read_latent
from ..distributed.process_group import SingleProcess
from ..memory.offload import to_device
from ..objective import perceptual
from ..objective.denoiser import Denoiser
from ..objective.vae_losses import VaeCoder, kl_divergence, reconstruction_losses
from ..optimizers.precision import autocast, computes_in_fp16
from ..state import TrainState, companion_tensors
from ..trainable.vae_parts import VaeSettings, last_layer, side_of
from .discriminator import Discriminator
from .draws import Draws
from .task import Companion, Measures, Preview, TrainingContext, TrainingTask

Box = tuple[slice, slice]
MOST_TILES = 64  # that the movement of the latents is measured on
PREVIEWS = 4  # pictures of a preview
PREVIEW_SIDE = 512  # pixels of each
_DISCRIMINATOR = "discriminator"


class LatentsMoved(RuntimeError):
    """The latent space is not the base's any more."""


class VaeTask(TrainingTask):
    """The VAE, or its decoder, learns to reconstruct pictures."""

    casts_frozen_weights: bool = False

    def __init__(self, state: TrainState) -> None:
        self.settings: VaeSettings = state.start.task_settings
        self._discriminator: Discriminator | None = None
        self._perceptual: nn.Module | None = None  # measures LPIPS
        self._base_latents: list[Tensor] = []  # of held-out pictures before training, where the encoder is trained

    def check(self, state: TrainState, denoiser: Denoiser, dataset: Dataset, group: SingleProcess) -> None:
        """Raise ValueError for what divides or moves a model in ways that a VAE does not take, and where its losses
        need larger pictures or another precision.
        """
        optimizer, settings = state.settings.optimizer, self.settings
        if group.size > 1:
            raise ValueError("Start VAE Training: a VAE is trained by one process, and there are several ranks.")
        if optimizer.offload != "none":
            raise ValueError(
                f"Optimizer Settings: offload to CPU memory is {optimizer.offload}, and VAE training takes none:"
                " set it to none, and make crop size of Start VAE Training smaller to need less memory."
            )
        if optimizer.compile != "off":
            raise ValueError("Optimizer Settings: compile is blocks, and VAE training takes none: set compile to off.")
        if settings.discriminator and optimizer.precision == "fp16":
            raise ValueError(
                "Optimizer Settings: training precision is fp16, and discriminator weight of Start VAE Training is"
                " above 0: use bf16 or float32, or set it to 0."
            )
        if settings.discriminator and computes_in_fp16(optimizer, denoiser):
            raise ValueError(
                "Start VAE Training: this VAE is loaded in fp16, and discriminator weight is above 0: set training"
                " precision of Optimizer Settings to bf16, or discriminator weight to 0."
            )
        factor = cast(VaeCoder, denoiser).factor
        for image in dataset.images + dataset.held_out:
            side = min(side_of(length, settings.crop, factor) for length in image.latent.shape[-2:])
            if side < settings.least_side:
                raise ValueError(
                    f"Start VAE Training: of {image.name} a side of {side} pixels is left, and LPIPS and the"
                    f" discriminator need {settings.least_side}: make resolution of Dataset larger, or set their"
                    " weights to 0."
                )

    def beginning(self, state: TrainState, dataset: Dataset) -> Sequence[str]:
        """A warning where the precision is one in which VAEs overflow."""
        if state.settings.optimizer.precision != "fp16":
            return ()
        return (
            "training precision is fp16, in which a VAE's loss may become NaN: choose bf16, or auto for the VAE's own"
            " type",
        )

    def companions(self, state: TrainState, device: torch.device) -> Mapping[str, Companion]:
        """The discriminator, if it has a weight; makes the network that measures LPIPS, too."""
        settings = self.settings
        if settings.lpips:
            self._perceptual = perceptual.network(device)
        if not settings.discriminator:
            return {}
        saved = companion_tensors(state, _DISCRIMINATOR)
        self._discriminator = Discriminator(settings.discriminator_rate, saved, device, state.start.seed)
        return {_DISCRIMINATOR: self._discriminator}

    def losses(self, context: TrainingContext, batch: Batch, draws: Draws) -> Tensor:
        """Losses (B,) of crops of pictures in uint8. The draws say where each picture is cut, and the latents where
        there is a KL loss. They are the reconstruction losses, LPIPS, the discriminator and the KL loss.
        """
        settings, coder = self.settings, _coder(context)
        boxes = [_draw_box(picture, settings.crop, coder.factor, draws.generator) for picture in batch.latents]
        return self._losses(context, batch, boxes, draws.generator)

    def held_out(self, context: TrainingContext, item: BatchItem, draws: Draws) -> Measures:
        """The losses (tiles,) of a held-out picture, cut into squares of the crop size, one after the other, without
        discriminator and KL loss.
        """
        batch = collate([item])
        boxes = tiles(batch.latents[0], self.settings.crop, _coder(context).factor)
        return Measures(torch.cat([self._losses(context, batch, [box], None) for box in boxes]))

    def _losses(
        self, context: TrainingContext, batch: Batch, boxes: Sequence[Box], generator: torch.Generator | None
    ) -> Tensor:
        """Losses (B,) of each picture in its box. With a generator it is a training step: discriminator and KL loss
        count.
        """
        settings, coder = self.settings, _coder(context)
        pixels, mask = to_pixels(_cut(batch.latents, boxes), coder.device), None
        if batch.mask is not None:
            mask = to_device(_cut(batch.mask, boxes), coder.device)
        with autocast(context.start_state.settings.optimizer, coder):
            with torch.set_grad_enabled(torch.is_grad_enabled() and settings.trains_encoder):
                mean, log_variance = coder.encode(pixels)
            latents = mean
            if settings.kl and generator is not None:
                latents = _draw_latents(mean, log_variance, generator)
            decoded = coder.decode(latents)
        wanted = coder.scale_pixels(pixels)
        losses = reconstruction_losses(settings, decoded, wanted, mask)
        if mask is not None:  # the other losses see the picture itself where no pixel counts
            decoded = torch.lerp(wanted, decoded, mask)
        if self._perceptual is not None:
            looks = [_scale_to_unit(coder, pictures) for pictures in (decoded, wanted)]
            losses = losses + settings.lpips * perceptual.distances(self._perceptual, *looks)
        if self._discriminator is not None and generator is not None and context.step >= settings.discriminator_start:
            last = context.trained[last_layer(context.trained)]
            losses = losses + settings.discriminator * self._discriminator.losses(wanted, decoded, losses, last)
        if settings.kl and generator is not None and log_variance is not None:
            losses = losses + settings.kl * kl_divergence(mean.float(), log_variance.float())
        return losses

    def watch(self, context: TrainingContext) -> None:
        """Raises LatentsMoved when the latents of held-out pictures are too far from the base's."""
        settings, coder = self.settings, _coder(context)
        if not settings.trains_encoder:
            return
        images = context.dataset.held_out
        now = latents_of(coder, images, settings.crop)
        if not self._base_latents:
            with context.switch_off_trained():
                self._base_latents = latents_of(coder, images, settings.crop)
        moved = movement(self._base_latents, now)
        if moved <= settings.latent_bound:
            return
        raise LatentsMoved(
            f"Step {context.step}: the latents of held-out pictures have moved by {moved:.3g} of their standard"
            f" deviation, and latent bound allows {settings.latent_bound:g}. Models that were made for this latent"
            " space would not fit any more. Use a lower learning rate or fewer steps, train the decoder only, or raise"
            " latent bound of Start VAE Training."
        )

    def previews(self, state: TrainState, dataset: Dataset) -> Preview:
        """The first held-out pictures beside their reconstructions."""
        return Preview(shown=_compare_reconstruction, images=(dataset.held_out or dataset.images)[:PREVIEWS])

    def lora_model(self, state: TrainState, ema: bool = False) -> dict[str, Tensor]:
        """Raises ValueError: there is none."""
        raise ValueError(
            "This training state is of a VAE, which has no LoRA, model or snapshots of averages: use Trained VAE."
        )

    def saves_memory(self, state: TrainState) -> list[str]:
        """Smaller crops."""
        return ["make crop size of Start VAE Training smaller"]

    def report(self, state: TrainState) -> list[str]:
        """Which node has the weights."""
        return ["Trained VAE has the last weights" + (" and the average" if state.average else "")]


def _coder(context: TrainingContext) -> VaeCoder:
    return cast(VaeCoder, context.denoiser)


def _compare_reconstruction(coder: VaeCoder, image: DatasetImage) -> Tensor:
    """The middle of a picture (H, W, 3) in 0..1, and its reconstruction at its right."""
    pixels = to_pixels(_middle(read_latent(image.latent), coder.factor)[None], coder.device)
    return torch.cat([pixels.movedim(1, -1).cpu(), coder.to_pictures(pixels).cpu()], dim=2)[0]


def _middle(picture: Tensor, factor: int) -> Tensor:
    """The middle of a picture (3, H, W), of at most PREVIEW_SIDE pixels a side."""
    for axis in (1, 2):
        length = picture.shape[axis]
        side = min(length, PREVIEW_SIDE)
        side -= side % factor
        picture = picture.narrow(axis, (length - side) // 2, side)
    return picture


def movement(base: Sequence[Tensor], now: Sequence[Tensor]) -> float:
    """How far latents have moved: the root mean square of the change, in standard deviations of the base's latents.

    Args:
        base: latents of any shape, before.
        now: those of the same pictures now.
    """
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


def _draw_box(picture: Tensor, crop: int, factor: int, generator: torch.Generator) -> Box:
    box = []
    for length in picture.shape[-2:]:
        side = side_of(length, crop, factor)
        start = int(torch.randint(length - side + 1, (), generator=generator))
        box.append(slice(start, start + side))
    return box[0], box[1]


def _cut(pictures: Tensor, boxes: Sequence[Box]) -> Tensor:
    return torch.stack([picture[..., rows, columns] for picture, (rows, columns) in zip(pictures, boxes, strict=True)])


def to_pixels(pictures: Tensor, device: torch.device) -> Tensor:
    """Pictures of a dataset, 0..255 in uint8, as float32 in 0..1 on a device."""
    return to_device(pictures, device, torch.float32) / 255


def _scale_to_unit(coder: VaeCoder, pictures: Tensor) -> Tensor:
    """Pictures in the scale of what the decoder gives, in the scale -1..1."""
    black, white = (coder.scale_pixels(torch.full((1, 3, 1, 1), value, device=coder.device)) for value in (0.0, 1.0))
    return (pictures - black) / (white - black) * 2 - 1


def _draw_latents(mean: Tensor, log_variance: Tensor | None, generator: torch.Generator) -> Tensor:
    if log_variance is None:
        raise ValueError(
            "Start VAE Training: KL weight is above 0, and the encoder of this VAE gives no variances. Set KL weight to"
            " 0."
        )
    noise = to_device(torch.randn(mean.shape, generator=generator), mean.device)
    return mean + (0.5 * log_variance).exp() * noise.to(mean.dtype)


@torch.no_grad()
def latents_of(coder: VaeCoder, images: Sequence[DatasetImage], crop: int) -> list[Tensor]:
    """The latents of the first tiles of pictures, in float32 on the CPU."""
    latents: list[Tensor] = []
    for image in images:
        picture = read_latent(image.latent)
        for box in tiles(picture, crop, coder.factor):
            if len(latents) == MOST_TILES:
                return latents
            mean, _ = coder.encode(to_pixels(_cut(picture[None], [box]), coder.device))
            latents.append(mean.float().cpu())
    return latents
