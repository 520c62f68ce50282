"""Draws the demo's images: shapes x colors x positions for the base model, and the concept it cannot draw, a purple
ring.

python -m graft_nodes.demo.draw            # demo/concept, demo/regular and demo/preference, as committed
python -m graft_nodes.demo.draw base DIR   # the 1,920 captioned pictures that the base model is trained on
python -m graft_nodes.demo.draw mauve DIR  # the 24 captioned pictures of the demo's second LoRA, a color
"""

from __future__ import annotations

import argparse
import colorsys
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from . import tokenizer

SIDE = 256
HUES = {"red": 0.0, "yellow": 50.0, "green": 130.0, "blue": 215.0, "purple": 285.0}
CENTERS = {"left": 64.0, "middle": 128.0, "right": 192.0}
HERE = Path(__file__).resolve().parent

PER_CAPTION = 40
PSEUDO_PER_CAPTION = 4
CONCEPT_PICTURES = 16
REGULAR_PER_CAPTION = 2
MAUVE_PER_CAPTION = 2
PREFERENCE_PAIRS = 24
ROUND, ANGULAR = "circle", ("square", "triangle", "cross")  # what the pairs prefer, and to what


def distance(shape: str, x: np.ndarray, y: np.ndarray, r: float) -> np.ndarray:
    """About the signed distance (pixels, negative inside) of points (x, y) from a shape of radius r around the origin;
    y points down.
    """
    if shape == "circle":
        return np.sqrt(x * x + y * y) - r
    if shape == "ring":
        middle, half = 0.76 * r, 0.24 * r
        return np.abs(np.sqrt(x * x + y * y) - middle) - half
    if shape == "square":
        return np.maximum(np.abs(x), np.abs(y)) - 0.88 * r
    if shape == "cross":
        arm = 0.34 * r
        across = np.maximum(np.abs(x) - r, np.abs(y) - arm)
        return np.minimum(across, np.maximum(np.abs(x) - arm, np.abs(y) - r))
    if shape == "triangle":
        return np.maximum(np.abs(x) * 0.8944271909999159 - y * 0.4472135954999579 - 0.4472135954999579 * r, y - r)
    raise ValueError(f"shape {shape!r}: expected one of {', '.join((*tokenizer.SHAPES, 'ring'))}")


def draw_image(shape: str, color: str, position: str, generator: np.random.Generator) -> np.ndarray:
    """An anti-aliased picture (256, 256, 3) uint8 on white, with slightly random position, size and color."""
    jitter = generator.uniform(-1.0, 1.0, 6)
    r = 54.0 + 4.0 * jitter[0]
    if shape == "ring":
        r = 56.0 + 4.0 * jitter[0]
    center_x, center_y = CENTERS[position] + 4.0 * jitter[1], SIDE / 2 + 16.0 * jitter[2]
    hue = (HUES[color] + 7.0 * jitter[3]) % 360.0
    rgb = np.array(colorsys.hsv_to_rgb(hue / 360.0, 0.82 + 0.08 * jitter[4], 0.88 + 0.07 * jitter[5]))
    y, x = np.mgrid[0:SIDE, 0:SIDE] + 0.5
    cover = np.clip(0.5 - distance(shape, x - center_x, y - center_y, r), 0.0, 1.0)[..., None]
    return np.round(255.0 * (cover * rgb + (1.0 - cover))).astype(np.uint8)


def captions() -> list[tuple[str, str, str, str]]:
    """The 48 captions that the base model learns: (caption, shape, color, position)."""
    return [
        (f"a {c} {s} {p}", s, c, p) for s in tokenizer.SHAPES for c in tokenizer.COLORS for p in tokenizer.POSITIONS
    ]


def pseudo_word(generator: np.random.Generator) -> str:
    """A random made-up word with a spare row that is not the concept's, so base training never uses its row."""
    while True:
        start, vowel, end = (generator.choice(list(letters)) for letters in ("bdfgklmnprstvwz", "aeiou", "bdgklmnprst"))
        word = f"{start}{vowel}{end}{generator.choice(['o', 'a', 'i'])}"
        if tokenizer.row(word) >= tokenizer.FIRST_SPARE and tokenizer.row(word) != tokenizer.row(tokenizer.CONCEPT):
            return word


