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
    room_for_blocks: int
    """Bytes that the weights of blocks may take on the device beside all else. Asked for when layers wait in host
    memory, however many there is room for.
    """
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
        """Scale latents of the VAE to what the network sees.

        Args:
            latents: (B, C, h, w), or (B, C, frames, h, w) of clips.
        """

    def sigma(self, u: Tensor) -> Tensor:
        """The noise levels of timestep shares.

        Args:
            u: shares (B,) in [0, 1): 0 is the cleanest, toward 1 the noisiest.

        Returns:
            Noise levels (B,).
        """

    def noisy(self, clean: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
        """Latents with noise added, as the model's kind of noise has it.

        Args:
            clean: latents (B, C, h, w) from `process_in`.
            noise: normal noise of the same shape.
            sigma: noise levels (B,).
        """

    def denoise(
        self, x: Tensor, sigma: Tensor, conditionings: Sequence[Conditioning], transformer_options: Mapping[str, Any]
    ) -> Tensor:
        """Denoised latents, differentiable.

        The network runs inside `rank_mask.set_timesteps`, or adapters that mask ranks (tlora) use them all.

        Args:
            x: noisy latents (B, C, h, w), from `noisy`.
            sigma: their noise levels (B,).
            conditionings: the prompt of each image, as the host has encoded it.
            transformer_options: what patches of the model are told of this call.

        Returns:
            Latents (B, C, h, w) in float32, in the scale of `process_in`.
        """
