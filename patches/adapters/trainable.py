"""How an adapter kind trains: its trained tensors and their initial values, its forward hooks, its norm, its scale.

Initial values and dropouts are those of the reference trainers (kohya-ss/sd-scripts, lycoris, PEFT); names and shapes
are what lycoris writes and ComfyUI reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .layer import AdditiveLayer
from .rank_mask import RankMask

PreHook = Callable[[Any, tuple[Any, ...]], tuple[Any, ...]]
Hook = Callable[[Any, tuple[Any, ...], Tensor], Tensor]
Tensors = Mapping[str, Tensor]  # the trained tensors of one module, by suffix


class TargetSize(Protocol):
    """What an adapter's tensors depend on: the shape (out, in, *kernel) of the module's weight, rank and alpha."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the module's weight."""

    @property
    def rank(self) -> int:
        """Size of the factors, or of the blocks."""

    @property
    def alpha(self) -> float:
        """The change is scaled by alpha / rank."""

    @property
    def rank_mask(self) -> RankMask | None:
        """Which ranks work at which noise level, for kinds that mask ranks; None for all."""

    @property
    def factor(self) -> int:
        """A side of LoKr's first matrix, where it divides the layer's; 0 is as square as possible."""


class Dropout(Protocol):
    """Draws what one module's adapter drops in the current forward."""

    @property
    def is_enabled(self) -> bool:
        """Whether any dropout is on."""

    @property
    def drops_modules(self) -> bool:
        """Whether `module_dropout` is on."""

    def generator(self) -> torch.Generator | None:
        """The generator for this forward, None outside training."""

    def skips_module(self, generator: torch.Generator | None) -> bool:
        """Whether the whole adapter is skipped."""

    def drop_activations(self, values: Tensor, generator: torch.Generator | None) -> Tensor:
        """`network_dropout`: some activations zeroed, the rest scaled up.

        Args:
            values: activations of any shape.
            generator: draws which, on the CPU; None drops nothing.
        """

    def drop_ranks(self, hidden: Tensor, dimension: int, generator: torch.Generator | None) -> Tensor:
        """`rank_dropout` of a low-rank pair: some ranks of each image zeroed, the rest scaled up.

        Args:
            hidden: what is between the two factors, (B, …), with the ranks in `dimension`.
            dimension: that of the ranks.
            generator: draws which, on the CPU; None drops nothing.
        """

    def keep_mask(self, count: int, device: torch.device, generator: torch.Generator | None) -> Tensor | None:
        """`rank_dropout` for kinds without ranks.

        Args:
            count: how many rows or blocks there are.
            device: where the mask is needed.
            generator: draws which, on the CPU; None drops nothing.

        Returns:
            Which stay (count,), as booleans; None for all.
        """


class AdapterHooks(NamedTuple):
    """Hooks that change a module's input before its forward and its output after it; None changes nothing."""

    before: PreHook | None
    after: Hook | None


class InitSource(NamedTuple):
    """What initial values are computed from: a tensor's own generator, and the norms of the weight's columns."""

    generator: Callable[[], torch.Generator]
    column_norms: Callable[[], Tensor]


class InitRule(Protocol):
    """Gives a tensor's initial values, float32 on the CPU."""

    def __call__(self, shape: tuple[int, ...], source: InitSource, /) -> Tensor:
        """The values before the first step."""


def zeros(shape: tuple[int, ...], source: InitSource) -> Tensor:
    """All zero."""
    return torch.zeros(shape)


def uniform_fan_in(shape: tuple[int, ...], source: InitSource) -> Tensor:
    """Uniform in +-1/sqrt(fan in), as torch starts a linear layer."""
    bound = math.prod(shape[1:]) ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=source.generator())


def normal(deviation: float) -> InitRule:
    """Normal draws of this standard deviation."""

    def draw(shape: tuple[int, ...], source: InitSource) -> Tensor:
        return torch.empty(shape).normal_(0.0, deviation, generator=source.generator())

    return draw


def column_norms(shape: tuple[int, ...], source: InitSource) -> Tensor:
    """The norms of the weight's columns."""
    return source.column_norms().reshape(shape).to("cpu", torch.float32)


@dataclass(frozen=True)
class TrainedTensor:
    """One trained tensor of a module: its suffix, its shape, and its initial values.

    Its generator is seeded by the module's path, and by the suffix where `seeded_by_suffix`. With `copy_of`, the suffix
    of another tensor, it is a copy of that one before the first step, and is kept as it is: no step changes it.
    """

    suffix: str
    shape: tuple[int, ...]
    init: InitRule = zeros
    seeded_by_suffix: bool = True
    copy_of: str = ""


def initial_tensors(
    records: Sequence[TrainedTensor], source_of: Callable[[TrainedTensor], InitSource]
) -> dict[str, Tensor]:
    """The tensors of one module before the first step.

    Args:
        records: the tensors; a copy comes after what it is a copy of.
        source_of: gives what a tensor is drawn from.

    Returns:
        {suffix: tensor in float32 on the CPU}.
    """
    tensors: dict[str, Tensor] = {}
    for record in records:
        if record.copy_of:
            tensors[record.suffix] = tensors[record.copy_of].clone()
        else:
            tensors[record.suffix] = record.init(record.shape, source_of(record))
    return tensors


