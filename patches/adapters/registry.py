"""The adapter kinds by name, and what follows from their list: tensor names, layer classes, trainable kinds.

To add a kind, write its file and add its KIND here.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from ..registry import Registry
from . import diff, dora, glora, ia3, input_oft, loha, lokr, lora, oft, tlora
from .file_format import FileFormat, TensorRole
from .kind import AdapterKind
from .layer import Layer
from .trainable import TrainableKind

_ALPHA = TensorRole("alpha")  # of every kind


def _shared_names(kind: AdapterKind) -> list[str]:
    """What a kind has in common with the registered ones."""
    trainable = {form.name for form in kind.trainable} & {*trainable_names()}
    taken = [f"trainable kind {name}" for name in sorted(trainable)]
    classes = {layer.__name__ for layer in kind.layers} & layer_classes().keys()
    taken += [f"layer class {name}" for name in sorted(classes)]
    names = tensor_names()
    for file_format in kind.formats:
        taken += [f"tensor {role.name}" for role in file_format.roles if role.name in names.roles]
        suffixes = [suffix for role in file_format.roles for suffix in role.read_suffixes]
        taken += [f"suffix {suffix}" for suffix in (*suffixes, *file_format.unsupported) if suffix in names.suffixes]
    return taken


# In this order files are matched, layers of one weight are applied, and GraftAdapter lists the kinds.
KINDS: Registry[AdapterKind] = Registry(
    "adapter kind",
    (
        lora.KIND,
        loha.KIND,
        lokr.KIND,
        dora.KIND,
        oft.KIND,
        input_oft.KIND,
        glora.KIND,
        diff.KIND,
        ia3.KIND,
        tlora.KIND,
    ),
    duplicates=_shared_names,
)


# --- names in files ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorNames:
    """The tensor names of all kinds in files: every role by name, and (role, refusal) by key suffix.

    A refusal is the name in messages of a tensor that is known but not supported; its role is then the suffix itself.
    """

    formats: tuple[FileFormat, ...]
    roles: Mapping[str, TensorRole]
    suffixes: Mapping[str, str]
    unsupported: Mapping[str, str]
    longest_first: tuple[str, ...]

    def layer_and_role(self, key: str, state: Container[str]) -> tuple[str, str | None]:
        """(layer, role) of a key; an unsupported tensor has its suffix as role, a tensor of no LoRA has None."""
        for suffix in self.longest_first:
            if key.endswith(suffix):
                return key[: -len(suffix)], self.suffixes[suffix]
        for file_format in self.formats:
            special = file_format.special_key(key, state)
            if special is not None:
                return special
        return key.removesuffix(".weight"), None

    def refusal(self, role: str, only_pairs: bool) -> str:
        """The name in messages of a refused tensor, "" if it is accepted; `only_pairs` accepts just factor pairs and
        differences.
        """
        if role in self.unsupported:
            return self.unsupported[role]
        if only_pairs:
            return self.roles[role].refused_as
        return ""


@KINDS.derived
def tensor_names() -> TensorNames:
    """The names of all kinds' tensors in files."""
    formats = tuple(file_format for kind in KINDS for file_format in kind.formats)
    roles = {_ALPHA.name: _ALPHA}
    unsupported: dict[str, str] = {}
    for file_format in formats:
        roles.update((role.name, role) for role in file_format.roles)
        unsupported.update(file_format.unsupported)
    suffixes = {suffix: role.name for role in roles.values() for suffix in role.read_suffixes}
    suffixes.update((suffix, suffix) for suffix in unsupported)
    return TensorNames(formats, roles, suffixes, unsupported, tuple(sorted(suffixes, key=len, reverse=True)))


# --- layers as plain values -------------------------------------------------------------------------------------------


@KINDS.derived
def layer_classes() -> dict[str, type[Any]]:
    """Every kind's layer classes, by name, and the one around them."""
    from .row_order import InRowOrder

    classes: dict[str, type[Any]] = {layer.__name__: layer for kind in KINDS for layer in kind.layers}
    return {InRowOrder.__name__: InRowOrder, **classes}


def pack_layer(layer: Any) -> tuple:
    """A layer as a tuple of plain values and tensors: (class name, fields)."""
    values = (getattr(layer, field.name) for field in fields(layer))
    return type(layer).__name__, tuple(pack_layer(value) if _is_layer(value) else value for value in values)


def unpack_layer(packed: tuple) -> Layer:
    """The inverse of `pack_layer`."""
    name, values = packed
    return layer_classes()[name](*(unpack_layer(value) if isinstance(value, tuple) else value for value in values))


def plain_fields(layer: Any) -> tuple:
    """All values of a layer that are not tensors, for fingerprints."""
    values = (getattr(layer, field.name) for field in fields(layer))
    plain_values = (value for value in values if not isinstance(value, Tensor))
    return layer.kind, tuple(plain_fields(value) if _is_layer(value) else value for value in plain_values)


def _is_layer(value: Any) -> bool:
    return hasattr(value, "is_additive")  # told apart by what it has: the package may be imported twice


# --- training ---------------------------------------------------------------------------------------------------------


@KINDS.derived
def _trainable_by_name() -> dict[str, TrainableKind]:
    return {form.name: form for kind in KINDS for form in kind.trainable}


def trainable_names() -> tuple[str, ...]:
    """The names in GraftAdapter's `kind` list."""
    return tuple(_trainable_by_name())


def trainable_kinds() -> tuple[TrainableKind, ...]:
    """Every entry of GraftAdapter's `kind` list."""
    return tuple(_trainable_by_name().values())


def trainable_kind(name: str) -> TrainableKind:
    """The trainable kind of this name; KeyError where there is none."""
    return _trainable_by_name()[name]


def up_factor_suffixes() -> tuple[str, ...]:
    """The suffixes of trained tensors that LoRA+ gives a higher learning rate."""
    return tuple({f".{form.up_factor}" for form in _trainable_by_name().values() if form.up_factor})


@KINDS.derived
def _constant_suffixes() -> tuple[str, ...]:
    return tuple({f".{suffix}" for form in _trainable_by_name().values() for suffix in form.constants})


def is_constant(name: str) -> bool:
    """Whether a tensor of an adapter keeps the value that it has before the first step."""
    return name.endswith(_constant_suffixes())
