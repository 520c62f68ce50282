"""A model's predictions with parts of a LoRA stack on it, by ComfyUI's own guider. Imported when a node measures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import comfy.model_management
import comfy.samplers
import torch

from ..patches.patching.plan import Patches
from .comfyui_objects import Conditioning, Model
from .events import raise_if_interrupted
from .latents import prepare_latent
from .lora_stacks import LABELS, with_patches


class _AtEachLevel(comfy.samplers.Sampler):
    """Predicts once at each noise level, always from the same latent and noise, where a sampler would walk down."""

    def __init__(self) -> None:
        self.predictions: list[torch.Tensor] = []

    def sample(
        self,
        model_wrap: Any,
        sigmas: torch.Tensor,
        extra_args: dict[str, Any],
        callback: Any,
        noise: torch.Tensor,
        latent_image: Any = None,
        denoise_mask: Any = None,
        disable_pbar: bool = False,
    ) -> torch.Tensor:
        """Fills `predictions` with the denoised latents; returns the latent."""
        levels = model_wrap.inner_model.model_sampling
        for sigma in sigmas:
            raise_if_interrupted()
            noisy = levels.noise_scaling(sigma, noise, latent_image, False)
            denoised = model_wrap(noisy, sigma * noisy.new_ones(len(noisy)), **extra_args)
            self.predictions.append(denoised.float().cpu())
        return latent_image


class Predictor:
    """Predictions of a MODEL for a positive conditioning and a latent. Call it with patches by weight.

    `sigmas` are the noise levels, in the middle of equal parts of sampling. A patched clone is loaded for each call.
    The patches work at the activations where a weight allows that, so the base is not copied.
    """

    def __init__(self, model: Model, positive: Conditioning, latent: Mapping[str, Any], levels: int, seed: int):
        sampling = model.get_model_object("model_sampling")
        shares = [(number + 0.5) / levels for number in range(levels)]
        self.model, self.positive, self.seed = model, positive, seed
        self.sigmas = [float(sampling.percent_to_sigma(share)) for share in shares]
        self.mask = latent.get("noise_mask")
        self.start = prepare_latent(model, latent)
        if getattr(self.start, "is_nested", False):
            raise ValueError("LoRA Effect cannot measure latents of video with sound. Connect a plain latent.")
        generator = torch.Generator().manual_seed(seed)
        self.noise = torch.randn(self.start.shape, generator=generator, dtype=torch.float32)

    def __call__(self, patches: Patches) -> Sequence[torch.Tensor]:
        """The denoised latents at each noise level, on the CPU. Global generators stay as they are."""
        patcher = self.model
        if patches:
            patcher, _ = with_patches(patcher, LABELS["model"], patches, "bypass")
        guider, sampler = comfy.samplers.CFGGuider(patcher), _AtEachLevel()
        guider.inner_set_conds({"positive": self.positive})
        devices = []
        if patcher.load_device.type == "cuda":
            devices.append(patcher.load_device)
        with torch.no_grad(), torch.random.fork_rng(devices):
            guider.sample(
                self.noise,
                self.start,
                sampler,
                torch.tensor(self.sigmas),
                denoise_mask=self.mask,
                disable_pbar=True,
                seed=self.seed,
            )
        return sampler.predictions


@contextlib.contextmanager
def open_predictor(
    model: Model, positive: Conditioning, latent: Mapping[str, Any], levels: int, seed: int
) -> Iterator[Predictor]:
    """A Predictor. At the end, also after an interruption, the MODEL itself is loaded again, without any patch."""
    try:
        yield Predictor(model, positive, latent, levels, seed)
    finally:
        comfy.model_management.load_models_gpu([model])
