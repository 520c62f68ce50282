"""What a layer of any adapter kind offers: its change of a weight, and the same change at the activations.

A layer is what a LoRA file holds for one weight. An additive layer adds a difference, whatever the weight is: at
strength s it gives W + s * delta. Any other layer computes a new weight from the one it finds: W + s * (apply(W) - W).
Each agrees at strength 1 with the library that makes such files (lycoris, PEFT).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .channel_maps import Map

MAX_FACTOR_RANK = 64  # up to this rank a LoHa is merged more cheaply as a pair of factors than as a full difference

ReadWeight = Callable[[], Tensor]  # gives the weight that a layer finds, in float32


class Layer(Protocol):
    """A layer of any kind, for one weight."""

    @property
    def kind(self) -> str:
        """The kind's name, for reports."""

    @property
    def additive(self) -> bool:
        """Whether the layer adds a difference that does not depend on the weight."""

    def mismatch(self, shape: Sequence[int]) -> str | None:
        """Why this does not fit a weight of `shape`, or None."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor this holds."""


class AdditiveLayer(Layer, Protocol):
    """A layer that adds a difference: delta. A matrix's Kronecker product offers `kronecker_factors` too."""

    @property
    def scale(self) -> float:
        """What the product of the factors is multiplied by: alpha / rank; 1 without alpha."""

    def factors(self, max_rank: int = MAX_FACTOR_RANK) -> tuple[Tensor, Tensor] | None:
        """(up (out, rank), down (rank, columns)), not scaled, or None where there are none of at most `max_rank`."""

    def delta(self, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """The difference (shape) at strength 1 in float32."""

    def malformed(self) -> str | None:
        """What is wrong with the tensors beside each other, whatever weight they are for, or None."""

    def weight_shape(self) -> tuple[int, ...]:
        """The shape of the weight that this is for, as far as the tensors say it."""


class WeightLayer(Layer, Protocol):
    """A layer that computes a new weight from the one it finds."""

    def apply(self, weight: Tensor) -> Tensor:
        """The new weight of a weight (out, in, ...) in float32."""

    def at_activations(self, strength: float, shape: Sequence[int], read: ReadWeight) -> ActivationForm | None:
        """The same change as maps of the module's input and output, or None where maps cannot express it."""


class ActivationForm(NamedTuple):
    """A layer at the activations: maps around the module's own product, and an additive layer beside it.

    y = outputs(W @ inputs(x)) + strength * layer_outputs(delta @ layer_inputs(x)); the first term is left out where
    `keeps_output` is false.
    """

    inputs: tuple[Map, ...] = ()
    outputs: tuple[Map, ...] = ()
    keeps_output: bool = True
    layer: AdditiveLayer | None = None
    strength: float = 1.0
    layer_inputs: tuple[Map, ...] = ()
    layer_outputs: tuple[Map, ...] = ()
