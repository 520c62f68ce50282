"""Which half of a VAE is trained, and how its pictures are compared: the settings of VAE training."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from ...settings.declaration import check_values, setting
from ..objective import patch_discriminator, perceptual
from .settings import AdapterSettings

PARTS = ("decoder", "whole")
# The parts of ComfyUI's VAEs by the names of their modules: AutoencoderKL, TAESD, and Wan's, whose convolutions on both
# sides of the latents have numbers.
_DECODERS = ("decoder", "post_quant_conv", "taesd_decoder", "conv2")
_INSIDE_DECODER = ("decoder.", "taesd_decoder.")
_ENCODERS = ("encoder", "quant_conv", "taesd_encoder", "conv1")


@dataclass(frozen=True)
class VaeSettings:
    """The settings of VAE training; plain values, checked on creation.

    `part` is the decoder, or the whole VAE. `crop` is the side of the squares that are cut out of the pictures (0: the
    whole picture). The losses are weighted by `l1`, `mse` and `edge`, and `kl` pulls the latents toward a normal
    distribution. With the whole VAE, training ends when held-out latents have moved by more than `latent_bound` of
    their standard deviation. `lpips` weighs how different pictures look. `discriminator` weighs what a patch
    discriminator says, from step `discriminator_start` on, which learns at `discriminator_rate`.
    """

    part: str = setting(
        "what to train",
        "decoder",
        "decoder: the latent space does not change, so every model with this VAE still fits. whole: trains the"
        " encoder too; training ends if the latents move too far.",
        choices=PARTS,
    )
    crop: int = setting(
        "crop size",
        256,
        "Trains on squares of this many pixels, cut from the images at random places. Lower it to save memory; 0 uses"
        " whole images.",
        low=0,
        high=8192,
        step=8,
    )
    l1: float = setting(
        "L1 weight",
        1.0,
        "Weight of the mean absolute error. Edges stay sharper than with MSE.",
        low=0.0,
        high=1000.0,
        step=0.01,
        finer=True,
    )
    mse: float = setting(
        "MSE weight",
        0.0,
        "Weight of the mean squared error. Try 1 for smoother results.",
        low=0.0,
        high=1000.0,
        step=0.01,
        finer=True,
    )
    edge: float = setting(
        "edge weight",
        0.0,
        "Weight of the error of edges (Sobel). Try 0.5 if results are blurred.",
        low=0.0,
        high=1000.0,
        step=0.01,
        advanced=True,
        finer=True,
    )
    kl: float = setting(
        "KL weight",
        0.0,
        "For whole: weight of the KL loss, which keeps latents near normal noise. 1e-6 is usual.",
        low=0.0,
        high=1.0,
        step=1e-07,
        advanced=True,
        finer=True,
    )
    latent_bound: float = setting(
        "latent bound",
        0.1,
        "For whole: training ends when the latents of held-out images have moved by more than this share of their"
        " standard deviation. Raise it only if you also train the models again.",
        low=0.0,
        high=1000.0,
        step=0.01,
        advanced=True,
    )
    lpips: float = setting(
        "LPIPS weight",
        0.0,
        "Weight of LPIPS, the difference that people see. Needs the packages lpips and torchvision, which download"
        " VGG once. Try 0.1 to 1.",
        low=0.0,
        high=1000.0,
        step=0.01,
        finer=True,
    )
    discriminator: float = setting(
        "discriminator weight",
        0.0,
        "Weight of a patch discriminator, which learns to tell reconstructions from images: details get sharper, and"
        " some are invented. Try 0.5.",
        low=0.0,
        high=1000.0,
        step=0.01,
        advanced=True,
        finer=True,
    )
    discriminator_start: int = setting(
        "discriminator start",
        0,
        "Switches the discriminator on after this many steps. Let the other losses settle first: half of the steps is"
        " a good start.",
        low=0,
        high=1000000,
        advanced=True,
    )
    discriminator_rate: float = setting(
        "discriminator learning rate",
        0.0001,
        "The discriminator's own constant learning rate, with Adam.",
        low=1e-07,
        high=1.0,
        step=1e-07,
        advanced=True,
        finer=True,
    )

    def __post_init__(self) -> None:
        check_values(self, "Start VAE Training", _exclusions)

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


def _exclusions(settings: VaeSettings) -> Iterator[str]:
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


def adapter_for(module: nn.Module, settings: VaeSettings) -> AdapterSettings:
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