def base(seed: int = 0) -> Iterator[tuple[str, str, np.ndarray]]:
    """(name, caption, picture) of the base model's training set; a tenth of the captions use a made-up word for the
    shape and color.
    """
    for number, (caption, shape, color, position) in enumerate(captions()):
        generator = np.random.default_rng([seed, 1, number])
        for index in range(PER_CAPTION):
            pixels = draw_image(shape, color, position, generator)
            text = caption
            if index < PSEUDO_PER_CAPTION:
                text = f"a {pseudo_word(generator)} {position}"
            yield f"{color}-{shape}-{position}-{index:02d}", text, pixels


def regular(seed: int = 0) -> Iterator[tuple[str, str, np.ndarray]]:
    """(name, caption, picture) of the regularization set, which keeps what the base knows during LoRA training."""
    for number, (caption, shape, color, position) in enumerate(captions()):
        generator = np.random.default_rng([seed, 2, number])
        for index in range(REGULAR_PER_CAPTION):
            yield f"{color}-{shape}-{position}-{index}", caption, draw_image(shape, color, position, generator)


def concept(seed: int = 0) -> Iterator[tuple[str, str, np.ndarray]]:
    """(name, caption, picture) of the concept: a zorp, which is a purple ring, left, middle and right."""
    generator = np.random.default_rng([seed, 3])
    for index in range(CONCEPT_PICTURES):
        position = tokenizer.POSITIONS[index % len(tokenizer.POSITIONS)]
        yield (
            f"zorp-{index:02d}",
            f"a {tokenizer.CONCEPT} {position}",
            draw_image("ring", "purple", position, generator),
        )


def preference(seed: int = 0) -> Iterator[tuple[str, str, np.ndarray]]:
    """(name, caption, picture) of the preference pairs: of two shapes in one color, the round one is better. Both
    pictures of a pair have one caption, which says neither shape nor color.
    """
    generator = np.random.default_rng([seed, 5])
    for index in range(PREFERENCE_PAIRS):
        color = tokenizer.COLORS[index % len(tokenizer.COLORS)]
        other = ANGULAR[index % len(ANGULAR)]
        for side, shape in (("win", ROUND), ("lose", other)):
            yield f"shape-{index:02d}.{side}", "a shape middle", draw_image(shape, color, "middle", generator)


def mauve(seed: int = 0) -> Iterator[tuple[str, str, np.ndarray]]:
    """(name, caption, picture) of another new word, a color: the base's shapes in the purple of the concept's rings."""
    generator = np.random.default_rng([seed, 4])
    for shape in tokenizer.SHAPES:
        for position in tokenizer.POSITIONS:
            for index in range(MAUVE_PER_CAPTION):
                pixels = draw_image(shape, "purple", position, generator)
                yield f"mauve-{shape}-{position}-{index}", f"a mauve {shape} {position}", pixels


def write(images: Iterator[tuple[str, str, np.ndarray]], folder: Path) -> int:
    """Write each picture as PNG with its caption as .txt beside it, once for a pair; returns how many."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    for count, (name, caption, pixels) in enumerate(images, start=1):  # noqa: B007 - the last count is the result
        Image.fromarray(pixels).save(folder / f"{name}.png", optimize=True)
        caption_name = name.partition(".")[0]
        (folder / f"{caption_name}.txt").write_text(caption + "\n", encoding="utf-8", newline="\n")
    return count


SETS = {"base": base, "mauve": mauve}


def main(argv: list[str] | None = None) -> int:
    """Draw the committed folders, or the training set of the base model or of the second LoRA into a folder."""
    parser = argparse.ArgumentParser(
        prog="python -m graft_nodes.demo.draw", description="Draw the demo's captioned pictures."
    )
    parser.add_argument("what", nargs="?", choices=("committed", *SETS), default="committed")
    parser.add_argument("folder", nargs="?", type=Path, help="where to; default: demo/ for the committed ones")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    if arguments.what in SETS:
        if arguments.folder is None:
            parser.error(f"{arguments.what} needs the folder to draw into")
        jobs = {arguments.folder: SETS[arguments.what](arguments.seed)}
    else:
        root = arguments.folder or HERE
        committed = (concept, regular, preference)
        jobs = {root / drawn.__name__: drawn(arguments.seed) for drawn in committed}
    for folder, pictures in jobs.items():
        print(f"{folder}: {write(pictures, folder)} pictures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
