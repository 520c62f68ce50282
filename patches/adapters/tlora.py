"""T-LoRA (arXiv 2507.05964): a LoRA from orthogonal factors, with fewer ranks the more noise there is.

delta = scale * (p diag(lambda) q - base_p diag(base_lambda) base_q); the base is what training started from, so that
it starts from no change.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models.convolution import convolve, convolve_pointwise
from .factor_products import shape_text, sides_text
from .file_format import FileFormat, LayerTensors, PlacedLayer, TensorRole
from .kind import AdapterKind
from .layer import MAX_FACTOR_RANK, RankedLayer
from .rank_mask import RankMask, current_timesteps, timesteps_of_rows
from .trainable import AdapterHooks, Dropout, InitRule, InitSource, TargetSize, Tensors, TrainableAdapter, TrainedTensor


@dataclass(frozen=True, eq=False)
class TLoRA(RankedLayer):
    """delta at full rank; `min_rank` and `exponent` say which ranks work at a noise level, `min_rank` 0: all always.

    `q` is (rank, in, *kernel), `p` (out, rank) or (out, rank, 1, 1), `lambdas` (1, rank); `base_q`, `base_p` and
    `base_lambdas` are alike. A missing alpha means scale 1.
    """

    q: Tensor
    p: Tensor
    lambdas: Tensor
    base_q: Tensor
    base_p: Tensor
    base_lambdas: Tensor
    alpha: float | None = None
    min_rank: int = 0
    exponent: float = 1.0
    kind: ClassVar[str] = "T-LoRA"
    is_additive: ClassVar[bool] = True

    @property
    def rank(self) -> int:
        """Rows of `q`; what alpha is divided by."""
        return self.q.shape[0]

    @property
    def rank_mask(self) -> RankMask | None:
        """Which ranks work at a noise level; None if all of them do at every one. `factors` has all ranks, and then all
        again.
        """
        if not 0 < self.min_rank < self.rank:
            return None
        return RankMask(self.rank, self.min_rank, self.exponent)

    def with_all_ranks(self) -> TLoRA:
        """This layer with all ranks at every noise level."""
        return replace(self, min_rank=0)

    def factors(self, max_rank: int = MAX_FACTOR_RANK) -> tuple[Tensor, Tensor]:
        """(up (out, 2 rank), down (2 rank, columns)) in float32, not scaled."""
        return _factors(*(tensor.float() for tensor in self.tensors()))

    def weight_shape(self) -> tuple[int, ...]:
        """The weight's shape."""
        return (self.p.shape[0], *self.q.shape[1:])

    def contradiction(self) -> str | None:
        """Why the tensors contradict each other, whatever their weight, or None."""
        if self.q.ndim < 2 or self.p.ndim < 2:
            return f"expected matrices, got q {shape_text(self.q)} and p {shape_text(self.p)}"
        if (self.base_q.shape, self.base_p.shape) != (self.q.shape, self.p.shape):
            return (
                f"q {shape_text(self.q)} and p {shape_text(self.p)} differ in shape from their base"
                f" {shape_text(self.base_q)} and {shape_text(self.base_p)}"
            )
        sizes = {self.p.flatten(1).shape[1], self.lambdas.numel(), self.base_lambdas.numel()}
        if sizes == {self.rank}:
            return None
        return (
            f"ranks differ: q {shape_text(self.q)}, p {shape_text(self.p)}, lambda {shape_text(self.lambdas)} and"
            f" {shape_text(self.base_lambdas)}"
        )

    def mismatch(self, shape: Sequence[int]) -> str | None:
        """Why this does not fit a weight of `shape`, or None."""
        contradiction = self.contradiction()
        if contradiction is not None:
            return contradiction
        columns = self.q[0].numel()
        if shape and self.p.shape[0] == shape[0] and columns == math.prod(shape[1:]):
            return None
        return (
            f"expected a weight {sides_text(shape)}, got p {shape_text(self.p)} x q {shape_text(self.q)} ="
            f" {self.p.shape[0]}x{columns}"
        )

    def delta(self, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """The difference (shape) at strength 1 in float32, with all ranks."""
        up, down = (factor.to(device) for factor in self.factors())
        return (self.scale * (up @ down)).reshape(tuple(shape))


def _factors(
    q: Tensor, p: Tensor, lambdas: Tensor, base_q: Tensor, base_p: Tensor, base_lambdas: Tensor
) -> tuple[Tensor, Tensor]:
    """(up (out, 2 rank), down (2 rank, columns)) of a change.

    p l q - p0 l0 q0 is written as p l (q - q0) + (p l - p0 l0) q0: no small difference of large products is left to a
    coarse type, and where nothing has moved the change is exactly 0.
    """
    up, base_up = p.flatten(1) * lambdas, base_p.flatten(1) * base_lambdas
    base_down = base_q.flatten(1)
    return torch.cat((up, up - base_up), 1), torch.cat((q.flatten(1) - base_down, base_down))


# --- in files ---------------------------------------------------------------------------------------------------------

Q, P, LAMBDAS = "q_layer.weight", "p_layer.weight", "lambda_layer"
BASE_Q, BASE_P, BASE_LAMBDAS = "base_q.weight", "base_p.weight", "base_lambda"
SCHEDULE = "rank_schedule"  # Graft's own: (smallest rank, exponent); the authors keep them outside the file


def _build(tensors: LayerTensors) -> Iterator[PlacedLayer]:
    schedule = tensors.get(SCHEDULE)
    min_rank, exponent = 0, 1.0
    if schedule is not None:
        min_rank, exponent = round(float(schedule[0])), float(schedule[1])
    factors = tensors["q_layer"], tensors["p_layer"], tensors[LAMBDAS]
    base = tensors["base_q"], tensors["base_p"], tensors[BASE_LAMBDAS]
    yield PlacedLayer(TLoRA(*factors, *base, tensors.alpha, min_rank, exponent))


def schedule_error(role: str, tensor: Tensor) -> str | None:
    """Why a tensor of a file is not a rank schedule, None where it is one.

    Args:
        role: what the file calls it.
        tensor: should be (2,): the smallest rank and the exponent.
    """
    if tensor.shape == (2,) and 0 <= float(tensor[0]) < 2**16 and 0 < float(tensor[1]) < 2**16:
        return None
    return f"expected a smallest rank and an exponent above 0, got {tensor.tolist()}"


def _role(name: str, suffix: str, *, is_rank: bool = False) -> TensorRole:
    """One of the six tensors."""
    return TensorRole(
        name,
        (f".{suffix}",),
        needed=True,
        refused_as="T-LoRA",
        is_rank=is_rank,
        divides_alpha=is_rank,
        keeps_type=True,
    )


_FORMAT = FileFormat(
    name="T-LoRA",
    roles=(
        _role("q_layer", Q, is_rank=True),
        _role("p_layer", P),
        _role(LAMBDAS, LAMBDAS),
        _role("base_q", BASE_Q),
        _role("base_p", BASE_P),
        _role(BASE_LAMBDAS, BASE_LAMBDAS),
        TensorRole(SCHEDULE, refused_as="T-LoRA", check=schedule_error, keeps_type=True),
    ),
    build=_build,
    incomplete=(
        "expected T-LoRA's q_layer, p_layer and lambda_layer with their values before the first step (base_q, base_p,"
        " base_lambda), which LyCORIS leaves out of its files"
    ),
)


# --- training ---------------------------------------------------------------------------------------------------------


def _draw_orthonormal(rank: int, columns: int, generator: torch.Generator) -> Tensor:
    """Orthonormal rows (rank, columns) in random directions."""
    draws = torch.empty(columns, rank, dtype=torch.float64).normal_(generator=generator)
    basis, triangle = torch.linalg.qr(draws)
    return (basis * triangle.diagonal().sign()).T.float().contiguous()


def _orthonormal_rows(shape: tuple[int, ...], source: InitSource) -> Tensor:
    return _draw_orthonormal(shape[0], math.prod(shape[1:]), source.generator()).reshape(shape)


def _orthonormal_columns(shape: tuple[int, ...], source: InitSource) -> Tensor:
    return _draw_orthonormal(shape[1], shape[0], source.generator()).T.reshape(shape).contiguous()


def _last_singular_values(rows: int, columns: int, rank: int) -> InitRule:
    def values(shape: tuple[int, ...], source: InitSource) -> Tensor:
        return torch.tensor(smallest_singular_values(rows, columns, rank)).view(shape)

    return values


@functools.lru_cache(maxsize=64)
def smallest_singular_values(rows: int, columns: int, rank: int) -> tuple[float, ...]:
    """The smallest singular values of normal draws of deviation 1 / rank, from which T-LoRA starts.

    The draws depend on the shape alone: a decomposition takes seconds, so layers of one shape share them. Singular
    values of normal draws do not depend on their vectors, so these are drawn by themselves (`_draw_orthonormal`).

    Args:
        rows: those of the draws.
        columns: those of the draws.
        rank: how many singular values.

    Returns:
        The values in falling order.
    """
    small, large = sorted((rows, columns))
    generator = torch.Generator().manual_seed(small * 2**24 + large)
    draws = torch.empty(small, large, dtype=torch.float64).normal_(generator=generator)
    squares = torch.linalg.eigvalsh(draws @ draws.T)[:rank].clamp(min=0)
    return tuple((squares.sqrt() / rank).flip(0).tolist())


class TrainableTLoRA(TrainableAdapter):
    """T-LoRA of linear layers and of 1x1 convolutions, from the last singular values, as its authors train it."""

    name = "tlora"
    help = "T-LoRA, for one or a few images: it uses fewer ranks at higher noise, so it overfits less"
    convolutions = False
    scale_tensor = LAMBDAS
    scale_tensors = (LAMBDAS, BASE_LAMBDAS)
    masks_ranks = True
    constants = (BASE_Q, BASE_P, BASE_LAMBDAS)

    def tensors(self, size: TargetSize) -> list[TrainedTensor]:
        """q and p, orthonormal, with the singular values between them, and copies of all three that stay."""
        out, columns, *kernel = size.shape
        rank, most = size.rank, min(out, math.prod(size.shape[1:]))
        if rank > most:
            raise ValueError(
                f"Adapter Settings: rank (dim) is {rank}, and adapter type tlora can have at most {most} at a layer of"
                f" {sides_text(size.shape)}: lower it, or give that layer a rank of its own in layer filter"
            )
        q, p = (rank, columns, *kernel), (out, rank, *(1,) * len(kernel))
        return [
            TrainedTensor(Q, q, _orthonormal_rows),
            TrainedTensor(P, p, _orthonormal_columns),
            TrainedTensor(LAMBDAS, (1, rank), _last_singular_values(out, math.prod(size.shape[1:]), rank)),
            TrainedTensor(BASE_Q, q, copy_of=Q),
            TrainedTensor(BASE_P, p, copy_of=P),
            TrainedTensor(BASE_LAMBDAS, (1, rank), copy_of=LAMBDAS),
        ]

    def hooks(
        self, size: TargetSize, tensors: Tensors, dropout: Dropout, column_norms: Callable[[Tensors], Tensor]
    ) -> AdapterHooks:
        """The change beside the module, with the ranks that work at each picture's noise level."""
        scale, convolution = size.alpha / size.rank, len(size.shape) > 2

        def hook(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
            x = args[0]
            generator = dropout.generator() if dropout.is_enabled else None
            if dropout.is_enabled and dropout.skips_module(generator):
                return out
            up, down = _factors(*_ordered_tensors(tensors))
            down = down.view(-1, *size.shape[1:])
            hidden = convolve(module, x, down.to(x.dtype)) if convolution else F.linear(x, down.to(x.dtype))
            channels = 1 if convolution else hidden.ndim - 1
            gate = _gate(size, hidden, channels)
            if dropout.is_enabled:
                gate = dropout.drop_ranks(dropout.drop_activations(gate, generator), channels, generator)
            hidden = (hidden * torch.cat((gate, gate), channels)).to(out.dtype)
            up = (up * scale).to(out.dtype)
            if convolution:
                return out + convolve_pointwise(hidden, up.view(*up.shape, *(1,) * (len(size.shape) - 2)))
            return out + F.linear(hidden, up)

        return AdapterHooks(None, hook)

    def norm(self, tensors: Tensors, scale: float) -> Tensor:
        """The norm of the change with all ranks, without the product."""
        up, down = _factors(*_ordered_tensors(tensors))
        return ((up.T @ up) * (down @ down.T)).sum().clamp(min=0).sqrt() * scale

    def layer(self, tensors: Tensors, size: TargetSize) -> TLoRA:
        """The change with all ranks."""
        return TLoRA(*_ordered_tensors(tensors), alpha=size.alpha)


def _ordered_tensors(tensors: Tensors) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        tensors[Q],
        tensors[P],
        tensors[LAMBDAS],
        tensors[BASE_Q],
        tensors[BASE_P],
        tensors[BASE_LAMBDAS],
    )


def _gate(size: TargetSize, hidden: Tensor, channels: int) -> Tensor:
    """What each rank of each picture is multiplied by at this noise level: ones and zeros, in the shape of the ranks of
    `hidden`.
    """
    shape = list(hidden.shape)
    shape[channels] = size.rank
    gate = hidden.new_ones(shape)
    timesteps = current_timesteps()
    if timesteps is None or size.rank_mask is None:
        return gate
    mask = size.rank_mask.at(timesteps_of_rows(timesteps.to(hidden.device), hidden.shape[0]))
    ones = [1] * hidden.ndim
    ones[0], ones[channels] = mask.shape
    return gate * mask.to(hidden.dtype).view(ones)


KIND = AdapterKind("tlora", (TLoRA,), (_FORMAT,), (TrainableTLoRA(),))
