"""Searched averages (LCSC, arXiv 2404.02241): the share of each snapshot by held-out loss, negative ones allowed.

The search sees half of the held-out images. The other half compares its result with the best single width. Averages
whose shares amplify the rounding of the stored snapshots too much are not tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...ema import post_hoc
from ...patches.lora_files import average
from .sources import Sources
from .storage_noise import StorageNoise

MOST_DIRECTIONS = 12  # of the shares that are searched; a budget of images ends before more of them pay
_TRIES_A_DIRECTION = 3
_SAMPLED = 1 << 18  # numbers of each snapshot that tell how snapshots differ
_FARTHEST = 4.0  # a step goes at most so many times as far as the points that it was computed from
_ENOUGH = 1e-7  # a round that lowers the loss by less than this share of it is idle
_IDLE_ROUNDS = 3  # in a row, with steps a quarter as long each time, end the search

Score = Callable[[Mapping[str, Tensor], Sequence[int]], float | None]


class Minimum(NamedTuple):
    """The point of the lowest value, that value, and how many points were tried."""

    point: Tensor
    value: float
    tries: int


class WidthLosses(NamedTuple):
    """A width, its shares, and its held-out loss on the images that the search sees and on the others."""

    width: float
    shares: tuple[float, ...]
    seen: float
    kept: float


@dataclass(frozen=True)
class SearchedAverage:
    """What a search took: the shares of the snapshots, the width they stand for if it took a width, and the report."""

    shares: tuple[float, ...]
    width: float | None
    lines: tuple[str, ...]


def search(
    sources: Sources, widths: Sequence[float], score: Score, halves: tuple[range, range], tries: int, seed: int
) -> SearchedAverage:
    """Search the shares of a run's snapshots for the lowest held-out loss, from the best of some widths on. If the
    result is worse than the best width on images that the search does not see, that width is taken.

    Args:
        sources: the snapshots.
        widths: relative widths to begin with.
        score: returns the held-out loss of a LORA_MODEL on some images.
        halves: the images that the search sees, and those that it does not.
        tries: how many averages are tried at most.
        seed: of the order in which directions are tried.
    """
    fits = [post_hoc.reconstruct(sources.profiles, width) for width in widths]
    if len(sources.files) < 2:
        raise post_hoc.TooFewSnapshots(
            "averaging profile search needs at least 2 snapshots: train further, or use latest"
        )
    seen, kept = halves
    snapshots = _Snapshots(sources, score)
    rows = []
    for width, fit in zip(widths, fits, strict=True):
        rows.append(WidthLosses(width, fit.weights, *(snapshots.loss(fit.weights, half) for half in halves)))
    start = min(rows, key=lambda row: (row.seen, -row.width))
    best = min(rows, key=lambda row: (row.kept, -row.width))
    total = math.fsum(start.shares)
    first = torch.tensor([share / total for share in start.shares], dtype=torch.float64)
    steps = directions(snapshots.files, first, min(MOST_DIRECTIONS, max(1, tries // (_TRIES_A_DIRECTION + 1))))
    noise = StorageNoise(snapshots.files)
    most_noise = max(post_hoc.TOLERANCE, noise.of(first))
    left_out = 0

    def loss(shares: Tensor) -> float:
        nonlocal left_out
        if noise.of(shares) > most_noise:
            left_out += 1
            return math.inf
        return snapshots.loss(shares.tolist(), seen)

    found = minimize(loss, first, steps, tries, seed)
    shares = tuple(found.point.tolist())
    answer = snapshots.loss(shares, kept)
    lines = [
        f"searched {found.tries - left_out} averages of {len(sources.files)} snapshots in {len(steps)} directions on"
        f" {len(seen)} held-out images, seed {seed}; {len(kept)} other ones are kept for the answer",
        *_left_out_line(left_out, most_noise),
        "held-out loss: where it was searched, and on the images kept for the answer",
    ]
    for row in rows:
        marks = "  <- start" if row is start else ""
        marks += "  <- best width" if row is best else ""
        lines.append(f"width {row.width:.4f}: {row.seen:.6g}, {row.kept:.6g}{marks}")
    lines.append(f"searched: {found.value:.6g}, {answer:.6g}")
    if answer <= best.kept:
        lines.append(
            f"the searched average is taken: on the kept images it is as good as width {best.width:.4f} or better"
        )
        return SearchedAverage(shares, None, (*lines, _noise_line(shares, noise)))
    lines.append(
        f"width {best.width:.4f} is taken: the searched average is worse on the kept images, so it fits only the images"
        " it was searched on"
    )
    return SearchedAverage(best.shares, best.width, (*lines, _noise_line(best.shares, noise)))


def _left_out_line(left_out: int, most_noise: float) -> list[str]:
    if not left_out:
        return []
    return [f"left out {left_out} averages: float16 rounding alone would be more than {most_noise:.1%} of their change"]


def _noise_line(shares: Sequence[float], noise: StorageNoise) -> str:
    tensor = torch.tensor(shares, dtype=torch.float64)
    return (
        f"the shares add up to {float(tensor.abs().sum()):.1f} in size, so the snapshots' float16 rounding counts"
        f" {float(tensor.norm()):.1f}-fold: about {noise.of(tensor):.2%} of the change"
    )


class _Snapshots:
    """A run's snapshots, read once and memory-mapped, and the held-out losses of their averages."""

    def __init__(self, sources: Sources, score: Score) -> None:
        self.files = [file.load_as_stored() for file in sources.files]
        self.names = [file.name for file in sources.files]
        self.score = score

    def loss(self, shares: Sequence[float], images: Sequence[int]) -> float:
        """The held-out loss of one average; infinite if it is not a number."""
        loss = self.score(average.average(self.files, shares, self.names, "factors").state, images)
        assert loss is not None
        if math.isnan(loss):
            return math.inf
        return loss


