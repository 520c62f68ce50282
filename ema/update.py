"""The update of a weight average, paired by name, in one fused pass for each device and dtype:

shadow <- decay * shadow + (1 - decay) * weights
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from ..storage.problem_list import problem_lines


def check_pairs(shadow: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Check that an average and weights belong together.

    Args:
        shadow: the average by name.
        weights: by name.

    Raises:
        ValueError: listing every name or shape that differs.
    """
    problems = []
    for name in sorted(shadow.keys() - weights.keys()):
        problems.append(f"{name}: only in the average")
    for name in sorted(weights.keys() - shadow.keys()):
        problems.append(f"{name}: only in the weights")
    for name in sorted(shadow.keys() & weights.keys()):
        average, live = shadow[name], weights[name]
        if average.shape != live.shape:
            problems.append(f"{name}: average {tuple(average.shape)}, weights {tuple(live.shape)}")
        if average.dtype != torch.float32:
            problems.append(
                f"{name}: the average is {average.dtype}, expected torch.float32 (a bf16 average never moves)"
            )
    if problems:
        raise ValueError(
            f"The weight average does not fit the weights ({len(problems)}):\n" + problem_lines(problems, "  ")
        )


_CHUNK = 1 << 20  # elements in the casting buffer


@torch.no_grad()
def average_(shadow: Mapping[str, Tensor], weights: Mapping[str, Tensor], decay: float) -> None:
    """Update a weight average in place, computed in float32 where the average lies:

        shadow <- decay * shadow + (1 - decay) * weights

    Args:
        shadow: float32, by name; it changes.
        weights: by name, of any floating type and on any device; they stay.
        decay: from 0 (copies the weights) to 1 (changes nothing).

    Raises:
        ValueError: listing every name, shape and type that does not match.
    """
    check_pairs(shadow, weights)
    groups: dict[tuple[torch.device, torch.device, torch.dtype], list[str]] = defaultdict(list)
    for name, tensor in shadow.items():
        groups[tensor.device, weights[name].device, weights[name].dtype].append(name)
    for (device, source, dtype), names in groups.items():
        if device == source and dtype == torch.float32:
            torch._foreach_lerp_([shadow[name] for name in names], [weights[name] for name in names], 1.0 - decay)
        # foreach takes one dtype and device: a small buffer walks through the tensors, so that no second copy of
        # anything exists
        else:
            buffer = torch.empty(
                min(_CHUNK, max(shadow[name].numel() for name in names)), dtype=torch.float32, device=device
            )
            for name in names:
                _lerp_through(buffer, shadow[name], weights[name], 1.0 - decay)


def _lerp_through(buffer: Tensor, shadow: Tensor, weights: Tensor, share: float) -> None:
    """shadow.lerp_(weights, share) for weights of another dtype or device, in pieces of the buffer's size."""
    if not (shadow.is_contiguous() and weights.is_contiguous()):
        shadow.lerp_(weights.to(shadow.device, torch.float32), share)
        return
    for shadow_part, weights_part in zip(
        shadow.view(-1).split(buffer.numel()), weights.view(-1).split(buffer.numel()), strict=True
    ):
        shadow_part.lerp_(buffer[: weights_part.numel()].copy_(weights_part), share)
