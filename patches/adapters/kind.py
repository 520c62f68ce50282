"""The record of one adapter kind: its layer classes, its forms in files, and the forms that can be trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .file_format import FileFormat
from .trainable import TrainableKind


@dataclass(frozen=True)
class AdapterKind:
    """One adapter kind, as registered by its file.

    `layers` are the classes that do its math on a weight and at the activations. `formats` are the ways files store
    it. `trainable` are its entries in GraftAdapter's `kind` list: none if it can only be loaded.
    """

    name: str
    layers: tuple[type[Any], ...]
    formats: tuple[FileFormat, ...]
    trainable: tuple[TrainableKind, ...] = ()
