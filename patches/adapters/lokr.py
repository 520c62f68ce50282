"""LoKr (arXiv 2309.14859): delta is a Kronecker product of two small matrices, each full or low-rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models.convolution import convolve
from .factor_products import (
    factorize_side,
    fits,
    product,
    product_error,
    product_shape,
    shape_text,
    sides_text,
)
from .file_format import FileFormat, LayerTensors, PlacedLayer, TensorRole
from .kind import AdapterKind
from .layer import MAX_FACTOR_RANK, StoredLayer
from .trainable import (
    AdapterHooks,
    Dropout,
    TargetSize,
    Tensors,
    TrainableAdapter,
    TrainedTensor,
    output_hook,
    uniform_fan_in,
)


@dataclass(frozen=True, eq=False)
class LoKr(StoredLayer):
    """delta = scale * kron(w1, w2); each is a matrix or a product a @ b; w2 can also be a convolution or have a Tucker
    core t2.

    alpha counts only if a factor is a product (alpha / its rank), as in lycoris.
    """

    w1: Tensor | None
    w2: Tensor | None
    w1_a: Tensor | None = None
    w1_b: Tensor | None = None
    w2_a: Tensor | None = None
    w2_b: Tensor | None = None
    t2: Tensor | None = None
    alpha: float | None = None
    kind: ClassVar[str] = "LoKr"
    is_additive: ClassVar[bool] = True

    @property
    def scale(self) -> float:
        """alpha / rank of w2, or of w1 if only that is a product; 1 if neither is, or without alpha."""
        if self.w2 is None:
            ranked = self.w2_b
        elif self.w1 is None:
            ranked = self.w1_b
        else:
            ranked = None
        if self.alpha is None or ranked is None:
            return 1.0
        return self.alpha / ranked.shape[0]

    def with_scale(self, scale: float | None) -> LoKr:
        """This layer with its first factor scaled; None keeps it."""
        if scale is None or scale == 1.0:
            return self
        if self.w1 is not None:
            return replace(self, w1=self.w1.float() * scale)
        if self.w1_a is not None:
            return replace(self, w1_a=self.w1_a.float() * scale)
        return self

    def factors(self, max_rank: int = MAX_FACTOR_RANK) -> None:
        """None: a Kronecker product is not low-rank."""

    def kronecker_factors(self) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """(w1 (a, b) with the scale, (w2,) (c, d) or the two factors of w2), float32, for a matrix (a c, b d); None for
        a convolution.
        """
        if self.t2 is not None or any(tensor.ndim > 2 for tensor in self.tensors()):
            return None
        second: tuple[Tensor, ...]
        second = (self.w2,) if self.w2 is not None else (cast(Tensor, self.w2_a), cast(Tensor, self.w2_b))
        # copies: files are read as inference tensors
        copies = tuple(factor.to("cpu", torch.float32, copy=True) for factor in second)
        return self.scale * _whole_or_product(self.w1, self.w1_a, self.w1_b, None, "cpu"), copies

    def delta(self, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """The difference (shape) at strength 1 in float32."""
        first = _whole_or_product(self.w1, self.w1_a, self.w1_b, None, device)
        second = _whole_or_product(self.w2, self.w2_a, self.w2_b, self.t2, device)
        first = first.reshape(*first.shape, *(1,) * (second.ndim - first.ndim))
        return (self.scale * torch.kron(first, second.contiguous())).reshape(tuple(shape))

    def _factor_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        first = _shape_of(self.w1, self.w1_a, self.w1_b, None)
        return first, _shape_of(self.w2, self.w2_a, self.w2_b, self.t2)

    def weight_shape(self) -> tuple[int, ...]:
        """The weight's shape, as far as the tensors tell; a kernel may be flattened into the columns."""
        (first_out, first_in, *_), (second_out, second_in, *kernel) = self._factor_shapes()
        return (first_out * second_out, first_in * second_in, *kernel)

    def contradiction(self) -> str | None:
        """Why the tensors contradict each other, whatever their weight, or None."""
        first = _factor_error("lokr_w1", self.w1, self.w1_a, self.w1_b, None)
        if first is not None:
            return first
        return _factor_error("lokr_w2", self.w2, self.w2_a, self.w2_b, self.t2)

    def mismatch(self, shape: Sequence[int]) -> str | None:
        """Why this does not fit a weight of `shape`, or None."""
        contradiction = self.contradiction()
        if contradiction is not None:
            return contradiction
        if fits(self.weight_shape(), shape):
            return None
        first, second = self._factor_shapes()
        return f"expected a weight {sides_text(shape)}, got {sides_text(first)} (x) {sides_text(second)}"


def _whole_or_product(
    whole: Tensor | None, a: Tensor | None, b: Tensor | None, core: Tensor | None, device: torch.device | str
) -> Tensor:
    if whole is None:
        return product(cast(Tensor, a), cast(Tensor, b), core, device)
    return whole.to(device, torch.float32)


def _shape_of(whole: Tensor | None, a: Tensor | None, b: Tensor | None, core: Tensor | None) -> tuple[int, ...]:
    if whole is None:
        return product_shape(cast(Tensor, a), cast(Tensor, b), core)
    return tuple(whole.shape)