@torch.no_grad()
def directions(files: Sequence[Mapping[str, Tensor]], start: Tensor, most: int) -> Tensor:
    """Changes of the shares to search along: the principal axes of the files' differences, those that change the
    weights most first. Each is as long as changes the weights by half of what a file differs from the start, and at
    most 1.

    Args:
        files: tensors by name.
        start: the shares to begin with (files,), float64.
        most: how many at most.

    Returns:
        (at most `most`, files), float64; each adds up to 0.
    """
    numbers = torch.stack([_sample(file) for file in files])
    middle = start @ numbers
    differences = numbers - middle
    without_sum = torch.eye(len(files), dtype=torch.float64) - 1 / len(files)
    squared, axes = torch.linalg.eigh(without_sum @ (differences @ differences.T) @ without_sum)
    count = min(most, len(files) - 1)
    squared, axes = squared.flip(0)[:count], axes.flip(1).T[:count]
    used = squared > max(1e-12 * float(squared[0]), 1e-16 * float(middle @ middle))  # the others are rounding
    squared, axes = squared[used], axes[used]
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))  # an axis has no sign of its own
    distances = differences.norm(dim=1)
    other = distances >= 1e-3 * distances.max()  # a file that is the start itself gives no length
    lengths = 0.5 * distances[other].median() / squared.sqrt()
    return axes * largest.sign() * lengths.clamp(max=1)[:, None]


def _sample(file: Mapping[str, Tensor]) -> Tensor:
    """Numbers of a file, float64: every so many-th, the same of each file."""
    tensors = [tensor for tensor in file.values() if tensor.is_floating_point() and tensor.numel() > 1]
    stride = 1 + sum(tensor.numel() for tensor in tensors) // _SAMPLED
    return torch.cat([tensor.flatten()[::stride].double() for tensor in tensors])


def minimize(value: Callable[[Tensor], float], start: Tensor, steps: Tensor, tries: int, seed: int) -> Minimum:
    """The lowest value found along some steps (Powell's method with parabolas).

    A round goes along every step once, in a drawn order, and then along what the round has changed, which replaces the
    step that lowered the value most.

    Args:
        value: of a point.
        start: the point to begin with (n,), float64.
        steps: (m, n), float64.
        tries: how often `value` is called at most.
        seed: of the order of steps.
    """
    generator = torch.Generator().manual_seed(seed)
    tried = _Trials(value, tries)
    tried.value(start)
    steps = steps.clone()
    idle = 0
    while len(steps) and tried.left and idle < _IDLE_ROUNDS:
        begin, before = tried.best
        gains = torch.zeros(len(steps), dtype=torch.float64)
        for number in torch.randperm(len(steps), generator=generator).tolist():
            at = tried.best[1]
            steps[number] *= _search_along(tried, steps[number])
            gains[number] = at - tried.best[1]
        change = tried.best[0] - begin
        if before - tried.best[1] <= _ENOUGH * abs(before):
            idle += 1
            continue
        idle = 0
        if len(steps) > 1:
            steps[int(gains.argmax())] = change * _search_along(tried, change)
    return Minimum(*tried.best, tried.count)


class _Trials:
    """Values of points, the lowest of them, and how many tries are left."""

    def __init__(self, value: Callable[[Tensor], float], tries: int) -> None:
        self._value, self.left, self.count = value, tries, 0
        self.best: tuple[Tensor, float] = (torch.zeros(0), math.inf)

    def value(self, point: Tensor) -> float:
        """The value of a point; infinite when no try is left."""
        if not self.left:
            return math.inf
        self.left -= 1
        self.count += 1
        value = self._value(point)
        if value < self.best[1] or not self.best[0].numel():
            self.best = (point, value)
        return value


def _search_along(tried: _Trials, step: Tensor) -> float:
    """Try points along a step from the best one. Returns by how much a next step should be longer, 0.25 to 2."""
    begin, at_begin = tried.best
    ahead = tried.value(begin + step)
    other = -1.0
    if ahead < at_begin:
        other = 2.0
    at_other = tried.value(begin + other * step)
    lowest = _lowest_of_parabola(at_begin, ahead, other, at_other)
    if lowest is not None:
        tried.value(begin + lowest * step)
    moved = float((tried.best[0] - begin) @ step) / float(step @ step)
    return min(2.0, max(0.25, abs(moved)))


def _lowest_of_parabola(at_0: float, at_1: float, place: float, at_place: float) -> float | None:
    """Where the parabola through the values at 0, 1 and `place` is lowest; None if it opens downwards."""
    bend = ((at_place - at_0) / place - (at_1 - at_0)) / (place - 1)
    if not (math.isfinite(bend) and bend > 0):
        return None
    lowest = (bend - (at_1 - at_0)) / (2 * bend)
    return min(_FARTHEST, max(-_FARTHEST, lowest))
