"""Detects shape, color and position in a demo image by a plain pixel rule; no model, no learning."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from . import draw, tokenizer

GRID = 64
SATURATED = 0.3
HUE_TOLERANCE = 30.0
OVERLAP = {"circle": 0.75, "square": 0.75, "triangle": 0.65, "cross": 0.65, "ring": 0.62}
CONCEPT = ("ring", "purple")


@dataclass(frozen=True)
class Detection:
    """What the rule sees; None where nothing fits. `hue` in degrees, `overlap` is the best shape's intersection over
    union.
    """

    shape: str | None
    color: str | None
    position: str | None
    hue: float
    overlap: float


def _cells(picture: np.ndarray) -> np.ndarray:
    """(H, W, 3) in 0..1 as the (64, 64, 3) means of equal cells; sides are multiples of 64."""
    h, w, _ = picture.shape
    if h % GRID or w % GRID:
        raise ValueError(f"picture is {h}x{w}: expected sides that are multiples of {GRID}")
    return picture.reshape(GRID, h // GRID, GRID, w // GRID, 3).mean(axis=(1, 3))


def _color_mask(cells: np.ndarray) -> np.ndarray:
    """(64, 64) bool: cells with color, less the isolated ones (fewer than 4 of 8 neighbors)."""
    mask = cells.max(axis=2) - cells.min(axis=2) > SATURATED
    padded = np.pad(mask, 1).astype(int)
    neighbors = (
        sum(padded[1 + dy : 1 + dy + GRID, 1 + dx : 1 + dx + GRID] for dy in (-1, 0, 1) for dx in (-1, 0, 1)) - mask
    )
    return mask & (neighbors >= 4)


def _hue(colors: np.ndarray) -> float:
    """The mean hue in degrees of (n, 3) colors: the direction of their sum in the plane across gray."""
    red, green, blue = colors.sum(axis=0)
    return float(np.degrees(np.arctan2(np.sqrt(3.0) * (green - blue), 2.0 * red - green - blue)) % 360.0)


def _best_shape(mask: np.ndarray) -> tuple[str | None, float, float]:
    """(shape, overlap, center x in 0..1): each shape is fitted to the mask's bounding box and the
    largest overlap wins.
    """
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    top, bottom, left, right = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
    height, width = bottom - top, right - left
    y, x = np.mgrid[0:GRID, 0:GRID] + 0.5
    u, v = (x - (left + right) / 2) / (width / 2), (y - (top + bottom) / 2) / (height / 2)
    overlaps = {}
    for shape in OVERLAP:
        if shape == "square":
            size = 1 / 0.88
        else:
            size = 1.0
        ideal = draw.distance(shape, u, v, size) < 0
        overlaps[shape] = float((ideal & mask).sum() / (ideal | mask).sum())
    best = max(overlaps, key=overlaps.__getitem__)
    fits = overlaps[best] > OVERLAP[best] and 0.65 < width / height < 1.55 and 0.2 < width / GRID < 0.6
    center = (left + right) / 2 / GRID
    if not fits:
        return None, overlaps[best], center
    return best, overlaps[best], center


def detect(picture: np.ndarray) -> Detection:
    """Detect the shape in an image (H, W, 3), uint8 or float in 0..1, whose sides are multiples of 64."""
    pixels = np.asarray(picture, dtype=np.float64)
    if np.asarray(picture).dtype == np.uint8:
        pixels = pixels / 255.0
    cells = _cells(pixels)
    mask = _color_mask(cells)
    if mask.sum() < 40:
        return Detection(None, None, None, 0.0, 0.0)
    hue = _hue(cells[mask])
    distances = {color: abs((hue - center + 180.0) % 360.0 - 180.0) for color, center in draw.HUES.items()}
    color = min(distances, key=distances.__getitem__)
    shape, overlap, center = _best_shape(mask)
    position = min(draw.CENTERS, key=lambda name: abs(draw.CENTERS[name] / draw.SIDE - center))
    if distances[color] > HUE_TOLERANCE:
        return Detection(shape, None, position, hue, overlap)
    return Detection(shape, color, position, hue, overlap)


def parse_caption(caption: str) -> tuple[str, str, str]:
    """(shape, color, position) that a caption asks for; a zorp is a purple ring. Raises ValueError for any other
    caption.
    """
    parts = caption.split()
    if len(parts) == 3 and parts[:2] == ["a", tokenizer.CONCEPT] and parts[2] in tokenizer.POSITIONS:
        return (*CONCEPT, parts[2])
    if (
        len(parts) == 4
        and parts[0] == "a"
        and parts[1] in tokenizer.COLORS
        and parts[2] in tokenizer.SHAPES
        and parts[3] in tokenizer.POSITIONS
    ):
        return parts[2], parts[1], parts[3]
    raise ValueError(f"caption {caption!r}: expected 'a COLOR SHAPE POSITION' or 'a {tokenizer.CONCEPT} POSITION'")


def satisfies(picture: np.ndarray, caption: str) -> bool:
    """Whether the picture shows the caption's shape, color and position."""
    detection = detect(picture)
    return (detection.shape, detection.color, detection.position) == parse_caption(caption)


def score(pictures: Iterable[np.ndarray], captions: Iterable[str]) -> int:
    """How many pictures satisfy their captions; takes one caption per picture."""
    return sum(satisfies(picture, caption) for picture, caption in zip(pictures, captions, strict=True))
