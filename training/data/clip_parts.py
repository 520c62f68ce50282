"""Which frames of a clip are trained: its frames at another rate, and the parts that it is cut into.

The ways to cut are those of musubi-tuner's `frame_extraction` (dataset_config.md, image_video_dataset.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from math import ceil

HEAD = "head"
WAYS = (HEAD, "uniform", "chunk", "slide", "full")
MOST_PARTS = 1_000  # of one clip
MOST_FRAMES = 36_000  # of one clip
_ROUNDED = Fraction(1, 4)  # of a frame, that rounded times may add to a clip's length


def round_frames(frames: int, step: int) -> int:
    """The largest number of frames, at most that many, that a VAE takes: a multiple of its step and one more."""
    return (frames - 1) // step * step + 1


def resample(ticks: Sequence[int], per_second: int, rate: float) -> list[int]:
    """The numbers of the frames that a clip shows at `rate` frames a second: each time the frame that is nearest.

    `ticks` are when its frames are shown, in 1 / `per_second` seconds, the first one's 0. Without a rate, or where the
    frames have no times (`per_second` 0), each frame once. Raises ValueError when there would be too many.
    """
    if not rate or not per_second or len(ticks) == 1:
        return list(range(len(ticks)))
    exact = Fraction(rate).limit_denominator(1001)
    end = Fraction(ticks[-1] * len(ticks), (len(ticks) - 1) * per_second)  # the last frame is as long as the others
    count = ceil(end * exact - _ROUNDED)
    if count > MOST_FRAMES:
        raise ValueError(f"at frame rate {rate:g} it has {count:,} frames, expected at most {MOST_FRAMES:,}; cut it")
    return [_nearest(ticks, number * per_second / exact) for number in range(max(1, count))]


def _nearest(ticks: Sequence[int], time: Fraction) -> int:
    """The number of the frame whose time is nearest; of two as near, the earlier one."""
    after = bisect_left(ticks, time)
    if after == len(ticks):
        return after - 1
    if after and time - ticks[after - 1] <= ticks[after] - time:
        return after - 1
    return after


def split_frames(
    count: int, lengths: Sequence[int], way: str, number: int, stride: int, step: int
) -> list[tuple[int, int]]:
    """(first frame, frames) of each part of a clip of `count` frames, for each of `lengths` that it is long enough for.

    head: one part from its beginning. uniform: `number` parts, spread evenly. chunk: one part after the other. slide: a
    part every `stride` frames. full: the whole clip, at most the longest of `lengths`, in steps of the VAE.
    """
    if way == "full":
        return [(0, round_frames(min(count, max(lengths)), step))]
    found: list[tuple[int, int]] = []
    for length in lengths:
        if length <= count:
            found += [(start, length) for start in _starts(count - length, length, way, number, stride)]
    return found


def _starts(last: int, length: int, way: str, number: int, stride: int) -> list[int]:
    """Where the parts of one length begin; `last` is where the last one can."""
    if way == HEAD:
        return [0]
    if way == "chunk":
        return list(range(0, last + 1, length))
    if way == "slide":
        return list(range(0, last + 1, stride))
    if number == 1:
        return [0]
    return list(dict.fromkeys(place * last // (number - 1) for place in range(number)))
