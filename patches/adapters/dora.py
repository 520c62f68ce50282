"""DoRA (arXiv 2402.09353): the rows or columns of weight + delta are scaled to a learned magnitude."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from .channel_maps import Scale
from .factor_products import shape_text
from .file_format import FileFormat, LayerError, LayerTensors, PlacedLayer, TensorRole
from .kind import AdapterKind
from .layer import ActivationForm, AdditiveLayer, ReadWeight, StoredLayer
from .lora import TrainableLoRA, pair_hook
from .trainable import AdapterHooks, Dropout, TargetSize, Tensors, TrainedTensor, column_norms


@dataclass(frozen=True, eq=False)
class DoRA(StoredLayer):
    """apply(W) = magnitude * (W + delta) / ||W + delta||.

    Trainers differ in the axis of the norm: a magnitude (out) or (out, 1, …) has one number per row of W, (1, in, …)
    one per column. ComfyUI divides by ||W|| in the first case; PEFT, lycoris and the paper divide by ||W + delta|| in
    both, and so do we.
    """

    inner: AdditiveLayer
    magnitude: Tensor
    is_additive: ClassVar[bool] = False

    @property
    def kind(self) -> str:
        """The kind's name, for reports."""
        return "DoRA" if self.inner.kind in ("LoRA", "LoCon") else f"{self.inner.kind} with DoRA"

    def apply(self, weight: Tensor) -> Tensor:
        """What a weight (out, in, ...) in float32 becomes."""
        changed = weight + self.inner.delta(weight.shape, weight.device)
        return changed * self._gains(changed)

    def _gains(self, changed: Tensor) -> Tensor:
        """magnitude / norm of a changed weight, broadcastable to its dimensions."""
        other_dimensions = [dimension for dimension in range(changed.ndim) if dimension != self._axis(changed.shape)]
        norm = torch.linalg.vector_norm(changed, dim=other_dimensions, keepdim=True)
        magnitude = self.magnitude.to(changed.device, torch.float32).reshape(norm.shape)
        return magnitude / (norm + torch.finfo(torch.float32).eps)

    def _axis(self, shape: Sequence[int]) -> int:
        return 0 if self.magnitude.shape[0] == self.magnitude.numel() == shape[0] else 1

    def activation_form(self, strength: float, shape: Sequence[int], read: ReadWeight) -> ActivationForm:
        """Scales rows or columns, including the inner layer's; the norms are those of the current weight."""
        weight = read()
        gains = self._gains(weight + self.inner.delta(shape, weight.device)).flatten().cpu()
        weight_map, inner_map = (Scale(1.0 + strength * (gains - 1.0)),), (Scale(gains),)
        if self._axis(shape) == 0:
            return ActivationForm(outputs=weight_map, layer=self.inner, strength=strength, layer_outputs=inner_map)
        return ActivationForm(inputs=weight_map, layer=self.inner, strength=strength, layer_inputs=inner_map)

    def mismatch(self, shape: Sequence[int]) -> str | None:
        """Why this does not fit a weight of `shape`, or None."""
        count, sides = self.magnitude.numel(), self.magnitude.shape
        rows = count == shape[0] and sides[0] == shape[0]
        columns = len(shape) > 1 and count == shape[1] and len(sides) > 1 and sides[1] == shape[1]
        if rows or columns:
            return self.inner.mismatch(shape)
        expected = shape[1] if len(shape) > 1 else 1
        return f"expected a magnitude of {shape[0]} rows or 1x{expected} columns, got {shape_text(self.magnitude)}"

    def slice_rows(self, start: int, length: int) -> DoRA | None:
        """This for `length` rows of the weight from row `start` on; None where the norms are those of columns."""
        inner: Any = self.inner
        if self.magnitude.shape[0] != self.magnitude.numel() or not hasattr(inner, "slice_rows"):
            return None
        return DoRA(inner.slice_rows(start, length), self.magnitude[start : start + length])


# --- in files ---------------------------------------------------------------------------------------------------------


def _build(tensors: LayerTensors) -> Iterator[PlacedLayer]:
    inner = tensors.inner
    if inner is None or not inner.is_additive:
        inner_kind = "nothing" if inner is None else inner.kind
        raise LayerError(f"a DoRA magnitude beside {inner_kind}; expected LoRA, LoHa or LoKr factors")
    magnitude = tensors.get("dora_scale")
    if magnitude is None:
        magnitude = tensors["magnitude"].flatten()
    yield PlacedLayer(DoRA(cast(AdditiveLayer, inner), magnitude))


def _to_rows(magnitude: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """PEFT's (out) or (1, out, 1, 1) as (out, 1, …), the shape every other reader expects."""
    down = tensors.get("down")
    ones = 1 if down is None else down.ndim - 1
    return magnitude.reshape(-1, *(1,) * ones)


_SUFFIXES = (
    ".magnitude",  # ai-toolkit's; the others are PEFT's
    ".lora_magnitude_vector",
    ".lora_magnitude_vector.weight",
    ".lora_magnitude_vector.default.weight",
)
_FORMAT = FileFormat(
    name="DoRA",
    roles=(
        TensorRole("dora_scale", refused_as="DoRA"),
        TensorRole("magnitude", _SUFFIXES, refused_as="DoRA", written=".dora_scale", to_save=_to_rows),
    ),
    build=_build,
    place="around",
)


# --- training ---------------------------------------------------------------------------------------------------------


class TrainableDoRA(TrainableLoRA):
    """A LoCon with a magnitude for each column of the weight."""

    name = "dora"
    linear = False
    help = "LoRA that also learns one scale per column"
    convolutions = True
    network_module = "lycoris.kohya"

    def tensors(self, size: TargetSize) -> list[TrainedTensor]:
        """The LoRA pair, and the magnitude, which starts as the norms of the weight's columns."""
        _, columns, *kernel = size.shape
        magnitude = TrainedTensor("dora_scale", (1, columns, *(1,) * len(kernel)), column_norms)
        return [*super().tensors(size), magnitude]

    def hooks(
        self, size: TargetSize, tensors: Tensors, dropout: Dropout, column_norms: Callable[[Tensors], Tensor]
    ) -> AdapterHooks:
        """The columns of weight + change are scaled to the magnitude: the input is scaled. The norm is a constant for
        the gradient (section 4.3).
        """
        magnitude, ones = tensors["dora_scale"], (1,) * (len(size.shape) - 2)

        def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x = args[0]
            if dropout.drops_modules and dropout.skips_module(dropout.generator()):  # the same draw as the pair's
                return args
            with torch.no_grad():
                norms = column_norms(tensors)
            norms = norms.to(magnitude.dtype) + torch.finfo(torch.float32).eps
            ratio = (magnitude.flatten() / norms).to(x.dtype)
            return (x * ratio.view(-1, *ones), *args[1:])

        return AdapterHooks(before, pair_hook(size, tensors, dropout))


KIND = AdapterKind("dora", (DoRA,), (_FORMAT,), (TrainableDoRA(),))
