"""int8 weight-only: weights are int8 with a scale for each row, and products are those of the training precision."""

from __future__ import annotations

import torch
from torch import Tensor

from .format import QuantizedWeight, UnpackedFormat


class Int8Weights(UnpackedFormat):
    """Weights as int8 numbers (out, in) and float32 scales (out, 1)."""

    name = "int8 weight-only"

    def quantize(self, weight: Tensor) -> QuantizedWeight:
        """See `rounded`."""
        return round_rows(weight)

    def values(self, weight: QuantizedWeight) -> Tensor:
        """Numbers times scales."""
        return weight.numbers * weight.scales


def round_rows(rows: Tensor) -> QuantizedWeight:
    """(int8 numbers (n, k), float32 scales (n, 1)) of rows (n, k): each is divided by a 127th of its largest number and
    rounded to the nearest integer, so -128 is not used. A row with a number that is not finite has a scale that is not.
    """
    rows = rows.float()
    largest = torch.maximum(rows.amax(1, keepdim=True), -rows.amin(1, keepdim=True))
    scales = (largest / torch.iinfo(torch.int8).max).clamp(min=torch.finfo(torch.float32).tiny)
    return QuantizedWeight((rows / scales).round_().to(torch.int8), scales)
