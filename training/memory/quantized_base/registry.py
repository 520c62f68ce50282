"""The formats that a frozen base can be quantized to."""

from __future__ import annotations

from collections.abc import Sequence

from .format import WeightFormat
from .int8 import Int8
from .int8_weights import Int8Weights
from .nf4 import NF4

FORMATS: Sequence[type[WeightFormat]] = (Int8, Int8Weights, NF4)


def names() -> tuple[str, ...]:
    """The names of all formats."""
    return tuple(kind.name for kind in FORMATS)


def find_format(name: str) -> type[WeightFormat]:
    """The format of a name."""
    return next(kind for kind in FORMATS if kind.name == name)
