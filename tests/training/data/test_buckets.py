"""Bucket sizes against every size that fits, the nearest bucket, and what a frame keeps of its image."""

import numpy as np
import pytest
from graft_nodes.training.data import buckets

SIZES = [(64, 64), (128, 64), (256, 8), (512, 64), (640, 8), (500, 64), (333, 8), (72, 64), (1344, 128)]


@pytest.mark.parametrize(("resolution", "step"), SIZES)
def test_buckets_are_the_largest_multiples_of_the_step_within_the_area(resolution, step):
    square = resolution // step * step
    expected = {(square, square)}
    for width in range(step, 4 * resolution + 1, step):
        heights = [height for height in range(step, 4 * resolution + 1, step) if width * height <= resolution**2]
        if heights and max(width, heights[-1]) <= 4 * min(width, heights[-1]):
            expected |= {(width, heights[-1]), (heights[-1], width)}
    assert buckets.bucket_sizes(resolution, step) == sorted(expected)
    assert buckets.nearest_bucket(700, 700, sorted(expected)) == (square, square)


def test_sides_are_up_to_four_to_one():
    assert {(256, 64), (64, 256)} <= set(buckets.bucket_sizes(128, 64))
    assert (320, 40) not in buckets.bucket_sizes(128, 8) and max(buckets.bucket_sizes(128, 8)) == (256, 64)


@pytest.mark.parametrize("step", [0, -8, 4, 12])
def test_a_step_is_a_multiple_of_8(step):
    with pytest.raises(ValueError, match=f"bucket step is {step}, expected a multiple of 8"):
        buckets.bucket_sizes(512, step)


def test_a_resolution_is_at_least_the_step():
    assert buckets.bucket_sizes(8, 8) == [(8, 8)]
    with pytest.raises(ValueError, match=r"resolution is 63, expected at least bucket step \(64\)"):
        buckets.bucket_sizes(63, 64)


def test_the_bucket_is_the_nearest_in_log_ratio():
    choices = buckets.bucket_sizes(512, 64)
    for w, h in [(512, 512), (1000, 500), (500, 1000), (3000, 400), (640, 480), (7, 9)]:
        best = min(abs(np.log(a / b) - np.log(w / h)) for a, b in choices)
        a, b = buckets.nearest_bucket(w, h, choices)
        assert abs(np.log(a / b) - np.log(w / h)) == pytest.approx(best)
    assert buckets.nearest_bucket(9, 9, [(64, 64), (128, 128), (192, 64)]) == (128, 128)  # a tie: the largest


def test_fine_buckets_are_near_every_shape():
    choices = buckets.bucket_sizes(333, 8)
    for size in ((1600, 1000), (900, 1600), (1234, 567)):
        width, height = buckets.nearest_bucket(*size, choices)
        assert abs(np.log(width / height / (size[0] / size[1]))) < 0.03


def test_a_frame_knows_what_it_keeps_and_enlarges():
    half = buckets.frame((200, 100), (64, 64))
    assert half.scaled == (128, 64) and half.box == (32, 0, 96, 64) and half.kept == 0.5
    assert not half.enlarged and not buckets.frame((64, 64), (64, 64)).enlarged
    assert buckets.frame((63, 64), (64, 64)).enlarged and buckets.frame((64, 63), (64, 64)).enlarged
    right = buckets.frame((200, 100), (64, 64), (1.0, 0.0))
    assert right.box == (64, 0, 128, 64) and right.flipped.box == (0, 0, 64, 64)
    assert right.size_conditioning() == {
        "width": 200,
        "height": 100,
        "crop_w": 64,
        "crop_h": 0,
        "target_width": 64,
        "target_height": 64,
    }
