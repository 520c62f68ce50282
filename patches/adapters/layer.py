"""The interface of a layer of any adapter kind: its change of a weight, and the same change at the activations.

A layer is what a LoRA file stores for one weight. An additive layer adds a difference, whatever the weight is: at
strength s the result is W + s * delta. Any other layer computes a new weight from the current one: W + s * (apply(W) -
W). At strength 1, each matches the library that writes such files (lycoris, PEFT).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from .channel_maps import Map

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_FACTOR_RANK = 64  # up to this rank a LoHa is merged more cheaply as a pair of factors than as a full difference

ReadWeight = Callable[[], Tensor]  # gives the weight that a layer finds, in float32


class Layer(Protocol):
    """A layer of any kind, for one weight."""

    @property
    def kind(self) -> str:
        """The kind's name, for reports."""

    @property
    def is_additive(self) -> bool:
        """Whether the layer adds a difference that does not depend on the weight."""

    def mismatch(self, shape: Sequence[int]) -> str | None:
        """Why this does not fit a weight.

        Args:
            shape: the weight's (out, in, *kernel).

        Returns:
            What was expected and what was found, None where it fits.
        """

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor this holds."""


class StoredLayer:
    """What the layers of all kinds share. They are dataclasses, and their tensors are their fields."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor this holds, in the order of the fields; an inner layer's are in its place."""
        found: list[Tensor] = []
        for value in vars(self).values():
            if isinstance(value, Tensor):
                found.append(value)
            elif hasattr(value, "tensors"):
                found += value.tensors()
        return tuple(found)


class RankedLayer(StoredLayer):
    """A layer whose change is the product of factors, scaled by alpha / rank."""

    alpha: float | None

    @property
    def rank(self) -> int:
        """What alpha is divided by."""
        raise NotImplementedError

    @property
    def scale(self) -> float:
        """alpha / rank; 1 without alpha."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def with_scale(self, scale: float | None) -> Self:
        """This layer with another scale.

        Args:
            scale: what the product of its factors is multiplied by, in place of alpha / rank; None keeps it.
        """
        return self if scale is None or scale == 1.0 else replace(cast(Any, self), alpha=scale * self.rank)


class AdditiveLayer(Layer, Protocol):
    """A layer that adds a difference: delta. The Kronecker product of a matrix has `kronecker_factors` too."""

    @property
    def scale(self) -> float:
        """The multiplier of the factors' product: alpha / rank, or 1 without alpha."""

    def factors(self, max_rank: int = MAX_FACTOR_RANK) -> tuple[Tensor, Tensor] | None:
        """The difference as two factors, not scaled.

        Args:
            max_rank: the largest rank that is worth it: a LoHa of two ranks has their product.

        Returns:
            (up (out, rank), down (rank, columns)), columns being in * kernel. None where there are none with at most
            `max_rank`.
        """

    def delta(self, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """The difference at strength 1, scaled by alpha / rank.

        Args:
            shape: that of the weight, (out, in, *kernel).
            device: where it is computed.

        Returns:
            The difference (shape) in float32.
        """

    def contradiction(self) -> str | None:
        """Why the tensors contradict each other, whatever their weight, or None."""

    def weight_shape(self) -> tuple[int, ...]:
        """The shape of the weight this is for, as far as the tensors tell."""


class WeightLayer(Layer, Protocol):
    """A layer that computes a new weight from the current one."""

    def apply(self, weight: Tensor) -> Tensor:
        """The new weight.

        Args:
            weight: the current one (out, in, *kernel) in float32; it stays as it is.

        Returns:
            A weight of the same shape, in float32.
        """

    def activation_form(self, strength: float, shape: Sequence[int], read: ReadWeight) -> ActivationForm | None:
        """The same change as maps of the module's input and output.

        Args:
            strength: from 0, which changes nothing, to 1, the layer's own change; others go beyond.
            shape: the weight's (out, in, *kernel).
            read: gives the current weight in float32, for layers that depend on it.

        Returns:
            None where maps cannot express it.
        """


class ActivationForm(NamedTuple):
    """A layer at the activations: maps around the module's own product, plus an additive layer.

    y = outputs(W @ inputs(x)) + strength * layer_outputs(delta @ layer_inputs(x)); the first term is dropped if
    `keeps_output` is false.
    """

    inputs: tuple[Map, ...] = ()
    outputs: tuple[Map, ...] = ()
    keeps_output: bool = True
    layer: AdditiveLayer | None = None
    strength: float = 1.0
    layer_inputs: tuple[Map, ...] = ()
    layer_outputs: tuple[Map, ...] = ()
