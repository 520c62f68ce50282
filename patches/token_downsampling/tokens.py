"""Token downsampling: which tokens of a grid keys and values keep (ToDo, arXiv 2402.13573; sd-scripts PR 1151)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ...settings.declaration import check_values, setting

if TYPE_CHECKING:
    from ..models.token_layout import Grid

METHODS = ("nearest-exact", "nearest", "area", "blend")
PHASES = ("both", "training", "sampling")
MAX_FACTOR = 16.0
MAX_DEPTH = 4
BLEND = 0.5  # equal parts of the nearest token and of the mean, the middle of BiGain's range (arXiv 2603.12240)


def _read_factors(text: str) -> tuple[float, ...]:
    """The factors in a text such as "4 2" (spaces or commas), from the first depth on; none in an empty one."""
    words = text.replace(",", " ").split()
    if len(words) > MAX_DEPTH:
        raise ValueError(f"expected at most {MAX_DEPTH} factors, got {len(words)} in {text!r}")
    factors = []
    for word in words:
        try:
            factors.append(float(word))
        except ValueError:
            raise ValueError(f"expected numbers separated by spaces, such as '4 2', got {word!r}") from None
        if not 1.0 <= factors[-1] <= MAX_FACTOR:  # NaN fails this too
            raise ValueError(f"expected a factor from 1 (off) to {MAX_FACTOR:g}, got {word}")
    return tuple(factors)


@dataclass(frozen=True)
class ToDoSettings:
    """The settings of Apply ToDo; plain values, checked on creation."""

    factor: float = setting(
        "downsampling factor",
        2.0,
        "How much smaller each side of the key/value grid becomes. 2 keeps 1/4 of the tokens, 4 keeps 1/16, 1 is"
        " off. Raise it for large images, lower it if detail suffers.",
        low=1.0,
        high=MAX_FACTOR,
        step=0.1,
        kohya=("--todo_factor", "one value. 1 is off"),
    )
    max_depth: int = setting(
        "maximum depth",
        1,
        "How many attention levels to downsample, starting at the finest. SD1.x has 4, SDXL 2, a transformer 1. 1"
        " is usually enough.",
        low=1,
        high=MAX_DEPTH,
        kohya=("--todo_max_depth", "1 by default"),
    )
    depth_factors: tuple[float, ...] = setting(
        "factors by depth",
        "",
        "One factor for each depth, such as '4 2'. Overrides factor and maximum depth. Leave empty to use those.",
        read=_read_factors,
        advanced=True,
        kohya=(
            "--todo_factor 4 2, --todo_factor 4 4",
            "`4 2`, in the same order: the finest depth first. They set the depth, without `--todo_max_depth`",
        ),
    )
    method: str = setting(
        "downsampling method",
        "nearest-exact",
        "Which token represents its neighbors: nearest-exact takes the middle one, nearest the first, area their"
        " mean, blend half nearest and half mean. Keep nearest-exact unless you compare.",
        choices=METHODS,
        advanced=True,
        kohya=("--todo_args downsample_method", "an early option of the pull request"),
    )
    start_percent: float = setting(
        "start",
        0.0,
        "Sampling only: start downsampling at this fraction of the steps. Raise it above 0 if the composition changes"
        " too much. Training ignores it, because every image there has its own noise level.",
        low=0.0,
        high=1.0,
        step=0.01,
        advanced=True,
    )
    end_percent: float = setting(
        "end",
        1.0,
        "Sampling only: stop downsampling at this fraction of the steps. Try 0.7 to get fine detail back. Training"
        " ignores it.",
        low=0.0,
        high=1.0,
        step=0.01,
        advanced=True,
    )
    phase: str = setting(
        "active during",
        "both",
        "When to downsample: during training, during sampling, or both. Train Step's own validation and previews"
        " run on the whole model unless you choose sampling.",
        choices=PHASES,
        advanced=True,
    )
    disable_after: float = setting(
        "disable after",
        0.0,
        "Training only: switch off after this fraction of the run (below 1) or after this many steps (1 and above)."
        " 0 never switches off.",
        low=0.0,
        high=1_000_000.0,
        step=0.05,
        advanced=True,
    )

    def __post_init__(self) -> None:
        check_values(self, "Apply ToDo")
        if self.start_percent > self.end_percent:
            raise ValueError(
                f"Apply ToDo: start and end: expected start <= end, got {self.start_percent} and {self.end_percent}."
            )

    @property
    def factors(self) -> tuple[float, ...]:
        """The factor per side at each depth; the first is that of the first level that has attention."""
        return self.depth_factors or (self.factor,) * self.max_depth

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
        """The metadata of a LoRA trained with these settings (`ss_todo_*`)."""
        return {
            "ss_todo_factor": " ".join(f"{factor:g}" for factor in self.depth_factors or (self.factor,)),
            "ss_todo_max_depth": str(len(self.factors)),
        }

    @property
    def sampling_share(self) -> float:
        """The fraction of sampling that is downsampled, 0 to 1."""
        return 0.0 if self.phase == "training" else self.end_percent - self.start_percent

    @property
    def training_share(self) -> float | None:
        """The fraction of a training run that is downsampled, 0 to 1; None if it depends on the run's length."""
        if self.phase == "sampling":
            return 0.0
        if self.disable_after >= 1:
            return None
        return self.disable_after or 1.0

    def is_active_while_training(self, step: int, total_steps: int) -> bool:
        """Whether training step `step` (counted from 0) of `total_steps` is downsampled."""
        if self.phase == "sampling":
            return False
        return not is_disabled(self.disable_after, step, total_steps)


