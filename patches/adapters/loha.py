"""LoHa (arXiv 2108.06098, lycoris): delta is the elementwise product of two low-rank products."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models.convolution import convolve
from .factor_products import fits, product, product_error, product_shape, sides_text
from .file_format import FileFormat, LayerTensors, PlacedLayer, TensorRole
from .kind import AdapterKind
from .layer import MAX_FACTOR_RANK, RankedLayer
from .trainable import AdapterHooks, Dropout, TargetSize, Tensors, TrainableAdapter, TrainedTensor, normal, output_hook


@dataclass(frozen=True, eq=False)
class LoHa(RankedLayer):
    """delta = scale * (w1_a @ w1_b) * (w2_a @ w2_b), elementwise; with cores t1, t2 (rank, rank, *kernel) the `a` are
    (rank, out).
    """

    w1_a: Tensor
    w1_b: Tensor
    w2_a: Tensor
    w2_b: Tensor
    alpha: float | None = None
    t1: Tensor | None = None
    t2: Tensor | None = None
    kind: ClassVar[str] = "LoHa"
    is_additive: ClassVar[bool] = True

    @property
    def rank(self) -> int:
        """Rows of the factors on the right; what alpha is divided by."""
        return self.w1_b.shape[0]

    def factors(self, max_rank: int = MAX_FACTOR_RANK) -> tuple[Tensor, Tensor] | None:
        """The product of two low ranks as one pair of rank r1 * r2 while that is at most `max_rank`, not scaled; else
        None. OneTrainer's factors of a convolution have its kernel, which is flattened into the columns.
        """
        ranks = self.w1_b.shape[0] * self.w2_b.shape[0]
        if self.t1 is not None or self.t2 is not None or ranks > max_rank:
            return None
        a1, b1, a2, b2 = (factor.flatten(1).float() for factor in (self.w1_a, self.w1_b, self.w2_a, self.w2_b))
        return (a1[:, :, None] * a2[:, None, :]).flatten(1), (b1[:, None] * b2[None]).flatten(0, 1)

    def delta(self, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """The difference (shape) at strength 1 in float32."""
        first = product(self.w1_a, self.w1_b, self.t1, device)
        second = product(self.w2_a, self.w2_b, self.t2, device)
        return (self.scale * first * second).reshape(tuple(shape))

    def weight_shape(self) -> tuple[int, ...]:
        """The weight's shape, as far as the tensors tell; without cores the kernel is flattened into the columns."""
        return product_shape(self.w1_a, self.w1_b, self.t1)

    def contradiction(self) -> str | None:
        """Why the tensors contradict each other, whatever their weight, or None."""
        first = product_error("hada_w1", self.w1_a, self.w1_b, self.t1)
        if first is not None:
            return first
        return product_error("hada_w2", self.w2_a, self.w2_b, self.t2)

    def mismatch(self, shape: Sequence[int]) -> str | None:
        """Why this does not fit a weight of `shape`, or None."""
        contradiction = self.contradiction()
        if contradiction is not None:
            return contradiction
        shapes = {
            "hada_w1": product_shape(self.w1_a, self.w1_b, self.t1),
            "hada_w2": product_shape(self.w2_a, self.w2_b, self.t2),
        }
        for name, factor_shape in shapes.items():
            if not fits(factor_shape, shape):
                return f"expected a weight {sides_text(shape)}, got {name} {sides_text(factor_shape)}"
        return None


# --- in files ---------------------------------------------------------------------------------------------------------

W1_A, W1_B, W2_A, W2_B = "hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"


def _build(tensors: LayerTensors) -> Iterator[PlacedLayer]:
    factors = tensors[W1_A], tensors[W1_B], tensors[W2_A], tensors[W2_B]
    layer = LoHa(*factors, tensors.alpha, tensors.get("hada_t1"), tensors.get("hada_t2"))
    yield PlacedLayer(layer.with_scale(tensors.peft_scale()))


_FORMAT = FileFormat(
    name="LoHa",
    roles=(
        TensorRole(W1_A, needed=True, refused_as="LoHa"),
        TensorRole(W1_B, needed=True, refused_as="LoHa", is_rank=True, divides_alpha=True),
        TensorRole(W2_A, needed=True, refused_as="LoHa"),
        TensorRole(W2_B, needed=True, refused_as="LoHa"),
        TensorRole("hada_t1", refused_as="LoHa"),
        TensorRole("hada_t2", refused_as="LoHa"),
    ),
    build=_build,
)


# --- training ---------------------------------------------------------------------------------------------------------


class TrainableLoHa(TrainableAdapter):
    """LoHa as lycoris trains it: w2_a starts at zero."""

    name = "loha"
    help = "elementwise product of two low-rank matrices"
    scale_tensor = W1_A

    def tensors(self, size: TargetSize) -> list[TrainedTensor]:
        """The four factors; a kernel is flattened into the columns."""
        rows, columns = (size.shape[0], size.rank), (size.rank, torch.Size(size.shape[1:]).numel())
        return [
            TrainedTensor(W1_A, rows, normal(0.1)),
            TrainedTensor(W1_B, columns, normal(1.0)),
            TrainedTensor(W2_A, rows),
            TrainedTensor(W2_B, columns, normal(1.0)),
        ]

    def hooks(
        self, size: TargetSize, tensors: Tensors, dropout: Dropout, column_norms: Callable[[Tensors], Tensor]
    ) -> AdapterHooks:
        """Applies the difference as a separate weight next to the module's."""
        convolution = len(size.shape) > 2

        def change(module: nn.Module, x: Tensor) -> Tensor:
            delta = self.change(tensors, size).to(x.dtype)
            if convolution:
                return convolve(module, x, delta)
            return F.linear(x, delta)

        return AdapterHooks(None, output_hook(size, change, dropout))

    def norm(self, tensors: Tensors, scale: float) -> Tensor:
        """|w1 * w2|."""
        first, second = tensors[W1_A] @ tensors[W1_B], tensors[W2_A] @ tensors[W2_B]
        return (first * second).norm() * scale

    def layer(self, tensors: Tensors, size: TargetSize) -> LoHa:
        """The four factors."""
        return LoHa(tensors[W1_A], tensors[W1_B], tensors[W2_A], tensors[W2_B], size.alpha)


KIND = AdapterKind("loha", (LoHa,), (_FORMAT,), (TrainableLoHa(),))
