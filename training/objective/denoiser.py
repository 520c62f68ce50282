"""The interface of a diffusion model that training needs: scaling, noise levels, noising and denoising."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..data.dataset import Conditioning
from ..memory.quantized_base.kept_weights import KeptWeights

Words = Mapping[str, Mapping[str, Tensor]]  # vectors of trained words: {word: {text encoder: (tokens, width)}}


class Denoiser(Protocol):
    """The interface of a diffusion model for training.

    ComfyUI's models get it from `host.denoiser.open_denoiser`; a test can write its own in a few lines.
    """

    module: nn.Module
    """The network whose weights are trained; trained names are paths inside it."""
    prediction: str
    """What the network predicts: "eps", "v" or "flow"."""
    device: torch.device
    """Where latents and noise are to be."""
    auto_type: torch.dtype | None
    """The type that training precision auto casts to: bf16, or fp16 where the device would only emulate bf16. None
    where it leaves the model's own types.
    """
    own_type: torch.dtype
    """The type that the network computes in without autocast."""
    kept_weights: KeptWeights | None
    """Where quantized weights are on disk; None where they are not kept. Asked for when the base is quantized."""
    text_encoder: nn.Module | None
    """The text encoder when it or words are trained; its trained names are `text_encoders.` and paths inside it."""
    text_encoder_device: torch.device
    """Where the text encoder computes: ComfyUI may keep it on the CPU. Asked for when it is trained too."""

    @property
    def encode(self) -> Callable[[Sequence[str], Sequence[Conditioning], Words], Sequence[Conditioning]] | None:
        """With a text encoder: conditionings of captions as it computes now, given the dataset's for the rest, and the
        vectors of words in the captions.
        """

    def process_in(self, latents: Tensor) -> Tensor:
        """Scale latents of the VAE (B, C, h, w) to what the network sees."""

    def sigma(self, u: Tensor) -> Tensor:
        """Noise level (B,) of timestep shares u (B,) in [0, 1): 0 is the cleanest, toward 1 the noisiest."""

    def noisy(self, clean: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
        """Clean latents (B, C, h, w) with noise of level sigma (B,)."""

    def denoise(
        self, x: Tensor, sigma: Tensor, conditionings: Sequence[Conditioning], transformer_options: Mapping[str, Any]
    ) -> Tensor:
        """Denoised latents in float32 (B, C, h, w), differentiable; one conditioning per image.

        The network runs inside `rank_mask.set_timesteps`, or adapters that mask ranks (tlora) use them all.
        """
