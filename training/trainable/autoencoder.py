"""Which half of a VAE is trained, and how its pictures are compared: the settings of VAE training."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from ..objective import patch_discriminator, perceptual
from .settings import AdapterSettings

PARTS = ("decoder", "whole")
DISCRIMINATOR = "discriminator"  # what its tensors' names begin with in a run's state, beside the optimizer's
# The parts of ComfyUI's VAEs by the names of their modules: AutoencoderKL, TAESD, and Wan's, whose convolutions on both
# sides of the latents have numbers.
_DECODERS = ("decoder", "post_quant_conv", "taesd_decoder", "conv2")
_INSIDE_DECODER = ("decoder.", "taesd_decoder.")
_ENCODERS = ("encoder", "quant_conv", "taesd_encoder", "conv1")


@dataclass(frozen=True)
class AutoencoderSettings:
    """The settings of VAE training; plain values, checked on creation.

    `part` is the decoder, or the whole VAE. `crop` is the side of the squares that are cut out of the pictures (0: the
    whole picture). The losses are weighted by `l1`, `mse` and `edge`, and `kl` pulls the latents towards a normal
    distribution. With the whole VAE, training ends when held-out latents have moved by more than `latent_bound` of
    their standard deviation. `lpips` weighs how different pictures look. `discriminator` weighs what a patch
    discriminator says, from step `discriminator_start` on, which learns at `discriminator_rate`.
    """

    part: str = "decoder"
    crop: int = 256
    l1: float = 1.0
    mse: float = 0.0
    edge: float = 0.0
    kl: float = 0.0
    latent_bound: float = 0.1
    lpips: float = 0.0
    discriminator: float = 0.0
    discriminator_start: int = 0
    discriminator_rate: float = 1e-4

    def __post_init__(self) -> None:
        errors = [*_value_errors(self), *_exclusions(self)]
        if errors:
            raise ValueError("Start VAE Training: " + "; ".join(errors) + ".")

    @property
    def trains_encoder(self) -> bool:
        """Whether the latent space may move."""
        return self.part == "whole"

    @property
    def least_side(self) -> int:
        """The side in pixels that squares need for these losses."""
        if self.discriminator:
            return patch_discriminator.LEAST_SIDE
        if self.lpips:
            return perceptual.LEAST_SIDE
        return 1


def _value_errors(settings: AutoencoderSettings) -> Iterator[str]:
    if settings.part not in PARTS:
        yield f"what to train is {settings.part!r}, expected one of {', '.join(PARTS)}"
    if settings.crop < 0:
        yield f"crop size is {settings.crop}, expected 0 (whole pictures) or more"
    for label, value in (
        ("L1 weight", settings.l1),
        ("MSE weight", settings.mse),
        ("edge weight", settings.edge),
        ("KL weight", settings.kl),
        ("latent bound", settings.latent_bound),
        ("LPIPS weight", settings.lpips),
        ("discriminator weight", settings.discriminator),
        ("discriminator start", settings.discriminator_start),
    ):
        if not 0.0 <= value < math.inf:
            yield f"{label} is {value}, expected 0 or more"
    if not 0.0 < settings.discriminator_rate < math.inf:
        yield f"discriminator learning rate is {settings.discriminator_rate}, expected above 0"


def _exclusions(settings: AutoencoderSettings) -> Iterator[str]:
    if not settings.l1 + settings.mse + settings.edge + settings.lpips > 0:
        yield "L1 weight, MSE weight, edge weight and LPIPS weight are all 0: set one of them above 0"
    if settings.kl and settings.part == "decoder":
        yield (
            f"KL weight is {settings.kl} and what to train is decoder, which does not change the latents: set it to 0,"
            " or train the whole VAE"
        )
    if 0 < settings.crop < settings.least_side:
        yield (
            f"crop size is {settings.crop}, and LPIPS and the discriminator need {settings.least_side} pixels or more:"
            " make it larger, or set their weights to 0"
        )


def adapter_for(module: nn.Module, settings: AutoencoderSettings) -> AdapterSettings:
    """Full weights of the part of a VAE that is trained. Raises ValueError where the VAE has no such part."""
    parts = _parts_of(module, _DECODERS, "decoder")
    if settings.trains_encoder:
        parts += _parts_of(module, _ENCODERS, "encoder")
    patterns = []
    for part in parts:
        patterns += [part, f"{part}.*"]
    return AdapterSettings(kind="full", targets="all", pattern=", ".join(patterns))


def side_of(length: int, crop: int, factor: int) -> int:
    """How many pixels are taken of a side: the crop size or the whole, as a multiple of the VAE's factor."""
    side = min(crop or length, length)
    return side - side % factor


def last_layer(trained: Mapping[str, Tensor]) -> str:
    """The name of the weight that makes the decoder's pictures: its last one."""
    inside = [name for name, tensor in trained.items() if name.startswith(_INSIDE_DECODER) and tensor.ndim > 1]
    return inside[-1]


def _parts_of(module: nn.Module, names: Collection[str], what: str) -> list[str]:
    children = dict(module.named_children())
    found = [name for name in names if name in children and any(True for _ in children[name].parameters())]
    if not found:
        raise ValueError(
            f"Start VAE Training: this VAE ({type(module).__name__}) has no {what} with weights that Graft knows how to"
            " train. Connect the VAE of an SD, SDXL, Flux or Wan model, or Demo VAE."
        )
    return found