class TrainableKind:
    """An entry of GraftAdapter's `kind` list. One with `full_weights` trains copies of the weights themselves."""

    name: ClassVar[str]
    help: ClassVar[str]  # for the tooltip: what it trains, in a few words
    full_weights: ClassVar[bool] = False
    convolutions: ClassVar[bool] = True  # trains convolutions whose kernel is larger than 1 too
    takes_alpha: ClassVar[bool] = True  # its change is scaled by alpha / rank
    network_dropout: ClassVar[bool] = True  # has inner activations to leave out
    network_module: ClassVar[str] = "lycoris.kohya"  # kohya's `ss_network_module`
    up_factor: ClassVar[str] = ""  # suffix of the tensor that LoRA+ gives a higher rate
    constants: ClassVar[tuple[str, ...]] = ()  # suffixes of tensors that no step changes
    masks_ranks: ClassVar[bool] = False  # fewer ranks work the more noise there is


class FullWeights(TrainableKind):
    """Trains copies of the weights; saved as differences from the base."""

    full_weights = True


class TrainableAdapter(TrainableKind):
    """A kind that trains tensors next to a module's weight, which stays unchanged."""

    scale_tensor: ClassVar[str] = ""  # suffix of the tensor that another scale of the change is multiplied into
    scale_tensors: ClassVar[tuple[str, ...]] = ()  # of all of them, where the change is a sum
    linear: ClassVar[bool] = True  # at another strength its change is that many times as large

    def tensors(self, size: TargetSize) -> list[TrainedTensor]:
        """The trained tensors of one module. Together their initial values change nothing.

        Args:
            size: the module's weight, rank and alpha.
        """
        raise NotImplementedError

    def hooks(
        self, size: TargetSize, tensors: Tensors, dropout: Dropout, column_norms: Callable[[Tensors], Tensor]
    ) -> AdapterHooks:
        """What the adapter does at the activations.

        Args:
            size: the module's weight, rank and alpha.
            tensors: the module's trained tensors by suffix.
            dropout: what is dropped in this forward pass.
            column_norms: gives the norms of the columns of weight + change, for DoRA.
        """
        raise NotImplementedError

    def norm(self, tensors: Tensors, scale: float) -> Tensor:
        """The Frobenius norm of the change of the weight at strength 1.

        Args:
            tensors: the module's trained tensors by suffix.
            scale: alpha / rank.

        Returns:
            A tensor without dimensions.
        """
        raise NotImplementedError

    def rescale_(self, tensors: Tensors, ratio: Tensor) -> None:
        """Multiply the change of the weight, in place (max_norm).

        Args:
            tensors: the module's trained tensors by suffix.
            ratio: a tensor without dimensions, from 0 to 1.
        """
        for suffix in self.all_scale_tensors:
            tensors[suffix].mul_(ratio)

    def at_strength(self, tensors: Tensors, strength: float) -> Tensors:
        """The tensors of one module at a strength, with a way for gradients; only of a linear kind.

        Args:
            tensors: the module's trained tensors by suffix.
            strength: 1 is as trained; the others are for sliders.
        """
        if strength == 1:
            return tensors
        assert self.linear
        scaled = {suffix: tensors[suffix] * strength for suffix in self.all_scale_tensors}
        return {**tensors, **scaled}

    @property
    def all_scale_tensors(self) -> tuple[str, ...]:
        """The suffixes of the tensors that another scale of the change is multiplied into."""
        return self.scale_tensors or (self.scale_tensor,)

    def alpha_counts(self, suffixes: Container[str]) -> bool:
        """Whether tensors of these suffixes are scaled by alpha / rank."""
        return self.takes_alpha

    def scale(self, suffixes: Container[str], rank: int, alpha: float) -> float:
        """What the change is multiplied by: alpha / rank, 1 where alpha does not count.

        Args:
            suffixes: those of the module's tensors.
            rank: the adapter's rank.
            alpha: its alpha.
        """
        return alpha / rank if self.alpha_counts(suffixes) else 1.0

    def change(self, tensors: Tensors, size: TargetSize) -> Tensor:
        """The difference that the adapter adds to the weight; of DoRA without its magnitude.

        Args:
            tensors: the module's trained tensors by suffix.
            size: the module's weight, rank and alpha.

        Returns:
            (out, in, *kernel) in float32, differentiable.
        """
        return self.layer(tensors, size).delta(size.shape, next(iter(tensors.values())).device)

    def layer(self, tensors: Tensors, size: TargetSize) -> AdditiveLayer:
        """The added change as a layer, which loads and saves it.

        Args:
            tensors: the module's trained tensors by suffix.
            size: the module's weight, rank and alpha.
        """
        raise NotImplementedError


def output_hook(size: TargetSize, change: Callable[[nn.Module, Tensor], Tensor], dropout: Dropout) -> Hook:
    """A hook that adds `change(module, input)` to a module's output, with lycoris' dropouts."""
    dropping, rows, after_rows = dropout.is_enabled, size.shape[0], (1,) * (len(size.shape) - 2)

    def hook(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        if not dropping:
            return out + change(module, args[0]).to(out.dtype)
        generator = dropout.generator()
        if dropout.skips_module(generator):
            return out
        added = change(module, args[0])
        mask = dropout.keep_mask(rows, added.device, generator)
        if mask is not None:
            added = added * mask.to(added.dtype).view(-1, *after_rows)
        return out + dropout.drop_activations(added, generator).to(out.dtype)

    return hook
