"""Plots of curves over training steps, drawn with Pillow: losses, and how much each step weighs in an average."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...ema.decay import EMASettings, decay_over

if TYPE_CHECKING:
    from PIL import ImageDraw

SIZE = (960, 540)
_BOX = (80, 40, 930, 480)  # left, top, right, bottom of the plot
_PAPER, _INK, _GRID = (250, 250, 248), (40, 40, 40), (222, 222, 218)
PALE, STRONG = (176, 200, 226), (24, 82, 148)


@dataclass(frozen=True)
class Curve:
    """Values at steps first, first + 1 …; a color (R, G, B) and a name for the legend."""

    values: Sequence[float]
    color: tuple[int, int, int] = STRONG
    name: str = ""
    first: int = 1


def smooth(values: Sequence[float], smoothing: float) -> list[float]:
    """Exponential moving average, corrected for its start (smoothing 0 returns the values unchanged)."""
    if not 0.0 <= smoothing < 1.0:
        raise ValueError(f"smoothing is {smoothing}, expected at least 0 and below 1.")
    smoothed_values, mean, weight = [], 0.0, 0.0
    for value in values:
        mean = smoothing * mean + (1 - smoothing) * value
        weight = smoothing * weight + (1 - smoothing)
        smoothed_values.append(mean / weight)
    return smoothed_values


def averaging_profile(settings: EMASettings, steps: int, total_steps: int) -> list[float]:
    """How much the start (first entry) and the weights after each step count in the average after `steps` steps.

    They sum to 1.
    """
    weights, remaining = [0.0] * (steps + 1), 1.0
    for step in range(steps, 0, -1):
        if step % settings.interval == 0:
            decay = decay_over(settings, step, total_steps)
            weights[step], remaining = remaining * (1 - decay), remaining * decay
    weights[0] = remaining
    return weights


def editor_data(curves: Sequence[Curve], points: int = 400) -> list[dict[str, Any]]:
    """The curves as JSON for the editor: [{name, steps, values}], thinned out to about `points` points.

    The last point is always kept.
    """
    return [_thin(curve, points) for curve in curves]


def _thin(curve: Curve, points: int) -> dict[str, Any]:
    """About `points` points of a curve, always with the last one."""
    count = len(curve.values)
    indices = list(range(0, count, max(1, count // points)))
    if indices and indices[-1] != count - 1:
        indices.append(count - 1)
    return {
        "name": curve.name,
        "steps": [curve.first + i for i in indices],
        "values": [float(curve.values[i]) for i in indices],
    }


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from low to high, about `count` of them; one when the two are equal."""
    if high <= low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def draw(curves: Sequence[Curve], title: str, across: str, up: str) -> Tensor:
    """Draw the curves as an image (1, H, W, 3) in 0..1.

    Values that are not finite are left out; raises ValueError if none is left.
    """
    import numpy as np
    from PIL import Image, ImageDraw

    finite = [value for curve in curves for value in curve.values if math.isfinite(value)]
    if not finite:
        raise ValueError("There is nothing to draw: no value is finite.")
    low, high = min(finite), max(finite)
    if high - low <= 1e-12 * max(1.0, abs(high)):  # a constant curve runs through the middle
        margin = abs(high) * 0.1 or 1.0
        low, high = low - margin, high + margin
    first = min(curve.first for curve in curves)
    last = max(curve.first + len(curve.values) - 1 for curve in curves)
    image = Image.new("RGB", SIZE, _PAPER)
    pen = ImageDraw.Draw(image)
    left, top, right, bottom = _BOX

    def place(step: float, value: float) -> tuple[float, float]:
        share = 0.5
        if last > first:
            share = (step - first) / (last - first)
        return left + (right - left) * share, bottom - (bottom - top) * (value - low) / (high - low)

    for value in ticks(low, high):
        y = place(float(first), value)[1]
        pen.line([(left, y), (right, y)], fill=_GRID)
        pen.text((left - 8, y), f"{value:.4g}", fill=_INK, anchor="rm")
    for number in ticks(first, last):
        if number != int(number):
            continue
        x = place(number, low)[0]
        pen.line([(x, top), (x, bottom)], fill=_GRID)
        pen.text((x, bottom + 8), f"{number:.0f}", fill=_INK, anchor="mt")
    for curve in curves:
        points: list[tuple[float, float] | None] = []  # None where the curve is interrupted
        for i, value in enumerate(curve.values):
            if math.isfinite(value):
                points.append(place(curve.first + i, value))
            else:
                points.append(None)
        _line(pen, points, curve.color)
    pen.rectangle(_BOX, outline=_INK)
    pen.text((left, 14), title, fill=_INK)
    pen.text(((left + right) / 2, SIZE[1] - 12), across, fill=_INK, anchor="mb")
    pen.text((left - 8, 26), up, fill=_INK, anchor="rm")
    _legend(pen, curves)
    return torch.from_numpy(np.asarray(image, dtype=np.float32) / 255.0)[None]


def _line(pen: ImageDraw.ImageDraw, points: Sequence[tuple[float, float] | None], color: tuple[int, int, int]) -> None:
    run: list[tuple[float, float]] = []
    for point in [*points, None]:
        if point is not None:
            run.append(point)
        elif run:
            if len(run) > 1:
                pen.line(run, fill=color, width=2)
            x, y = run[-1]
            if len(points) == 1 or len(run) == 1:
                pen.ellipse([x - 3, y - 3, x + 3, y + 3], fill=color)
            run = []


def _legend(pen: ImageDraw.ImageDraw, curves: Sequence[Curve]) -> None:
    x = float(_BOX[2])
    for curve in reversed(curves):
        if not curve.name:
            continue
        width = pen.textlength(curve.name)
        pen.text((x - width, 14), curve.name, fill=_INK)
        pen.line([(x - width - 30, 20), (x - width - 8, 20)], fill=curve.color, width=3)
        x -= width + 50
