"""Aspect ratio buckets: an image size for every aspect ratio, none larger than the base resolution's area; how an image
is scaled and cropped to its bucket.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

MAX_ASPECT_RATIO = 4


def bucket_sizes(resolution: int, step: int) -> list[tuple[int, int]]:
    """(width, height) of every bucket: multiples of `step`, area at most resolution^2, each as large as it can be,
    sides up to 4:1.

    The largest square is always among them, so that square images stay whole where `step` does not divide the
    resolution.
    """
    if step < 8 or step % 8:
        raise ValueError(f"bucket step is {step}, expected a multiple of 8 pixels.")
    if resolution < step:
        raise ValueError(f"resolution is {resolution}, expected at least bucket step ({step}).")
    area, square = resolution * resolution, resolution // step * step
    sizes = {(square, square)}
    for width in range(step, 2 * resolution + 1, step):
        height = area // width // step * step
        if height >= step and max(width, height) <= MAX_ASPECT_RATIO * min(width, height):
            sizes |= {(width, height), (height, width)}
    return sorted(sizes)


def nearest_bucket(width: int, height: int, choices: list[tuple[int, int]]) -> tuple[int, int]:
    """The bucket whose aspect ratio is nearest to the image's, on a log scale. On a tie, the largest."""
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


def frame(size: tuple[int, int], bucket: tuple[int, int], position: tuple[float, float] = (0.5, 0.5)) -> Framing:
    """An image of `size` (width, height) scaled to just cover the bucket and cropped at `position`: (0, 0) is top left,
    (1, 1) bottom right.
    """
    scale = max(bucket[0] / size[0], bucket[1] / size[1])
    width, height = max(bucket[0], round(size[0] * scale)), max(bucket[1], round(size[1] * scale))
    left = math.floor((width - bucket[0]) * position[0])
    top = math.floor((height - bucket[1]) * position[1])
    return Framing(size, (width, height), left, top, bucket)
