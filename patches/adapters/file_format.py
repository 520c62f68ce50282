"""How files hold the layers of an adapter kind: the names of the tensors, their checks, and the layer made of them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from .layer import Layer

Shapes = Mapping[str, Sequence[int]]  # of one layer's tensors, by role


class LayerError(ValueError):
    """The tensors of one layer in a file contradict each other."""


class PeftSettings(Protocol):
    """What PEFT keeps in `adapter_config.json`, beside the tensors."""

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
    """A check of one tensor by itself."""

    def __call__(self, role: str, tensor: Tensor, /) -> str | None:
        """What is wrong with the tensor, or None."""


def accept(role: str, tensor: Tensor) -> str | None:
    """No check."""
    return None


@dataclass(frozen=True)
class TensorRole:
    """One tensor of a layer: what it is, and the ends of its names in files.

    `suffixes` are the ends that are read (None: `.<name>`); `written` is the end that is saved (empty: the first that
    is read). `refused_as` is what a message calls the tensor where only factor pairs and differences are taken, as in
    averages of products (empty: it is taken there too). `is_rank`: its first side is a rank, for reports.
    `divides_alpha`: that rank divides the alpha that PEFT keeps outside the file. `to_save` reshapes the tensor for
    saving, given the layer's tensors by role.
    """

    name: str
    suffixes: tuple[str, ...] | None = None
    needed: bool = False
    written: str = ""
    refused_as: str = ""
    is_rank: bool = False
    divides_alpha: bool = False
    check: TensorCheck = accept
    to_save: Callable[[Tensor, Mapping[str, Tensor]], Tensor] | None = None

    @property
    def read_suffixes(self) -> tuple[str, ...]:
        """The ends of the names that are read."""
        if self.suffixes is None:
            return (f".{self.name}",)
        return self.suffixes

    @property
    def saved_suffix(self) -> str:
        """The end of the name that is written."""
        return self.written or self.read_suffixes[0]


@dataclass(frozen=True)
class LayerTensors:
    """The tensors of one layer in a file, by role, and what is known beside them.

    `weight_shape` is () and `has_bias` false where there is no model. `inner` is the layer that a format of place
    "around" wraps.
    """

    name: str
    tensors: Mapping[str, Tensor]
    alpha: float | None = None
    weight_shape: Sequence[int] = ()
    has_bias: bool = False
    peft: PeftSettings | None = None
    inner: Layer | None = None

    def __getitem__(self, role: str) -> Tensor:
        return self.tensors[role]

    def get(self, role: str) -> Tensor | None:
        """The tensor of a role, or None."""
        return self.tensors.get(role)

    def peft_scale(self, rank: int | None = None) -> float | None:
        """The scale that PEFT keeps outside of the tensors; None where the file says its own, or nobody does."""
        if self.peft is None or self.alpha is not None:
            return None
        return self.peft.scale(self.name, rank)


class PlacedLayer(NamedTuple):
    """A layer that a file format made, and where it goes: the weight, its bias, or (first row, rows) of the weight."""

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
    """One way in which files hold a layer of a kind.

    `place`: "alone" is a layer's one kind, beside which no other may stand; "around" wraps the layer that is alone;
    "beside" is applied after it. `build` makes layers of the tensors, of which the needed ones are there; it may raise
    LayerError. `labels` names a layer in summaries of a file, by its tensors' shapes (None: `name`). `ignores_alpha`
    says whether alpha counts for nothing beside these roles. `special_key` reads (layer name, role) from a key that has
    none of the suffixes. `unsupported` are ends of names that are refused, and what a message calls them. `incomplete`
    is what a message expects where a needed tensor is missing.
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

    def missing(self, roles: Container[str]) -> list[str]:
        """The needed tensors that are not among the roles of a layer."""
        return [role.name for role in self.roles if role.needed and role.name not in roles]

    def names_in(self, shapes: Shapes) -> Sequence[str]:
        """What a summary of a file calls a layer of these tensors."""
        if self.labels is not None:
            return self.labels(shapes)
        return [self.name]
