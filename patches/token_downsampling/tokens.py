"""Token downsampling: which tokens of a grid keys and values keep (ToDo, arXiv 2402.13573; sd-scripts PR 1151)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from ..models.token_layout import Grid

METHODS = ("nearest-exact", "nearest", "area", "blend")
PHASES = ("both", "training", "sampling")
MAX_FACTOR = 16.0
MAX_DEPTH = 4
BLEND = 0.5  # equal parts of the nearest token and of the mean, the middle of BiGain's range (arXiv 2603.12240)


@dataclass(frozen=True)
class ToDoSettings:
    """The settings of Apply ToDo.

    `factors[d - 1]` is the factor per side at depth d; depth 1 is the first level that has attention.
    """

    factors: tuple[float, ...]
    method: str = "nearest-exact"
    start_percent: float = 0.0
    end_percent: float = 1.0
    phase: str = "both"
    disable_after: float = 0.0
    given: tuple[str, str] = field(default=("", ""), compare=False)  # factors and max_depth in the user's own words

    @classmethod
    def parse(
        cls,
        factor: float = 2.0,
        max_depth: int = 1,
        depth_factors: str = "",
        method: str = "nearest-exact",
        start_percent: float = 0.0,
        end_percent: float = 1.0,
        phase: str = "both",
        disable_after: float = 0.0,
    ) -> ToDoSettings:
        """Settings from the node's inputs; raises ValueError listing every invalid input."""
        problems: list[str] = []
        factors = _parse_factors(factor, max_depth, depth_factors, problems)
        if method not in METHODS:
            problems.append(f"downsampling method: expected one of {', '.join(METHODS)}, got {method!r}")
        if phase not in PHASES:
            problems.append(f"active during: expected one of {', '.join(PHASES)}, got {phase!r}")
        if not 0.0 <= start_percent <= end_percent <= 1.0:
            problems.append(f"start and end: expected 0 <= start <= end <= 1, got {start_percent} and {end_percent}")
        problems += wrong_disable_after(disable_after)
        if problems:
            raise ValueError("Apply ToDo:\n" + "\n".join(f"- {problem}" for problem in problems))
        user_text = (" ".join(depth_factors.replace(",", " ").split()) or f"{factor:g}", str(len(factors)))
        return cls(factors, method, start_percent, end_percent, phase, disable_after, user_text)

    @property
    def identity(self) -> str:
        """The same text for equal settings, in every process; fingerprints hash it."""
        factors = " ".join(f"{factor:.17g}" for factor in self.factors)
        return (
            f"todo {factors} {self.method} {self.start_percent:.17g}-{self.end_percent:.17g} {self.phase} after"
            f" {self.disable_after:.17g}"
        )

    @property
    def changes_nothing(self) -> bool:
        """True when every factor is 1."""
        return all(factor == 1.0 for factor in self.factors)

    def metadata(self) -> dict[str, str]:
        """The metadata of a LoRA trained with these settings (`ss_todo_*`), in the user's own words."""
        factor, max_depth = self.given
        return {
            "ss_todo_factor": factor or " ".join(f"{factor:g}" for factor in self.factors),
            "ss_todo_max_depth": max_depth or str(len(self.factors)),
        }

    @property
    def sampling_share(self) -> float:
        """The fraction of sampling that is downsampled, 0 to 1."""
        if self.phase == "training":
            return 0.0
        return self.end_percent - self.start_percent

    @property
    def training_share(self) -> float | None:
        """The fraction of a training run that is downsampled, 0 to 1; None if it depends on the run's length."""
        if self.phase == "sampling":
            return 0.0
        if self.disable_after >= 1:
            return None
        return self.disable_after or 1.0

    def active_while_training(self, step: int, total_steps: int) -> bool:
        """Whether training step `step` (counted from 0) of `total_steps` is downsampled."""
        if self.phase == "sampling":
            return False
        return not is_disabled(self.disable_after, step, total_steps)


def wrong_disable_after(disable_after: float) -> list[str]:
    """What is wrong with a "disable after"; nothing where it can be used."""
    if math.isfinite(disable_after) and disable_after >= 0:
        return []
    return [f"disable after: expected 0 (never), a share below 1, or a number of steps, got {disable_after}"]


def is_disabled(disable_after: float, step: int, total_steps: int) -> bool:
    """Whether training step `step` (counted from 0) of `total_steps` comes after a share of the run (below 1) or after
    a number of steps; 0 never does.
    """
    if disable_after == 0:
        return False
    if disable_after < 1:
        return step >= round(disable_after * total_steps, 6)  # 0.55 * 100 is above 55
    return step >= disable_after


def _parse_factors(factor: float, max_depth: int, depth_factors: str, problems: list[str]) -> tuple[float, ...]:
    if depth_factors.strip():
        words = depth_factors.replace(",", " ").split()
        label, values, repeats = "factors by depth", [_number(word) for word in words], 1
        if len(words) > MAX_DEPTH:
            problems.append(
                f"factors by depth: expected at most {MAX_DEPTH} factors, got {len(words)} in {depth_factors!r}"
            )
    else:
        label, words, values = "downsampling factor", [str(factor)], [float(factor)]
        repeats = max(1, max_depth)
        if not 1 <= max_depth <= MAX_DEPTH:
            problems.append(f"maximum depth: expected 1 to {MAX_DEPTH}, got {max_depth}")
    for word, value in zip(words, values, strict=True):
        if value is None:
            problems.append(f"{label}: expected numbers separated by spaces, such as '4 2', got {word!r}")
        elif not 1.0 <= value <= MAX_FACTOR:  # NaN fails this too
            problems.append(f"{label}: expected a factor from 1 (off) to {MAX_FACTOR:g}, got {word}")
    return tuple(value for value in values if value is not None) * repeats


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def target_grid(grid: Grid, factor: float) -> Grid:
    """The size (height, width) to which a token grid shrinks: max(1, floor(side / factor)).

    The factor is the decimal number that was typed: 66 / 2.2 is 30, although its nearest float64 gives a little less.
    """
    height, width = (max(1, math.floor(side / factor + 1e-9)) for side in grid)
    return height, width


