"""How files store the layers of an adapter kind: tensor names, their checks, and the layer built from them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from .layer import Layer

Shapes = Mapping[str, Sequence[int]]  # of one layer's tensors, by role
Trainer = Literal["PEFT", "OneTrainer", ""]  # who wrote a file; "" if it does not say


class LayerError(ValueError):
    """The tensors of one layer in a file contradict each other."""


class PeftSettings(Protocol):
    """What PEFT stores in `adapter_config.json`, next to the tensors."""

    @property
    def terms(self) -> int:
        """Terms of the Neumann series of OFT's rotations; 0 is the exact transform."""

    @property
    def limit(self) -> float | None:
        """Constrained OFT's largest norm of a rotation."""

    def scale(self, layer: str, rank: int | None = None) -> float | None:
        """alpha / rank of a layer, None where the settings do not say it."""

    def scales_inputs(self, layer: str) -> bool | None:
        """Whether an IA3 layer scales its input, None where the settings do not say it."""


class TensorCheck(Protocol):
    """A check of a single tensor."""

    def __call__(self, role: str, tensor: Tensor, /) -> str | None:
        """What is wrong with the tensor, or None."""


def accept(role: str, tensor: Tensor) -> str | None:
    """No check."""
    return None


@dataclass(frozen=True)
class TensorRole:
    """One tensor of a layer in a LoRA file: its role, and the end of its name (suffix).

    - `suffixes`: the ones that are read (None: `.<name>`); `written`: the one that is saved (empty: the first one that
      is read).
    - `refused_as`: the tensor's name in messages where only factor pairs and differences are accepted, as in averages
      of products (empty: it is accepted there too).
    - `is_rank`: its first side is a rank, for reports; `divides_alpha`: that rank divides the alpha that PEFT keeps
      outside the file.
    - `takes_scale`: PEFT's scale is multiplied into this tensor in a layer without such a rank.
    - `keeps_type`: it is saved in its own type, whichever is asked for.
    - `to_save` reshapes the tensor for saving; it gets the layer's tensors by role.
    """

    name: str
    suffixes: tuple[str, ...] | None = None
    needed: bool = False
    written: str = ""
    refused_as: str = ""
    is_rank: bool = False
    divides_alpha: bool = False
    takes_scale: bool = False
    keeps_type: bool = False
    check: TensorCheck = accept
    to_save: Callable[[Tensor, Mapping[str, Tensor]], Tensor] | None = None

    @property
    def read_suffixes(self) -> tuple[str, ...]:
        """The ends of the names that are read."""
        return (f".{self.name}",) if self.suffixes is None else self.suffixes

    @property
    def saved_suffix(self) -> str:
        """The end of the name that is written."""
        return self.written or self.read_suffixes[0]


@dataclass(frozen=True)
class LayerTensors:
    """The tensors of one layer in a file, by role, and what else is known about the layer.

    Without a model `weight_shape` is () and `has_bias` is false. `inner` is the layer that is wrapped, for a format
    with place "around". `trainer` tells apart files whose equal tensors mean different things (PEFT's and OneTrainer's
    OFT).
    """

    name: str
    tensors: Mapping[str, Tensor]
    alpha: float | None = None
    weight_shape: Sequence[int] = ()
    has_bias: bool = False
    peft: PeftSettings | None = None
    inner: Layer | None = None
    trainer: Trainer = ""

    def __getitem__(self, role: str) -> Tensor:
        return self.tensors[role]

    def get(self, role: str) -> Tensor | None:
        """The tensor of a role, or None."""
        return self.tensors.get(role)

    def peft_scale(self, rank: int | None = None) -> float | None:
        """The scale that PEFT stores outside the tensors; None if the file has its own, or there is none."""
        if self.peft is None or self.alpha is not None:
            return None
        return self.peft.scale(self.name, rank)


class PlacedLayer(NamedTuple):
    """A layer built by a file format, and its target: the weight, its bias, or (first row, rows) of the weight."""

    layer: Layer
    on_bias: bool = False
    rows: tuple[int, int] | None = None


def no_special_keys(key: str, state: Container[str]) -> tuple[str, str] | None:
    """No names beyond the suffixes."""
    return None


def alpha_counts(roles: Container[str]) -> bool:
    """Alpha is never ignored."""
    return False


@dataclass(frozen=True)
class FileFormat:
    """One way in which LoRA files store a layer of an adapter kind: its tensor names, and how to build the layer.

    - `place`: "alone" is the main kind of a layer, and only one is allowed; "around" wraps the main layer; "beside" is
      applied after it.
    - `build` makes layers from the tensors once all needed ones are there; it may raise LayerError.
    - `labels` names a layer in summaries of a file, from its tensors' shapes (None: `name`).
    - `ignores_alpha` says whether alpha has no effect with these roles.
    - `special_key` reads (layer name, role) from a key that has none of the suffixes.
    - `unsupported`: suffixes that are refused, with their names in messages.
    - `incomplete`: what a message says is expected when a needed tensor is missing.
    """

    name: str
    roles: tuple[TensorRole, ...]
    build: Callable[[LayerTensors], Iterable[PlacedLayer]]
    place: Literal["alone", "around", "beside"] = "alone"
    labels: Callable[[Shapes], Sequence[str]] | None = None
    ignores_alpha: Callable[[Container[str]], bool] = alpha_counts
    special_key: Callable[[str, Container[str]], tuple[str, str] | None] = no_special_keys
    unsupported: Mapping[str, str] = field(default_factory=dict)
    incomplete: str = ""

    def is_in(self, roles: Container[str]) -> bool:
        """Whether any of this format's tensors is among the roles of a layer."""
        return any(role.name in roles for role in self.roles)

    def missing_roles(self, roles: Container[str]) -> list[str]:
        """The needed tensors that are not among the roles of a layer."""
        return [role.name for role in self.roles if role.needed and role.name not in roles]

    def names_in(self, shapes: Shapes) -> Sequence[str]:
        """The name for a layer with these tensors in a summary of a file."""
        return self.labels(shapes) if self.labels is not None else [self.name]
