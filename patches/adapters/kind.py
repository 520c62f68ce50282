"""The record of one adapter kind: its layer classes, its forms in files, and the forms that can be trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .file_format import FileFormat
from .trainable import TrainableKind


@dataclass(frozen=True)
class AdapterKind:
    """One adapter kind, as its file registers it.

    `layers` are the classes that do its maths on a weight and at the activations. `formats` are the ways in which files
    hold it. `trainable` are its entries in GraftAdapter's `kind` list: none if it can only be loaded.
    """

    name: str
    layers: tuple[type[Any], ...]
    formats: tuple[FileFormat, ...]
    trainable: tuple[TrainableKind, ...] = ()
