"""Aspect ratio buckets: an image size for every aspect ratio, none larger than the base resolution's area; how an image
is scaled and cropped to its bucket. A resolution is a width and a height, of which buckets take the area.

Buckets between a least and a greatest side, and buckets that never enlarge an image, are kohya's (sd-scripts,
`make_bucket_resolutions` and `BucketManager`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

MAX_ASPECT_RATIO = 4
LONGEST_SIDE = 16_384  # of a bucket


def name_of(resolution: tuple[int, int]) -> str:
    """ "512", or "960 x 544" where it is not a square."""
    width, height = resolution
    if width == height:
        return str(width)
    return f"{width} x {height}"


def bucket_sizes(resolution: tuple[int, int], step: int, least: int = 0, most: int = 0) -> list[tuple[int, int]]:
    """The buckets of a resolution: area at most the resolution's, each as large as it can be.

    The largest square is always among them, so that square images stay whole where `step` does not divide the
    resolution.

    Args:
        resolution: (width, height) in pixels.
        step: sides are multiples of it, in pixels.
        least: no side is shorter; 0 means no limit.
        most: no side is longer; 0 means no limit. Without both, sides go up to 4:1.

    Returns:
        (width, height) of every bucket.

    Raises:
        ValueError: where the limits leave out the square.
    """
    if step < 8 or step % 8:
        raise ValueError(f"bucket step is {step}, expected a multiple of 8 pixels.")
    area = resolution[0] * resolution[1]
    side = math.isqrt(area)
    if side < step:
        raise ValueError(f"resolution is {name_of(resolution)}, expected at least bucket step ({step}).")
    square = side // step * step
    if least or most:
        _check_sides(square, step, least, most)
        return _sizes_between(square, area, step, least or step, most)
    sizes = {(square, square)}
    for width in range(step, 2 * side, step):
        height = area // width // step * step
        if height >= step and max(width, height) <= MAX_ASPECT_RATIO * min(width, height):
            sizes |= {(width, height), (height, width)}
    return sorted(sizes)


def _check_sides(square: int, step: int, least: int, most: int) -> None:
    """Raise ValueError for sides that are not multiples of `step`, or that leave the square bucket out."""
    errors: list[str] = []
    for label, side in (("minimum", least), ("maximum", most)):
        if side % step:
            errors.append(f"{label} bucket side is {side}, expected a multiple of bucket step ({step})")
    if least > square:
        errors.append(f"minimum bucket side is {least}, expected at most {square}, the square bucket of the resolution")
    if most and most < square:
        errors.append(
            f"maximum bucket side is {most}, expected at least {square}, the square bucket of the resolution, or 0"
        )
    if errors:
        raise ValueError("; ".join(errors) + ".")


def _sizes_between(square: int, area: int, step: int, least: int, most: int) -> list[tuple[int, int]]:
    longest = most or min(LONGEST_SIDE, area // least) // step * step
    sizes = {(square, square)}
    for width in range(least, longest + 1, step):
        height = min(longest, area // width // step * step)
        if height >= least:
            sizes |= {(width, height), (height, width)}
    return sorted(sizes)


def shrunk_bucket(
    size: tuple[int, int], resolution: tuple[int, int], step: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The bucket of an image that is never enlarged: kohya's `bucket_no_upscale`.

    An image of no larger area than the resolution's keeps its size, a larger one shrinks to it; the bucket is what is
    left when each side is cut to a multiple of `step`.

    Args:
        size: (width, height) of the image.
        resolution: (width, height) in pixels.
        step: sides of the bucket are multiples of it.

    Returns:
        (bucket, scaled size), both (width, height).

    Raises:
        ValueError: where a side is shorter than `step`.
    """
    area, aspect = resolution[0] * resolution[1], size[0] / size[1]
    scaled = size
    if size[0] * size[1] > area:
        scaled = _shrink(area, aspect, step)
    bucket = (scaled[0] // step * step, scaled[1] // step * step)
    if not all(bucket):
        raise ValueError(
            f"it is {size[0]} x {size[1]} pixels, and with no upscale its shorter side gives no bucket of bucket step"
            f" ({step}): lower bucket step, or switch no upscale off"
        )
    return bucket, scaled


def _shrink(area: int, aspect: float, step: int) -> tuple[int, int]:
    """The size of about `area` pixels in which one side is a multiple of `step`: the side that keeps the shape better
    when the other one is rounded too.
    """
    width = math.sqrt(area * aspect)
    rounded_width, rounded_height = _round_to(width, step), _round_to(area / width, step)
    height_beside, width_beside = _round_to(rounded_width / aspect, step), _round_to(rounded_height * aspect, step)
    if not (rounded_width and rounded_height and height_beside and width_beside):
        return 0, 0
    if abs(rounded_width / height_beside - aspect) < abs(width_beside / rounded_height - aspect):
        return rounded_width, int(rounded_width / aspect + 0.5)
    return int(rounded_height * aspect + 0.5), rounded_height


def _round_to(length: float, step: int) -> int:
    """A length as whole pixels, cut to a multiple of `step`."""
    return int(length + 0.5) // step * step


def nearest_bucket(width: int, height: int, choices: list[tuple[int, int]]) -> tuple[int, int]:
    """The bucket whose aspect ratio is nearest to an image's, on a log scale. On a tie, the largest.

    Args:
        width: the image's, in pixels.
        height: the image's, in pixels.
        choices: (width, height) of the buckets.
    """
    aspect = math.log(width / height)

    def distance(size: tuple[int, int]) -> tuple[float, int, tuple[int, int]]:
        return abs(math.log(size[0] / size[1]) - aspect), -size[0] * size[1], size

    return min(choices, key=distance)


@dataclass(frozen=True)
class Framing:
    """How an image is scaled and cropped to its bucket, in pixels: (width, height) before and after scaling, and where
    the crop of size `target` begins.
    """

    original: tuple[int, int]
    scaled: tuple[int, int]
    left: int
    top: int
    target: tuple[int, int]

    @property
    def box(self) -> tuple[int, int, int, int]:
        """(left, top, right, bottom) of the crop in the scaled image."""
        return self.left, self.top, self.left + self.target[0], self.top + self.target[1]

    @property
    def kept(self) -> float:
        """The share of the image's area that is in the crop."""
        return self.target[0] * self.target[1] / (self.scaled[0] * self.scaled[1])

    @property
    def flipped(self) -> Framing:
        """The same crop, seen from the top left corner of the flipped image."""
        return replace(self, left=self.scaled[0] - self.left - self.target[0])

    @property
    def enlarged(self) -> bool:
        """Whether the image is smaller than its bucket."""
        return self.scaled[0] > self.original[0] or self.scaled[1] > self.original[1]

    def size_conditioning(self) -> dict[str, int]:
        """SDXL's size and crop conditioning (2307.01952, 2.2), under the names of the host's conditioning."""
        return {
            "width": self.original[0],
            "height": self.original[1],
            "crop_w": self.left,
            "crop_h": self.top,
            "target_width": self.target[0],
            "target_height": self.target[1],
        }


def frame(
    size: tuple[int, int],
    bucket: tuple[int, int],
    position: tuple[float, float] = (0.5, 0.5),
    scaled: tuple[int, int] | None = None,
) -> Framing:
    """How an image is scaled to just cover its bucket, and cropped.

    Args:
        size: (width, height) of the image.
        bucket: (width, height) of the bucket.
        position: where it is cropped: (0, 0) is top left, (1, 1) bottom right.
        scaled: the size that it is scaled to instead of one that just covers the bucket.
    """
    scale = max(bucket[0] / size[0], bucket[1] / size[1])
    width, height = max(bucket[0], round(size[0] * scale)), max(bucket[1], round(size[1] * scale))
    if scaled is not None:
        width, height = scaled
    left = math.floor((width - bucket[0]) * position[0])
    top = math.floor((height - bucket[1]) * position[1])
    return Framing(size, (width, height), left, top, bucket)
