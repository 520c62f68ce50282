"""The discriminator of a VAE training run: its weights and its optimizer, which are part of the run's state."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..objective.patch_discriminator import (
    PatchDiscriminator,
    adaptive_weight,
    adversarial_losses,
    hinge_losses,
)
from ..optimizers.settings import OptimizerSettings
from ..optimizers.stepper import OptimizerStepper
from ..random_draws import generator

_WEIGHTS = "weights/"
_OPTIMIZER = "optimizer/"


class Discriminator:
    """A patch discriminator that learns beside the VAE, with Adam at a rate of its own (betas 0.5 and 0.9 as VQGAN's).

    `saved` is what `state` gave.
    """

    def __init__(self, rate: float, saved: Mapping[str, Tensor], device: torch.device, seed: int) -> None:
        self.network, self.rate = PatchDiscriminator(), rate
        weights = _select_below(saved, _WEIGHTS)
        if not weights:
            weights = self.network.first_weights(generator(seed, 0, "discriminator"))
        settings = OptimizerSettings(learning_rate=rate, weight_decay=0.0, clip_norm=0.0, options="betas=0.5,0.9")
        self._stepper = OptimizerStepper(settings, weights, _select_below(saved, _OPTIMIZER), device, seed)
        self._pictures = 0  # that it has seen in this step

    def prepare(self, step: int) -> None:
        """Begin a step: drop the gradients of an earlier one."""
        self._stepper.prepare(self.rate, step)
        self._pictures = 0

    def losses(self, pixels: Tensor, decoded: Tensor, reconstruction: Tensor, last_layer: Tensor) -> Tensor:
        """The VAE's adversarial losses (B,) for reconstructions (B, 3, H, W), times the adaptive weight;
        `reconstruction` (B,) are its other losses. The discriminator learns from the same pictures: its gradients add
        up until `step_`.
        """
        self._learn(pixels, decoded.detach())
        fixed = {name: tensor.detach() for name, tensor in self._stepper.trained.items()}
        adversarial = adversarial_losses(self.network.judge(decoded, fixed))
        return adaptive_weight(reconstruction.mean(), adversarial.mean(), last_layer) * adversarial

    def _learn(self, pixels: Tensor, decoded: Tensor) -> None:
        weights = self._stepper.trained
        real, fake = (self.network.judge(pictures, weights) for pictures in (pixels, decoded))
        hinge_losses(real, fake).sum().backward()
        self._pictures += len(pixels)

    def finish_gradients(self) -> float:
        """Make its gradients the mean of those of the step's pictures; returns their norm."""
        for tensor in self._stepper.trained.values():
            if tensor.grad is not None:
                tensor.grad /= self._pictures
        return self._stepper.norm()

    def step_(self) -> None:
        """Move its weights; before its first pictures there is nothing to move."""
        self._stepper.step_()

    def state(self) -> dict[str, Tensor]:
        """Its weights and its optimizer's tensors, for the run's state."""
        saved = {f"{_WEIGHTS}{name}": tensor for name, tensor in self._stepper.copy_sampling_weights().items()}
        for name, tensor in self._stepper.state().items():
            saved[f"{_OPTIMIZER}{name}"] = tensor
        return saved


def _select_below(saved: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in saved.items() if name.startswith(prefix)}
