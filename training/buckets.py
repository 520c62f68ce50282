"""Aspect buckets: a picture size for every aspect ratio, none larger than the base resolution's area."""

from __future__ import annotations

import math


def sizes(resolution: int, step: int) -> list[tuple[int, int]]:
    """(width, height) of every bucket: multiples of `step`, area at most resolution^2, each as large as it can be, sides up to 4:1."""
    if step < 8 or step % 8:
        raise ValueError(f"bucket_step is {step}, expected a multiple of 8 pixels.")
    if resolution < step:
        raise ValueError(f"resolution is {resolution}, expected at least bucket_step ({step}).")
    area = resolution * resolution
    found = set()
    for width in range(step, 2 * resolution + 1, step):
        height = area // width // step * step
        if height >= step and max(width, height) <= 4 * min(width, height):
            found |= {(width, height), (height, width)}
    return sorted(found)


def nearest(width: int, height: int, choices: list[tuple[int, int]]) -> tuple[int, int]:
    """The bucket whose aspect ratio is nearest to the picture's in logarithm; of equals the largest."""
    wanted = math.log(width / height)
    return min(choices, key=lambda size: (abs(math.log(size[0] / size[1]) - wanted), -size[0] * size[1], size))


def cover(width: int, height: int, bucket: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int, int, int]]:
    """((w, h) to scale the picture to, (left, top, right, bottom) of the centre crop) so that it just covers the bucket."""
    scale = max(bucket[0] / width, bucket[1] / height)
    w, h = max(bucket[0], round(width * scale)), max(bucket[1], round(height * scale))
    left, top = (w - bucket[0]) // 2, (h - bucket[1]) // 2
    return (w, h), (left, top, left + bucket[0], top + bucket[1])
