"""Which frames of a clip are trained, against musubi-tuner's formulas."""

from fractions import Fraction

import numpy as np
import pytest
from graft_nodes.training.data import clip_parts


def _musubi(frame_count, target_frames, frame_extraction, frame_sample=1, frame_stride=1, max_frames=129):
    """`VideoDataset.retrieve_latent_cache_batches` of musubi-tuner (image_video_dataset.py)."""
    if frame_extraction == "full":
        target_frame = min(frame_count, max_frames)
        return [(0, (target_frame - 1) // 4 * 4 + 1)]
    crop_pos_and_frames = []
    for target_frame in target_frames:
        if frame_extraction == "chunk":
            found = [i for i in range(0, frame_count, target_frame) if i + target_frame <= frame_count]
        elif frame_count < target_frame:
            found = []
        elif frame_extraction == "head":
            found = [0]
        elif frame_extraction == "slide":
            found = list(range(0, frame_count - target_frame + 1, frame_stride))
        else:
            found = np.linspace(0, frame_count - target_frame, frame_sample, dtype=int).tolist()
        crop_pos_and_frames += [(i, target_frame) for i in found]
    return crop_pos_and_frames


@pytest.mark.parametrize("way", clip_parts.WAYS)
@pytest.mark.parametrize("count", [1, 4, 5, 16, 17, 33, 50, 100, 121])
def test_parts_are_musubis(way, count):
    for lengths in ([1], [17], [1, 17, 33], [5, 49]):
        for number in (1, 2, 3, 4, 7):
            expected = _musubi(count, lengths, way, number, 10, max(lengths))
            found = clip_parts.split_frames(count, lengths, way, number, 10, 4)
            assert found == list(dict.fromkeys(expected)), "each part once"


def test_frames_are_rounded_down_to_what_the_vae_takes():
    assert [clip_parts.round_frames(count, 4) for count in (1, 4, 5, 16, 17, 33)] == [1, 1, 5, 13, 17, 33]
    assert [clip_parts.round_frames(count, 8) for count in (1, 8, 9, 97, 100)] == [1, 1, 9, 97, 97]
    assert [clip_parts.round_frames(count, 1) for count in (1, 2, 30)] == [1, 2, 30]


@pytest.mark.parametrize("rate", [8, 16, 23.976, 24, 25, 29.97, 30, 60])
def test_a_clips_own_rate_keeps_each_frame_once(rate):
    exact = Fraction(rate).limit_denominator(1001)
    for per_second in (1000, exact.numerator):
        ticks = [round(number * per_second / exact) for number in range(200)]
        assert clip_parts.resample(ticks, per_second, rate) == list(range(200))


def _nearest(times, rate, seconds):
    """The frame nearest to each time before the end, by looking at all of them."""
    shown = []
    number = 0
    while Fraction(number) / rate < seconds:
        shown.append(min(range(len(times)), key=lambda index: (abs(times[index] - Fraction(number) / rate), index)))
        number += 1
    return shown


@pytest.mark.parametrize(("own", "rate"), [(24, 12), (24, 16), (30, 16), (25, 24), (30, 24), (60, 16)])
def test_lower_rates_take_the_nearest_frames(own, rate):
    times = [Fraction(number, own) for number in range(3 * own)]
    ticks = list(range(3 * own))
    expected = _nearest(times, rate, 3)
    found = clip_parts.resample(ticks, own, rate)
    assert found == expected and len(found) == 3 * rate


def test_higher_rates_repeat_frames():
    assert clip_parts.resample([0, 1, 2], 8, 16) == [0, 0, 1, 1, 2, 2]


def test_times_of_their_own_and_none():
    assert clip_parts.resample([0, 100, 1000], 1000, 2) == [0, 1, 2]
    assert clip_parts.resample([0, 1, 2], 0, 16) == [0, 1, 2], "frames without times"
    assert clip_parts.resample([0, 1, 2], 8, 0) == [0, 1, 2], "no rate is asked for"
    assert clip_parts.resample([0], 8, 16) == [0]
    with pytest.raises(ValueError, match=r"has 480,000 frames.*cut it"):
        clip_parts.resample([0, 10_000], 10, 240)
