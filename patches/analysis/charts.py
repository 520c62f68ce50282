"""Pictures of what was measured, drawn with Pillow: bars by block, and tables of cosines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL import ImageDraw

WIDTH = 960
_PAPER, _INK, _GRID = (250, 250, 248), (40, 40, 40), (222, 222, 218)
_PALE, _STRONG, _RED = (176, 200, 226), (24, 82, 148), (168, 38, 30)
_LEFT, _RIGHT = 80, 930
_HEAD, _BARS, _NAMES = 44, 130, 56  # of a chart, from the top: title, bars, names of the bars


@dataclass(frozen=True)
class Bar:
    """A value with a name; strong or pale."""

    name: str
    value: float
    strong: bool = True


@dataclass(frozen=True)
class BarChart:
    """Bars side by side under a title."""

    title: str
    bars: Sequence[Bar]


def draw_bars(charts: Sequence[BarChart]) -> Tensor:
    """Charts below each other, all to one scale from 0, as an image (1, H, W, 3) in 0..1."""
    from PIL import Image, ImageDraw

    height = _HEAD + _BARS + _NAMES
    image = Image.new("RGB", (WIDTH, max(1, len(charts)) * height + 12), _PAPER)
    pen = ImageDraw.Draw(image)
    top = max((bar.value for chart in charts for bar in chart.bars), default=0.0)
    for number, chart in enumerate(charts):
        _draw_chart(image, pen, chart, number * height, top or 1.0)
    return to_image(image)


@dataclass(frozen=True)
class CellTable:
    """Numbers from -1 to 1 in lines and columns (None: nothing to say), and texts above them."""

    titles: Sequence[str]
    columns: Sequence[str]
    lines: Sequence[tuple[str, Sequence[float | None]]]


def draw_cells(table: CellTable) -> Tensor:
    """A table as an image (1, H, W, 3) in 0..1: negative numbers red, positive ones blue, the stronger the darker."""
    from PIL import Image, ImageDraw

    top = 24 + 16 * len(table.titles)
    height = 22
    image = Image.new("RGB", (WIDTH, top + height * len(table.lines) + _NAMES + 8), _PAPER)
    pen = ImageDraw.Draw(image)
    for number, title in enumerate(table.titles):
        pen.text((_LEFT, 12 + 16 * number), to_latin_1(title), fill=_INK)
    step = (_RIGHT - _LEFT) / max(8, len(table.columns))
    for number, (name, values) in enumerate(table.lines):
        y = top + number * height
        pen.text((_LEFT - 8, y + height / 2), name, fill=_INK, anchor="rm")
        for place, value in enumerate(values):
            box = [_LEFT + place * step, y, _LEFT + (place + 1) * step - 1, y + height - 2]
            pen.rectangle(box, fill=_cell_color(value))
            if value is not None and step >= 34:
                ink = _PAPER if abs(value) > 0.25 else _INK
                pen.text((box[0] + step / 2, y + height / 2), f"{value:+.2f}", fill=ink, anchor="mm")
    for place, name in enumerate(table.columns):
        draw_upright(image, name, _LEFT + (place + 0.5) * step, top + height * len(table.lines) + 5)
    return to_image(image)


def _cell_color(value: float | None) -> tuple[int, int, int]:
    if value is None:
        return _GRID
    end = _RED if value < 0 else _STRONG
    share = min(1.0, abs(value)) ** 0.5  # small cosines matter too
    red, green, blue = (round(paper + share * (ink - paper)) for paper, ink in zip(_PAPER, end, strict=True))
    return red, green, blue


def to_image(image: object) -> Tensor:
    """A Pillow picture as an image (1, H, W, 3) in 0..1."""
    import numpy as np

    return torch.from_numpy(np.asarray(image, dtype=np.float32) / 255.0)[None]


def to_latin_1(text: str) -> str:
    """A text in characters that Pillow's own font has."""
    return text.encode("latin-1", "replace").decode("latin-1")


def _draw_chart(image: object, pen: ImageDraw.ImageDraw, chart: BarChart, above: int, top: float) -> None:
    low, high = above + _HEAD + _BARS, above + _HEAD
    pen.text((_LEFT, above + 16), to_latin_1(chart.title), fill=_INK)
    for share in (0.0, 0.5, 1.0):
        y = low - _BARS * share
        pen.line([(_LEFT, y), (_RIGHT, y)], fill=_GRID)
        pen.text((_LEFT - 8, y), f"{top * share:.2%}", fill=_INK, anchor="rm")
    step = (_RIGHT - _LEFT) / max(8, len(chart.bars))
    for place, bar in enumerate(chart.bars):
        left = _LEFT + place * step
        color = _STRONG if bar.strong else _PALE
        pen.rectangle([left + 0.1 * step, low - _BARS * bar.value / top, left + 0.9 * step, low], fill=color)
        draw_upright(image, bar.name, left + step / 2, low + 5)
    pen.line([(_LEFT, low), (_RIGHT, low)], fill=_INK)
    pen.line([(_LEFT, low), (_LEFT, high)], fill=_INK)


def draw_upright(image: object, text: str, middle: float, top: float) -> None:
    """A text turned by 90 degrees, which ends at `top`, centered across."""
    from PIL import Image, ImageDraw

    assert isinstance(image, Image.Image)
    left, up, right, down = ImageDraw.Draw(image).textbbox((0, 0), to_latin_1(text))
    label = Image.new("RGB", (int(right - left) + 2, int(down - up) + 2), _PAPER)
    ImageDraw.Draw(label).text((1 - left, 1 - up), to_latin_1(text), fill=_INK)
    turned = label.rotate(90, expand=True)
    image.paste(turned, (round(middle - turned.width / 2), round(top)))