def is_disabled(disable_after: float, step: int, total_steps: int) -> bool:
    """Whether a training step comes after the end of token downsampling.

    Args:
        disable_after: a share of the run (below 1) or a number of steps; 0 is never.
        step: 0 is the first.
        total_steps: the run's length.
    """
    if disable_after == 0:
        return False
    if disable_after < 1:
        return step >= round(disable_after * total_steps, 6)  # 0.55 * 100 is above 55
    return step >= disable_after


def target_grid(grid: Grid, factor: float) -> Grid:
    """The size (height, width) to which a token grid shrinks: max(1, floor(side / factor)).

    The factor is the decimal number that was typed: 66 / 2.2 is 30, although its nearest float64 gives a little less.
    """
    height, width = (max(1, math.floor(side / factor + 1e-9)) for side in grid)
    return height, width


def thin(tokens: Tensor, grid: Grid, target: Grid, method: str = "nearest-exact") -> Tensor:
    """Downsample tokens. The result is bit-equal to `F.interpolate(image, size=target, mode=method)` of the tokens as
    an image (B, C, h, w); `blend` is the mean of `nearest` and `area`.

    Args:
        tokens: (B, h * w, C).
        grid: (h, w).
        target: the smaller grid.
        method: one of `METHODS`.

    Returns:
        (B, h' * w', C) of the target grid.

    Raises:
        ValueError: if there are not h * w tokens.
    """
    if tokens.shape[1] != grid[0] * grid[1]:
        raise ValueError(f"expected {grid[0]}x{grid[1]} = {grid[0] * grid[1]} tokens, got {tokens.shape[1]}")
    if target == grid:
        return tokens
    if method in ("nearest", "nearest-exact"):
        return tokens.index_select(1, _kept_indices(grid, target, method, tokens.device))
    if method == "area":
        return _area(tokens, grid, target)
    if method == "blend":
        return torch.lerp(thin(tokens, grid, target, "nearest"), _area(tokens, grid, target), BLEND)
    raise ValueError(f"downsampling method: expected one of {', '.join(METHODS)}, got {method!r}")


def _area(tokens: Tensor, grid: Grid, target: Grid) -> Tensor:
    image = tokens.reshape(tokens.shape[0], *grid, -1).permute(0, 3, 1, 2)
    return F.interpolate(image, size=target, mode="area").flatten(2).transpose(1, 2)


@lru_cache(maxsize=128)
def _kept_indices(grid: Grid, target: Grid, method: str, device: torch.device) -> Tensor:
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
    """Downsample the image tokens in a longer sequence, frame by frame; tokens before and after stay.

    Args:
        tokens: (…, N, C).
        span: where the image's tokens lie.
        target: the smaller grid.
        method: one of `METHODS`.

    Raises:
        ValueError: if the span does not fit into N.
    """
    _check(tokens.shape[-2], span)
    if target == span.grid:
        return tokens
    if method in ("nearest", "nearest-exact"):
        return tokens.index_select(-2, _kept_in_sequence(tokens.shape[-2], span, target, method, tokens.device))
    image = tokens.narrow(-2, span.start, span.count)
    frames = image.reshape(-1, span.grid[0] * span.grid[1], image.shape[-1])
    thinned = thin(frames, span.grid, target, method).reshape(*image.shape[:-2], -1, image.shape[-1])
    end = span.start + span.count
    return torch.cat((tokens[..., : span.start, :], thinned, tokens[..., end:, :]), dim=-2)


def thin_span_mask(mask: Tensor, span: Span, target: Grid, method: str = "nearest-exact") -> Tensor:
    """Downsample a mask over keys as the keys are. A mean (area, blend) takes the mask of the token in its middle.

    Args:
        mask: (…, N).
        span: where the image's tokens lie.
        target: the smaller grid.
        method: one of `METHODS`.
    """
    _check(mask.shape[-1], span)
    if target == span.grid:
        return mask
    if method != "nearest":
        method = "nearest-exact"
    return mask.index_select(-1, _kept_in_sequence(mask.shape[-1], span, target, method, mask.device))


def _check(length: int, span: Span) -> None:
    if span.start + span.count > length:
        raise ValueError(f"expected {span.count} image tokens from token {span.start} on, got a sequence of {length}")


@lru_cache(maxsize=128)
def _kept_in_sequence(length: int, span: Span, target: Grid, method: str, device: torch.device) -> Tensor:
    """Indices of the tokens to keep in a sequence of `length`."""
    with torch.inference_mode(False):
        indices, size = _kept_indices(span.grid, target, method, device), span.grid[0] * span.grid[1]
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
