"""Full differences (`.diff`, `.diff_b`, lycoris' norm layers), which kind full trains, and `.set_weight`."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .channel_maps import Scale
from .factor_products import shape_text, sides_text
from .file_format import FileFormat, LayerTensors, PlacedLayer, Shapes, TensorRole
from .kind import AdapterKind
from .layer import MAX_FACTOR_RANK, ActivationForm, ReadWeight, StoredLayer
from .trainable import FullWeights


@dataclass(frozen=True, eq=False)
class Diff(StoredLayer):
    """delta = scale * diff, in the weight's own shape."""

    diff: Tensor
    scale: float = 1.0
    kind: ClassVar[str] = "diff"
    is_additive: ClassVar[bool] = True

    def factors(self, max_rank: int = MAX_FACTOR_RANK) -> None:
        """None: a full difference has no factors."""

    def delta(self, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """The difference (shape) at strength 1 in float32."""
        diff = self.diff.to(device, torch.float32)
        if self.scale == 1.0:
            return diff
        return diff * self.scale

    def contradiction(self) -> None:
        """None: one tensor cannot contradict itself."""

    def weight_shape(self) -> tuple[int, ...]:
        """The shape of the weight that this is for."""
        return tuple(self.diff.shape)

    def mismatch(self, shape: Sequence[int]) -> str | None:
        """Why this does not fit a weight of `shape`, or None."""
        if tuple(self.diff.shape) == tuple(shape):
            return None
        return f"expected a difference {sides_text(shape)}, got {shape_text(self.diff)}"

    def slice_rows(self, start: int, length: int) -> Diff:
        """This for `length` rows of the weight from row `start` on."""
        return Diff(self.diff[start : start + length], self.scale)


@dataclass(frozen=True, eq=False)
class Set(StoredLayer):
    """apply(W) = value. (ComfyUI sets it at any strength; here strength blends from W to the value.)"""

    value: Tensor
    kind: ClassVar[str] = "set_weight"
    is_additive: ClassVar[bool] = False

    def apply(self, weight: Tensor) -> Tensor:
        """What a weight in float32 becomes."""
        return self.value.to(weight.device, torch.float32).reshape(weight.shape)

    def activation_form(self, strength: float, shape: Sequence[int], read: ReadWeight) -> ActivationForm:
        """A separate module that replaces the original, or is added to what remains of it."""
        base_scale = (Scale(torch.full((shape[0],), 1.0 - strength)),)
        return ActivationForm(
            outputs=base_scale, keeps_output=strength != 1.0, layer=Diff(self.value), strength=strength
        )

    def mismatch(self, shape: Sequence[int]) -> str | None:
        """Why this does not fit a weight of `shape`, or None."""
        if tuple(self.value.shape) == tuple(shape):
            return None
        return f"expected a weight {sides_text(shape)}, got {shape_text(self.value)}"


def _build_diff(tensors: LayerTensors) -> Iterator[PlacedLayer]:
    for role in ("diff", "w_norm"):
        if role in tensors.tensors:
            yield PlacedLayer(Diff(tensors[role]))
    for role in ("diff_b", "b_norm"):
        if role in tensors.tensors:
            yield PlacedLayer(Diff(tensors[role]), on_bias=True)


def _labels(shapes: Shapes) -> list[str]:
    labels = {"diff": ("diff", "diff_b"), "norm": ("w_norm", "b_norm")}
    return [label for label, roles in labels.items() if any(role in shapes for role in roles)]


def _block_parameter(key: str, state: Container[str]) -> tuple[str, str] | None:
    """Distilled Wan LoRAs save the difference of a block's own parameter `modulation` as `.diff_m`."""
    return (key.removesuffix(".diff_m") + ".modulation", "diff") if key.endswith(".diff_m") else None


_DIFF = FileFormat(
    name="diff",
    roles=(
        TensorRole("diff"),
        TensorRole("diff_b"),
        TensorRole("w_norm", refused_as="norm weights"),
        TensorRole("b_norm", refused_as="norm weights"),
    ),
    build=_build_diff,
    place="beside",
    labels=_labels,
    special_key=_block_parameter,
)
_SET = FileFormat(
    name="set_weight",
    roles=(TensorRole("set_weight", refused_as="set_weight"),),
    build=lambda tensors: [PlacedLayer(Set(tensors["set_weight"]))],
    place="beside",
)


def difference_name(parameter: str) -> str:
    """The name under which a parameter's difference is saved: `.diff`, or `.diff_b` for a bias."""
    if parameter.endswith(".bias"):
        return parameter.removesuffix(".bias") + ".diff_b"
    return parameter.removesuffix(".weight") + ".diff"


def parameter_name(difference: str, parameters: Container[str]) -> str:
    """The inverse of `difference_name`; `parameters` tells a weight from a parameter of a module's own."""
    path, _, role = difference.rpartition(".")
    if role == "diff_b":
        return f"{path}.bias"
    if f"{path}.weight" in parameters:
        return f"{path}.weight"
    return path


class TrainableFull(FullWeights):
    """Full fine-tuning."""

    name = "full"
    help = "the weights themselves"


KIND = AdapterKind("diff", (Diff, Set), (_DIFF, _SET), (TrainableFull(),))