def _factor_error(
    name: str, whole: Tensor | None, a: Tensor | None, b: Tensor | None, core: Tensor | None
) -> str | None:
    if whole is not None:
        if whole.ndim < 2:
            return f"{name}: expected a matrix, got {shape_text(whole)}"
        return None
    if a is None or b is None:
        return f"expected {name}, or {name}_a and {name}_b"
    return product_error(name, a, b, core)


# --- in files ---------------------------------------------------------------------------------------------------------

W1, W2, W2_A, W2_B = "lokr_w1", "lokr_w2", "lokr_w2_a", "lokr_w2_b"


def _build(tensors: LayerTensors) -> Iterator[PlacedLayer]:
    layer = LoKr(
        tensors.get(W1),
        tensors.get(W2),
        tensors.get("lokr_w1_a"),
        tensors.get("lokr_w1_b"),
        tensors.get(W2_A),
        tensors.get(W2_B),
        tensors.get("lokr_t2"),
        tensors.alpha,
    )
    yield PlacedLayer(layer.with_scale(tensors.peft_scale()))


def _has_no_product(roles: Container[str]) -> bool:
    """Two full factors, for which ai-toolkit writes an alpha of 9999999999: infinite in float16."""
    return W1 in roles and W2 in roles


_FORMAT = FileFormat(
    name="LoKr",
    roles=(
        TensorRole(W1, refused_as="LoKr", takes_scale=True),
        TensorRole(W2, refused_as="LoKr"),
        TensorRole(W2_A, refused_as="LoKr"),
        TensorRole(W2_B, refused_as="LoKr", is_rank=True, divides_alpha=True),
        TensorRole("lokr_w1_a", refused_as="LoKr"),
        TensorRole("lokr_w1_b", refused_as="LoKr", is_rank=True, divides_alpha=True),  # if w2 is not a product
        TensorRole("lokr_t2", refused_as="LoKr"),
    ),
    build=_build,
    ignores_alpha=_has_no_product,
)


# --- training ---------------------------------------------------------------------------------------------------------


def _second_factor(tensors: Tensors) -> Tensor:
    matrix = tensors.get(W2)
    if matrix is None:
        return tensors[W2_A] @ tensors[W2_B]
    return matrix


class TrainableLoKr(TrainableAdapter):
    """LoKr as lycoris trains it: w1 full, w2 low-rank if that is smaller (whole with a rank of half its side or more,
    lycoris' full_matrix).
    """

    name = "lokr"
    help = "Kronecker product of two small matrices"
    scale_tensor = W1

    def tensors(self, size: TargetSize) -> list[TrainedTensor]:
        """w1, and w2 full or as two factors; the last one starts at zero."""
        out, columns, *kernel = size.shape
        factor = size.factor or -1
        (first_out, rest_out), (first_in, rest_in) = factorize_side(out, factor), factorize_side(columns, factor)
        first = TrainedTensor(W1, (first_out, first_in), uniform_fan_in)
        if size.rank >= max(rest_out, rest_in) / 2:  # a product would be no smaller
            return [first, TrainedTensor(W2, (rest_out, rest_in, *kernel))]
        return [
            first,
            TrainedTensor(W2_A, (rest_out, size.rank), uniform_fan_in),
            TrainedTensor(W2_B, (size.rank, rest_in * math.prod(kernel))),
        ]

    def hooks(
        self, size: TargetSize, tensors: Tensors, dropout: Dropout, column_norms: Callable[[Tensors], Tensor]
    ) -> AdapterHooks:
        """kron(w1, w2) x without forming the product: w2 on each part of the input, then w1 across the parts."""
        first, kernel = tensors[W1], size.shape[2:]
        parts, scale = first.shape[1], self.scale(tensors, size.rank, size.alpha)

        def linear(module: nn.Module, x: Tensor) -> Tensor:
            second, mix = _second_factor(tensors).to(x.dtype), (first * scale).to(x.dtype)
            return torch.einsum("lm,...mk->...lk", mix, F.linear(x.unflatten(-1, (parts, -1)), second)).flatten(-2)

        def convolution(module: nn.Module, x: Tensor) -> Tensor:
            second, mix = _second_factor(tensors).to(x.dtype), (first * scale).to(x.dtype)
            split = x.unflatten(1, (parts, -1)).flatten(0, 1)
            hidden = convolve(module, split, second.reshape(second.shape[0], -1, *kernel))
            hidden = hidden.unflatten(0, (x.shape[0], parts))
            return torch.einsum("lm,bmk...->blk...", mix, hidden).flatten(1, 2)

        return AdapterHooks(None, output_hook(size, convolution if kernel else linear, dropout))

    def norm(self, tensors: Tensors, scale: float) -> Tensor:
        """|w1| |w2|."""
        return tensors[W1].norm() * _second_factor(tensors).norm() * scale

    def alpha_counts(self, suffixes: Container[str]) -> bool:
        """Only where w2 is a product."""
        return W2 not in suffixes

    def layer(self, tensors: Tensors, size: TargetSize) -> LoKr:
        """w1 and w2."""
        second = tensors.get(W2), None, None, tensors.get(W2_A), tensors.get(W2_B)
        return LoKr(tensors[W1], *second, alpha=size.alpha)


KIND = AdapterKind("lokr", (LoKr,), (_FORMAT,), (TrainableLoKr(),))
