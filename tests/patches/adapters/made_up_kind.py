"""A made-up adapter kind, as its file would lie in patches/adapters: one gain for each column of a weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .channel_maps import Scale
from .factor_products import shape_text, sides_text
from .file_format import FileFormat, LayerTensors, PlacedLayer, TensorRole
from .kind import AdapterKind
from .layer import ActivationForm, ReadWeight
from .trainable import AdapterHooks, Dropout, TargetSize, Tensors, TrainableAdapter, TrainedTensor

GAINS = "column_gains"


@dataclass(frozen=True, eq=False)
class ColumnGains:
    """apply(W) = W * (1 + gains), column by column."""

    gains: Tensor
    kind: ClassVar[str] = "gains"
    is_additive: ClassVar[bool] = False

    def apply(self, weight: Tensor) -> Tensor:
        """What a weight (out, in, ...) in float32 becomes."""
        gains = self.gains.to(weight.device, torch.float32)
        return weight * (1.0 + gains).view(1, -1, *(1,) * (weight.ndim - 2))

    def activation_form(self, strength: float, shape: Sequence[int], read: ReadWeight) -> ActivationForm:
        """What goes in is scaled."""
        return ActivationForm(inputs=(Scale(1.0 + strength * self.gains.float()),))

    def mismatch(self, shape: Sequence[int]) -> str | None:
        """Why this does not fit a weight of `shape`, or None."""
        if len(shape) > 1 and self.gains.shape == (shape[1],):
            return None
        return f"expected a gain for each column of {sides_text(shape)}, got {shape_text(self.gains)}"

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor this holds."""
        return (self.gains,)


def _build(tensors: LayerTensors) -> Iterator[PlacedLayer]:
    yield PlacedLayer(ColumnGains(tensors[GAINS]))


class TrainableGains(TrainableAdapter):
    """Learns the gains, from zero."""

    name = "gains"
    help = "one gain for each input channel"
    takes_alpha = False
    network_dropout = False
    scale_tensor = GAINS

    def tensors(self, size: TargetSize) -> list[TrainedTensor]:
        """One gain for each column."""
        return [TrainedTensor(GAINS, (size.shape[1],))]

    def hooks(
        self, size: TargetSize, tensors: Tensors, dropout: Dropout, column_norms: Callable[[Tensors], Tensor]
    ) -> AdapterHooks:
        """What goes in is scaled."""
        gains, ones = tensors[GAINS], (1,) * (len(size.shape) - 2)

        def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            if dropout.is_enabled and dropout.skips_module(dropout.generator()):
                return args
            return (args[0] * (1.0 + gains).to(args[0].dtype).view(-1, *ones), *args[1:])

        return AdapterHooks(before, None)

    def norm(self, tensors: Tensors, scale: float) -> Tensor:
        """The norm of the gains."""
        return tensors[GAINS].norm()


KIND = AdapterKind(
    "gains",
    (ColumnGains,),
    (FileFormat("gains", (TensorRole(GAINS, needed=True, refused_as="gains"),), _build),),
    (TrainableGains(),),
)
