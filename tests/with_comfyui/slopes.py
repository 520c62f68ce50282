"""How fast a loss changes along a way of its tensors, by finite differences: the oracle of gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor


def slope_along(
    tensors: Mapping[str, Tensor], ways: Mapping[str, Tensor], loss: Callable[[], Tensor], steps: Sequence[float]
) -> float:
    """The slope of `loss` where the tensors move along their ways, from two central differences.

    `steps` are how far each goes, the second half as far as the first: so the curve's third order drops out. The
    tensors have their values again afterwards.
    """
    begun = {key: tensors[key].detach().clone() for key in ways}
    slopes = []
    for step in steps:
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                for key, way in ways.items():
                    tensors[key].copy_(begun[key] + sign * step * way)
            values.append(float(loss().detach()))
        slopes.append((values[0] - values[1]) / (2 * step))
    with torch.no_grad():
        for key, tensor in begun.items():
            tensors[key].copy_(tensor)
    whole, half = slopes
    return (4 * half - whole) / 3
