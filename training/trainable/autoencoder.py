"""Which half of a VAE is trained, and how its pictures are compared: the settings of VAE training."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from .settings import AdapterSettings

PARTS = ("decoder", "whole")
# The parts of ComfyUI's VAEs by the names of their modules: AutoencoderKL, TAESD, and Wan's, whose convolutions on both
# sides of the latents have numbers.
_DECODERS = ("decoder", "post_quant_conv", "taesd_decoder", "conv2")
_ENCODERS = ("encoder", "quant_conv", "taesd_encoder", "conv1")


@dataclass(frozen=True)
class AutoencoderSettings:
    """The settings of VAE training; plain values, checked on creation.

    `part` is the decoder, or the whole VAE. `crop` is the side of the squares that are cut out of the pictures (0: the
    whole picture). The losses are weighted by `l1`, `mse` and `edge`, and `kl` pulls the latents towards a normal
    distribution. With the whole VAE, training ends when held-out latents have moved by more than `latent_bound` of
    their standard deviation.
    """

    part: str = "decoder"
    crop: int = 256
    l1: float = 1.0
    mse: float = 0.0
    edge: float = 0.0
    kl: float = 0.0
    latent_bound: float = 0.1

    def __post_init__(self) -> None:
        errors = []
        if self.part not in PARTS:
            errors.append(f"what to train is {self.part!r}, expected one of {', '.join(PARTS)}")
        if self.crop < 0:
            errors.append(f"crop size is {self.crop}, expected 0 (whole pictures) or more")
        for label, value in (
            ("L1 weight", self.l1),
            ("MSE weight", self.mse),
            ("edge weight", self.edge),
            ("KL weight", self.kl),
            ("latent bound", self.latent_bound),
        ):
            if not 0.0 <= value < math.inf:
                errors.append(f"{label} is {value}, expected 0 or more")
        if not self.l1 + self.mse + self.edge > 0:
            errors.append("L1 weight, MSE weight and edge weight are all 0: set one of them above 0")
        if self.kl and self.part == "decoder":
            errors.append(
                f"KL weight is {self.kl} and what to train is decoder, which does not change the latents: set it to 0,"
                " or train the whole VAE"
            )
        if errors:
            raise ValueError("Start VAE Training: " + "; ".join(errors) + ".")

    @property
    def trains_encoder(self) -> bool:
        """Whether the latent space may move."""
        return self.part == "whole"


def adapter_for(module: nn.Module, settings: AutoencoderSettings) -> AdapterSettings:
    """Full weights of the part of a VAE that is trained. Raises ValueError where the VAE has no such part."""
    parts = _parts_of(module, _DECODERS, "decoder")
    if settings.trains_encoder:
        parts += _parts_of(module, _ENCODERS, "encoder")
    patterns = []
    for part in parts:
        patterns += [part, f"{part}.*"]
    return AdapterSettings(kind="full", targets="all", pattern=", ".join(patterns))


def _parts_of(module: nn.Module, names: Collection[str], what: str) -> list[str]:
    children = dict(module.named_children())
    found = [name for name in names if name in children and any(True for _ in children[name].parameters())]
    if not found:
        raise ValueError(
            f"Start VAE Training: this VAE ({type(module).__name__}) has no {what} with weights that Graft knows how to"
            " train. Connect the VAE of an SD, SDXL, Flux or Wan model, or Demo VAE."
        )
    return found
