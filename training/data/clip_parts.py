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
    """The largest number of frames that a VAE takes: a multiple of its step and one more.

    Args:
        frames: at most so many.
        step: the VAE's, 4 for Wan.
    """
    return (frames - 1) // step * step + 1


def resample(ticks: Sequence[int], per_second: int, rate: float) -> list[int]:
    """The numbers of the frames that a clip shows at another rate: each time the frame that is nearest.

    Args:
        ticks: when its frames are shown, in 1 / `per_second` seconds, the first one's 0.
        per_second: ticks in a second; 0 where the frames have no times.
        rate: frames a second; 0 takes each frame once.

    Raises:
        ValueError: where there would be too many.
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
    """The parts of a clip that are trained on.

    Args:
        count: the clip's frames.
        lengths: how many frames a part has; each that the clip is long enough for.
        way: head: one part from its beginning. uniform: some parts, spread evenly. chunk: one part after the other.
            slide: a part every few frames. full: the whole clip, at most the longest of `lengths`, in steps of the VAE.
        number: how many parts uniform takes.
        stride: how many frames apart the parts of slide begin.
        step: the VAE's.

    Returns:
        (first frame, frames) of each part.
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
