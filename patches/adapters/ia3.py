"""IA3 (arXiv 2205.05638): multiplies each row or column of a weight by one factor. Loaded, not trained."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .channel_maps import Scale
from .factor_products import shape_text, sides_text
from .file_format import FileFormat, LayerTensors, PlacedLayer, TensorRole
from .kind import AdapterKind
from .layer import ActivationForm, ReadWeight, StoredLayer


@dataclass(frozen=True, eq=False)
class IA3(StoredLayer):
    """apply(W) = W * (1 + factor) for lycoris, W * factor for PEFT (`whole`); the factor belongs to columns (`columns`)
    or rows.
    """

    factor: Tensor
    columns: bool
    whole: bool = False
    kind: ClassVar[str] = "IA3"
    is_additive: ClassVar[bool] = False

    def apply(self, weight: Tensor) -> Tensor:
        """What a weight (out, in, ...) in float32 becomes."""
        factor = self._factor().to(weight.device)
        if self.columns:
            return weight * factor.reshape(1, -1, *(1,) * (weight.ndim - 2))
        return weight * factor.reshape(-1, *(1,) * (weight.ndim - 1))

    def _factor(self) -> Tensor:
        factor = self.factor.float().flatten()
        if self.whole:
            return factor + 0.0
        return factor + 1.0

    def activation_form(self, strength: float, shape: Sequence[int], read: ReadWeight) -> ActivationForm:
        """What goes in, or comes out, is scaled."""
        scale = (Scale(1.0 + strength * (self._factor() - 1.0)),)
        if self.columns:
            return ActivationForm(inputs=scale)
        return ActivationForm(outputs=scale)

    def mismatch(self, shape: Sequence[int]) -> str | None:
        """Why this does not fit a weight of `shape`, or None."""
        side = shape[int(self.columns)] if len(shape) > int(self.columns) else -1
        if self.factor.numel() == side:
            return None
        return f"expected {side} factors for a weight {sides_text(shape)}, got {shape_text(self.factor)}"


# --- in files ---------------------------------------------------------------------------------------------------------


def _build_peft(tensors: LayerTensors) -> Iterator[PlacedLayer]:
    """PEFT scales the output including bias; in feed-forward layers it scales the input."""
    factor, columns = tensors["ia3_l"], None
    if tensors.peft is not None:
        columns = tensors.peft.scales_inputs(tensors.name)
    if columns is None:
        columns = _is_for_columns(factor, tensors.weight_shape)
    yield PlacedLayer(IA3(factor, columns, whole=True))
    if not columns and tensors.has_bias:
        yield PlacedLayer(IA3(factor, columns, whole=True), on_bias=True)


def _is_for_columns(factor: Tensor, shape: Sequence[int]) -> bool:
    """Whether PEFT's factor is for inputs: (1, in) of a linear layer; a convolution's is (1, side, 1, 1) either way."""
    if factor.shape[0] != 1:
        return False
    return factor.ndim == 2 or (len(shape) > 1 and factor.numel() == shape[1] != shape[0])


def _weight_beside_on_input(key: str, state: Container[str]) -> tuple[str, str] | None:
    """lycoris names the factor `.weight`, beside `.on_input`."""
    layer = key.removesuffix(".weight")
    if layer != key and f"{layer}.on_input" in state:
        return layer, "factor"
    return None


def _one_number_error(role: str, tensor: Tensor) -> str | None:
    return None if tensor.numel() == 1 else f"expected one number, got {tuple(tensor.shape)}"


def _vector_error(role: str, tensor: Tensor) -> str | None:
    return None if tensor.ndim else f"expected a vector or more, got {role} {tuple(tensor.shape)}"


_LYCORIS = FileFormat(
    name="IA3",
    roles=(
        TensorRole("factor", (), needed=True, refused_as="IA3", written=".weight"),
        TensorRole("on_input", needed=True, refused_as="IA3", check=_one_number_error),
    ),
    build=lambda tensors: [PlacedLayer(IA3(tensors["factor"], bool(tensors["on_input"])))],
    special_key=_weight_beside_on_input,
)
_PEFT = FileFormat(
    name="IA3",
    roles=(TensorRole("ia3_l", refused_as="IA3", check=_vector_error),),
    build=_build_peft,
    place="beside",
)

KIND = AdapterKind("ia3", (IA3,), (_LYCORIS, _PEFT))
