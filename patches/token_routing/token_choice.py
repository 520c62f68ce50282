"""Token routing: which tokens stay in the blocks, taking them out of a sequence, and putting them back."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor


def kept_count(count: int, ratio: float, others: int = 0, taken: Collection[int] = ()) -> int:
    """How many of `count` tokens stay when `ratio` of them skip; at least 1.

    With `others` tokens beside them, the sequence gets none of the lengths in `taken`: by these, other patches know
    other attention of the model.
    """
    kept = max(1, count - int(count * ratio + 1e-9))  # 0.7 of 10 is 7, although 0.7 * 10 is a little less
    while kept > 1 and others + kept in taken:
        kept -= 1
    return kept


def choose_kept(seed: int, rows: int, count: int, kept: int, device: torch.device) -> Tensor:
    """Indices (rows, kept) of those of `count` tokens that stay, ascending, each row's own draw.

    They are drawn on the CPU, so that every device keeps the same.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(rows, count, generator=generator).argsort(dim=1)
    return order[:, :kept].sort(dim=1).values.to(device, non_blocking=True)


def sequence_indices(kept: Tensor, start: int, count: int, length: int) -> Tensor:
    """Indices (rows, length - count + kept) in a sequence of `length`, whose image tokens begin at `start`: all tokens
    but those that skip.
    """
    before = torch.arange(start, device=kept.device).expand(kept.shape[0], -1)
    after = torch.arange(start + count, length, device=kept.device).expand(kept.shape[0], -1)
    return torch.cat((before, kept + start, after), dim=1)


def take(values: Tensor, indices: Tensor, axis: int) -> Tensor:
    """The values at indices (B, K) along an axis. Values for one row (1, ...) are taken for each row of indices."""
    shape = [indices.shape[0], *[1] * (values.ndim - 1)]
    shape[axis] = indices.shape[1]
    return torch.take_along_dim(values, indices.view(shape), dim=axis)


def put_back(full: Tensor, kept: Tensor, tokens: Tensor) -> Tensor:
    """The image tokens (B, N, C) with `tokens` (B, K, C) at the indices kept (B, K)."""
    return full.to(tokens.dtype).scatter(1, kept.unsqueeze(-1).expand_as(tokens), tokens)
