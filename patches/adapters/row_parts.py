"""Some rows of a layer: of one that a file has for several weights in one, such as Q, K and V."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from .diff import Diff
from .layer import AdditiveLayer, Layer


def slice_rows(layer: Any, start: int, length: int, shape: Sequence[int]) -> Layer | None:
    """The layer for `length` rows of its weight (`shape`) from row `start` on, or None if they need the other rows.

    A kind with a `slice_rows` method cuts its own tensors. Any other additive layer becomes a full difference.
    """
    if hasattr(layer, "slice_rows"):
        return cast("Layer | None", layer.slice_rows(start, length))
    if not layer.is_additive:
        return None
    return Diff(cast(AdditiveLayer, layer).delta(shape)[start : start + length].clone())