def thin(tokens: Tensor, grid: Grid, target: Grid, method: str = "nearest-exact") -> Tensor:
    """Downsample tokens (B, h*w, C) of a grid (h, w) to (B, h'*w', C) of the target grid.

    The result is bit-equal to `F.interpolate(image, size=target, mode=method)` of the tokens as an image (B, C, h, w);
    `blend` is the mean of `nearest` and `area`. Raises ValueError if there are not h*w tokens.
    """
    if tokens.shape[1] != grid[0] * grid[1]:
        raise ValueError(f"expected {grid[0]}x{grid[1]} = {grid[0] * grid[1]} tokens, got {tokens.shape[1]}")
    if target == grid:
        return tokens
    if method in ("nearest", "nearest-exact"):
        return tokens.index_select(1, _kept(grid, target, method, tokens.device))
    if method == "area":
        return _area(tokens, grid, target)
    if method == "blend":
        return torch.lerp(thin(tokens, grid, target, "nearest"), _area(tokens, grid, target), BLEND)
    raise ValueError(f"downsampling method: expected one of {', '.join(METHODS)}, got {method!r}")


def _area(tokens: Tensor, grid: Grid, target: Grid) -> Tensor:
    image = tokens.reshape(tokens.shape[0], *grid, -1).permute(0, 3, 1, 2)
    return F.interpolate(image, size=target, mode="area").flatten(2).transpose(1, 2)


@lru_cache(maxsize=128)
def _kept(grid: Grid, target: Grid, method: str, device: torch.device) -> Tensor:
    """Indices (h'*w') of the tokens to keep.

    They are taken from F.interpolate itself, so that they match its choice on this device.
    """
    with torch.inference_mode(False):  # an inference tensor could not be saved for backward
        numbers = torch.arange(grid[0] * grid[1], dtype=torch.float32, device=device).view(
            1, 1, *grid
        )  # exact below 2**24
        return F.interpolate(numbers, size=target, mode=method).flatten().long()


@dataclass(frozen=True)
class Span:
    """Where the image tokens are in a longer sequence.

    They are `frames` grids of (height, width), row by row, starting at token `start`.
    """

    start: int
    frames: int
    grid: Grid

    @property
    def count(self) -> int:
        """How many image tokens there are."""
        return self.frames * self.grid[0] * self.grid[1]


def thin_span(tokens: Tensor, span: Span, target: Grid, method: str = "nearest-exact") -> Tensor:
    """Downsample the image tokens in a longer sequence (..., N, C), frame by frame; tokens before and after stay.

    Raises ValueError if the span does not fit into N.
    """
    _check(tokens.shape[-2], span)
    if target == span.grid:
        return tokens
    if method in ("nearest", "nearest-exact"):
        return tokens.index_select(-2, _kept_of(tokens.shape[-2], span, target, method, tokens.device))
    image = tokens.narrow(-2, span.start, span.count)
    frames = image.reshape(-1, span.grid[0] * span.grid[1], image.shape[-1])
    thinned = thin(frames, span.grid, target, method).reshape(*image.shape[:-2], -1, image.shape[-1])
    end = span.start + span.count
    return torch.cat((tokens[..., : span.start, :], thinned, tokens[..., end:, :]), dim=-2)


def thin_span_mask(mask: Tensor, span: Span, target: Grid, method: str = "nearest-exact") -> Tensor:
    """Downsample a mask (..., N) over keys as the keys are.

    A mean (area, blend) takes the mask of the token in its middle.
    """
    _check(mask.shape[-1], span)
    if target == span.grid:
        return mask
    if method != "nearest":
        method = "nearest-exact"
    return mask.index_select(-1, _kept_of(mask.shape[-1], span, target, method, mask.device))


def _check(length: int, span: Span) -> None:
    if span.start + span.count > length:
        raise ValueError(f"expected {span.count} image tokens from token {span.start} on, got a sequence of {length}")


@lru_cache(maxsize=128)
def _kept_of(length: int, span: Span, target: Grid, method: str, device: torch.device) -> Tensor:
    """Indices of the tokens to keep in a sequence of `length`."""
    with torch.inference_mode(False):
        indices, size = _kept(span.grid, target, method, device), span.grid[0] * span.grid[1]
        image = [indices + span.start + frame * size for frame in range(span.frames)]
        numbers = torch.arange(length, device=device)
        return torch.cat((numbers[: span.start], *image, numbers[span.start + span.count :]))


@dataclass(frozen=True)
class DepthReport:
    """One depth: its token grids before and after, and its self-attention blocks."""

    depth: int
    factor: float
    before: Grid | None
    after: Grid | None
    patched: int
    skipped: int
    frames: int = 1  # grids a sequence has: the frames of a video
    width: int = 1  # of queries and keys, where it differs between depths


def attention_saving(rows: Sequence[DepthReport]) -> float:
    """The fraction of the self-attention's multiplications that is saved, from 0 to 1.

    These are Q K^T and A V: queries x keys x width.
    """
    full = reduced = 0
    for row in rows:
        if row.before is not None and row.after is not None:
            queries, keys = (row.frames * grid[0] * grid[1] for grid in (row.before, row.after))
            full += row.width * (row.patched + row.skipped) * queries * queries
            reduced += row.width * (row.patched * queries * keys + row.skipped * queries * queries)
    if full:
        return 1 - reduced / full
    return 0.0
