"""Other ways of thinning self-attention, as `transformer_options` of ComfyUI's UNet, written from their descriptions to
measure against.

comfy-todo (K and V interpolated each, the grid guessed from a square root), the kohya fork of PR 1151 (one
interpolation that both share), the ideal (the thinned context of each block is there already; to_k and to_v still run),
and ToMe by the `tomesd` package's merging.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Options = dict[str, dict[str, list[Callable]]]


def shrunk(tokens: Tensor, grid: tuple[int, int], factor: float) -> Tensor:
    """Tokens (B, h*w, C) through F.interpolate, as both peers do it."""
    image = tokens.transpose(1, 2).reshape(tokens.shape[0], -1, *grid)
    size = tuple(int(side / factor) for side in grid)
    return F.interpolate(image, size=size, mode="nearest-exact").flatten(2).transpose(1, 2)


def guessed(
    q: Tensor, extra: dict, factors: list[float], levels: tuple[int, ...]
) -> tuple[tuple[int, int], float] | None:
    """The peers' guess of (token grid, factor) from the token count; None when this level is not thinned."""
    height, width = extra["original_shape"][2:]
    level = math.ceil(math.sqrt(height * width // q.shape[1]))
    depth = levels.index(level) if level in levels else len(factors)
    return ((height // level, width // level), factors[depth]) if depth < len(factors) else None


def comfy_todo(factors: list[float], levels: tuple[int, ...]) -> Options:
    """comfy-todo: K and V are interpolated one after the other."""

    def patch(q: Tensor, k: Tensor, v: Tensor, extra: dict) -> tuple[Tensor, Tensor, Tensor]:
        plan = guessed(q, extra, factors, levels)
        return (q, k, v) if plan is None else (q, shrunk(k, *plan), shrunk(v, *plan))

    return {"patches": {"attn1_patch": [patch]}}


def kohya_todo(factors: list[float], levels: tuple[int, ...]) -> Options:
    """The kohya fork: one interpolation that K and V share."""

    def patch(q: Tensor, k: Tensor, v: Tensor, extra: dict) -> tuple[Tensor, Tensor, Tensor]:
        plan = guessed(q, extra, factors, levels)
        if plan is None:
            return q, k, v
        context = shrunk(k, *plan)
        return q, context, context

    return {"patches": {"attn1_patch": [patch]}}


def ready_made(factors: list[float], levels: tuple[int, ...]) -> Options:
    """The ideal: the first call makes the context of each block, every later one finds it (in training no gradient
    flows through it).
    """
    made: dict[tuple, Tensor] = {}

    def patch(q: Tensor, k: Tensor, v: Tensor, extra: dict) -> tuple[Tensor, Tensor, Tensor]:
        plan = guessed(q, extra, factors, levels)
        if plan is None:
            return q, k, v
        key = (*extra["block"], extra["block_index"])
        if key not in made:
            with torch.inference_mode(False):
                made[key] = shrunk(k.clone(), *plan).detach().clone()
        return q, made[key], made[key]

    return {"patches": {"attn1_patch": [patch]}}


def tome(ratio: float, levels: tuple[int, ...]) -> Options:
    """ToMe as the tomesd package does it by default: at the first level all tokens merge before self-attention, and
    unmerge after.
    """
    from tomesd.merge import bipartite_soft_matching_random2d

    unmerge: list[Callable[[Tensor], Tensor]] = []

    def merge(q: Tensor, k: Tensor, v: Tensor, extra: dict) -> tuple[Tensor, Tensor, Tensor]:
        height, width = extra["original_shape"][2:]
        if q.shape[1] != (height // levels[0]) * (width // levels[0]):
            return q, k, v
        merging, restoring = bipartite_soft_matching_random2d(
            q,
            width // levels[0],
            height // levels[0],
            2,
            2,
            int(q.shape[1] * ratio),
            generator=torch.Generator(q.device).manual_seed(0),
        )
        unmerge.append(restoring)
        merged = merging(q)
        return merged, merged, merged

    def restore(output: Tensor, extra: dict) -> Tensor:
        return unmerge.pop()(output) if unmerge else output

    return {"patches": {"attn1_patch": [merge], "attn1_output_patch": [restore]}}
