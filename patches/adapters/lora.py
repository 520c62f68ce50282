"""LoRA (arXiv 2106.09685) and LoCon, its form for convolutions: delta = scale * up @ down."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models.convolution import convolve, convolve_pointwise
from .diff import Diff
from .factor_products import shape_text, sides_text
from .file_format import FileFormat, LayerTensors, PlacedLayer, Shapes, TensorRole
from .kind import AdapterKind
from .layer import MAX_FACTOR_RANK, RankedLayer
from .trainable import AdapterHooks, Dropout, Hook, TargetSize, Tensors, TrainableAdapter, TrainedTensor, uniform_fan_in


@dataclass(frozen=True, eq=False)
class LoRA(RankedLayer):
    """delta = scale * up @ down, reshaped to the weight. A convolution's factors (LoCon) flatten; `mid` is its Tucker
    core.

    `up` is (out, rank) or (out, rank, 1, 1); `down` is (rank, in) or (rank, in, *kernel); with `mid` (rank, rank,
    *kernel) the kernel of `down` is 1. A missing alpha means scale 1.
    """

    up: Tensor
    down: Tensor
    alpha: float | None = None
    mid: Tensor | None = None
    is_additive: ClassVar[bool] = True

    @property
    def kind(self) -> str:
        """The kind's name, for reports."""
        return "LoCon" if self.down.ndim > 2 else "LoRA"

    @property
    def rank(self) -> int:
        """Rows of `down`; what alpha is divided by."""
        return self.down.shape[0]

    def factors(self, max_rank: int = MAX_FACTOR_RANK) -> tuple[Tensor, Tensor]:
        """(up (out, rank), down (rank, columns)), not scaled, so that delta = scale * up @ down; float32 with a Tucker
        core.
        """
        if self.mid is None:
            return self.up.flatten(1), self.down.flatten(1)
        down = torch.einsum("om...,mi->oi...", self.mid.float(), self.down.flatten(1).float())
        return self.up.flatten(1), down.flatten(1)

    def weight_shape(self) -> tuple[int, ...]:
        """The weight's shape, as far as the tensors tell; a kernel may be flattened into the columns."""
        kernel = self.down.shape[2:] if self.mid is None else self.mid.shape[2:]
        return (self.up.shape[0], self.down.shape[1], *kernel)

    def contradiction(self) -> str | None:
        """Why the tensors contradict each other, whatever their weight, or None."""
        if self.up.ndim < 2 or self.down.ndim < 2 or (self.mid is not None and self.mid.ndim < 3):
            return f"expected matrices, got up {shape_text(self.up)} and down {shape_text(self.down)}"
        up_rank = self.up.flatten(1).shape[1]
        if self.mid is None:
            if up_rank == self.rank:
                return None
            return f"ranks differ: up {shape_text(self.up)}, down {shape_text(self.down)}"
        pointwise = self.down.flatten(2).shape[2:].numel() == 1
        if pointwise and self.mid.shape[:2] == (up_rank, self.rank):
            return None
        return f"ranks differ: up {shape_text(self.up)}, mid {shape_text(self.mid)}, down {shape_text(self.down)}"

    def mismatch(self, shape: Sequence[int]) -> str | None:
        """Why this does not fit a weight of `shape`, or None."""
        contradiction = self.contradiction()
        if contradiction is not None:
            return contradiction
        columns = self.down[0].numel()
        if self.mid is not None:
            columns *= self.mid[0, 0].numel()
        if shape and self.up.shape[0] == shape[0] and columns == math.prod(shape[1:]):
            return None
        return (
            f"expected a weight {sides_text(shape)}, got up {shape_text(self.up)} x down {shape_text(self.down)} ="
            f" {self.up.shape[0]}x{columns}"
        )

    def delta(self, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """The difference (shape) at strength 1 in float32."""
        up, down = (factor.to(device, torch.float32) for factor in self.factors())
        return (self.scale * (up @ down)).reshape(tuple(shape))

    def slice_rows(self, start: int, length: int) -> LoRA:
        """This for `length` rows of the weight from row `start` on."""
        return replace(self, up=self.up[start : start + length])


# --- in files ---------------------------------------------------------------------------------------------------------


def _build(tensors: LayerTensors) -> Iterator[PlacedLayer]:
    layer = LoRA(tensors["up"], tensors["down"], tensors.alpha, tensors.get("mid"))
    layer = layer.with_scale(tensors.peft_scale(layer.rank))
    yield PlacedLayer(layer)
    bias = tensors.get("up_bias")
    if bias is not None:
        yield PlacedLayer(Diff(bias, layer.scale), on_bias=True)


def _labels(shapes: Shapes) -> list[str]:
    return ["LoCon"] if len(shapes.get("down", ())) > 2 else ["LoRA"]


_FORMAT = FileFormat(
    name="LoRA",
    roles=(
        TensorRole(
            "up",
            (
                ".lora_up.weight",
                ".lora_B.weight",
                ".lora_B.default.weight",
                ".lora_B",
                ".lora.up.weight",
                "_lora.up.weight",
                ".lora_linear_layer.up.weight",
            ),
            needed=True,
        ),
        TensorRole(
            "down",
            (
                ".lora_down.weight",
                ".lora_A.weight",
                ".lora_A.default.weight",
                ".lora_A",
                ".lora.down.weight",
                "_lora.down.weight",
                ".lora_linear_layer.down.weight",
            ),
            needed=True,
            is_rank=True,
            divides_alpha=True,
        ),
        TensorRole("mid", (".lora_mid.weight",)),
        TensorRole("up_bias", (".lora_up.bias", ".lora_B.bias", ".lora_B.default.bias"), refused_as="LoRA bias"),
    ),
    build=_build,
    labels=_labels,
    unsupported={
        ".reshape_weight": "a weight that grows (reshape_weight)",
        ".lora_A.bias": "a bias between the factors",
        ".lora_down.bias": "a bias between the factors",
    },
    incomplete="expected an up and a down matrix",
)


# --- training ---------------------------------------------------------------------------------------------------------

UP, DOWN = "lora_up.weight", "lora_down.weight"


def pair_hook(size: TargetSize, tensors: Tensors, dropout: Dropout) -> Hook:
    """A hook that adds scale * up @ down @ input to a module's output, with kohya's dropouts.

    Args:
        size: the module's weight, rank and alpha.
        tensors: with `lora_down` (rank, in, *kernel) and `lora_up` (out, rank, 1, …).
        dropout: what is dropped in this forward pass.
    """
    scale, down, up = size.alpha / size.rank, tensors[DOWN], tensors[UP]
    dropping, convolution = dropout.is_enabled, len(size.shape) > 2

    def hidden_of(module: nn.Module, x: Tensor) -> Tensor | None:
        hidden = convolve(module, x, down.to(x.dtype)) if convolution else F.linear(x, down.to(x.dtype))
        if not dropping:
            return hidden
        generator = dropout.generator()
        if dropout.skips_module(generator):
            return None
        channels = 1 if convolution else hidden.ndim - 1
        return dropout.drop_ranks(dropout.drop_activations(hidden, generator), channels, generator)

    def hook(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        hidden = hidden_of(module, args[0])
        if hidden is None:
            return out
        if convolution:
            return out + convolve_pointwise(hidden.to(out.dtype), up.to(out.dtype) * scale)
        rows = hidden.reshape(-1, hidden.shape[-1]).to(out.dtype)  # one pass for scale, product and sum
        return torch.addmm(out.reshape(-1, out.shape[-1]), rows, up.to(out.dtype).T, alpha=scale).view(out.shape)

    return hook


class TrainableLoRA(TrainableAdapter):
    """LoRA of linear layers and of 1x1 convolutions."""

    name = "lora"
    help = "low-rank matrices on linear layers"
    convolutions = False
    network_module = "networks.lora"
    up_factor = UP
    scale_tensor = UP

    def tensors(self, size: TargetSize) -> list[TrainedTensor]:
        """down, drawn as torch starts a linear layer, and up, zero."""
        out, columns, *kernel = size.shape
        return [
            TrainedTensor(DOWN, (size.rank, columns, *kernel), uniform_fan_in, seeded_by_suffix=False),
            TrainedTensor(UP, (out, size.rank, *(1,) * len(kernel))),
        ]

    def hooks(
        self, size: TargetSize, tensors: Tensors, dropout: Dropout, column_norms: Callable[[Tensors], Tensor]
    ) -> AdapterHooks:
        """The pair's product beside the module."""
        return AdapterHooks(None, pair_hook(size, tensors, dropout))

    def norm(self, tensors: Tensors, scale: float) -> Tensor:
        """|up @ down|, without the product."""
        up, down = tensors[UP].flatten(1), tensors[DOWN].flatten(1)
        return ((up.T @ up) * (down @ down.T)).sum().clamp(min=0).sqrt() * scale

    def rescale_(self, tensors: Tensors, ratio: Tensor) -> None:
        """Both factors by the root of `ratio`, as kohya does it."""
        tensors[UP].mul_(ratio.sqrt())
        tensors[DOWN].mul_(ratio.sqrt())

    def layer(self, tensors: Tensors, size: TargetSize) -> LoRA:
        """The pair."""
        return LoRA(tensors[UP], tensors[DOWN], size.alpha)


class TrainableLoCon(TrainableLoRA):
    """LoRA of convolutions of any kernel size too."""

    name = "locon"
    help = "on convolutions too"
    convolutions = True
    network_module = "lycoris.kohya"


KIND = AdapterKind("lora", (LoRA,), (_FORMAT,), (TrainableLoRA(), TrainableLoCon()))
