"""Compares the demo run's images before and after training: counts what they show by the pixel rule, draws a sheet.

python -m graft_nodes.demo.compare OUTPUT_FOLDER

The exit status is 1 when the model knew the new word before, has not learned it, or has forgotten what it knew.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from ..storage.pictures import open_picture
from . import rule

SIDE = 96
COLUMNS = 8
HEAD = 28


class Group(NamedTuple):
    """`number` pictures of one caption, of which at least `fewest` and at most `most` must show what it says."""

    name: str
    caption: str
    number: int
    fewest: int
    most: int


GROUPS = (
    Group("before", "a zorp middle", 16, 0, 1),
    Group("after", "a zorp middle", 16, 13, 16),
    Group("known", "a green triangle right", 8, 7, 8),
)


def newest_images(folder: Path, name: str, count: int) -> list[Path]:
    """The `count` newest pictures that SaveImage wrote with this prefix. FileNotFoundError if there are fewer."""
    paths = sorted(folder.glob(f"{name}_*_.png"))[-count:]
    if len(paths) < count:
        raise FileNotFoundError(
            f"{folder}: expected {count} pictures {name}_*_.png, found {len(paths)}; run the demo workflow first"
        )
    return paths


def count_right(pictures: list[Path], caption: str) -> int:
    """How many of the pictures show what the caption says."""
    total = 0
    for path in pictures:
        pixels = np.asarray(open_picture(path).convert("RGB"))
        total += rule.satisfies(pixels, caption)
    return total


def draw_sheet(rows: list[tuple[str, list[Path]]]) -> Image.Image:
    """One picture with a heading and the pictures of each row, eight side by side."""
    heights = [HEAD + SIDE * -(-len(pictures) // COLUMNS) for _, pictures in rows]
    page = Image.new("RGB", (COLUMNS * SIDE, sum(heights)), "white")
    pen, top = ImageDraw.Draw(page), 0
    for (heading, pictures), height in zip(rows, heights, strict=True):
        pen.text((8, top + 6), heading, fill="black", font_size=15)
        for index, path in enumerate(pictures):
            small = open_picture(path).convert("RGB").resize((SIDE, SIDE), Image.Resampling.LANCZOS)
            page.paste(small, (index % COLUMNS * SIDE, top + HEAD + index // COLUMNS * SIDE))
        top += height
    return page


def main(arguments: list[str]) -> int:
    """Read OUTPUT_FOLDER/demo, print the counts and write OUTPUT_FOLDER/demo/before_after.png."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(arguments[0]) / "demo"
    rows, status = [], 0
    for group in GROUPS:
        pictures = newest_images(folder, group.name, group.number)
        right = count_right(pictures, group.caption)
        rows.append((f"{group.name}: {group.caption}, {right} of {group.number} right", pictures))
        print(rows[-1][0])
        if not group.fewest <= right <= group.most:
            print(f"{group.name}: expected from {group.fewest} to {group.most} right pictures", file=sys.stderr)
            status = 1
    page = folder / "before_after.png"
    draw_sheet(rows).save(page)
    print(page)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
