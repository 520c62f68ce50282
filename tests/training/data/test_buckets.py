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
    sizes = buckets.bucket_sizes((resolution, resolution), step)
    assert sizes == sorted(expected) and {type(side) for size in sizes for side in size} == {int}
    assert buckets.nearest_bucket(700, 700, sorted(expected)) == (square, square)


def test_sides_are_up_to_four_to_one():
    assert {(256, 64), (64, 256)} <= set(buckets.bucket_sizes((128, 128), 64))
    assert (320, 40) not in buckets.bucket_sizes((128, 128), 8) and max(buckets.bucket_sizes((128, 128), 8)) == (
        256,
        64,
    )


@pytest.mark.parametrize("step", [0, -8, 4, 12])
def test_a_step_is_a_multiple_of_8(step):
    with pytest.raises(ValueError, match=f"bucket step is {step}, expected a multiple of 8"):
        buckets.bucket_sizes((512, 512), step)


def test_a_resolution_is_at_least_the_step():
    assert buckets.bucket_sizes((8, 8), 8) == [(8, 8)]
    with pytest.raises(ValueError, match=r"resolution is 63, expected at least bucket step \(64\)"):
        buckets.bucket_sizes((63, 63), 64)


def test_the_bucket_is_the_nearest_in_log_ratio():
    choices = buckets.bucket_sizes((512, 512), 64)
    for w, h in [(512, 512), (1000, 500), (500, 1000), (3000, 400), (640, 480), (7, 9)]:
        best = min(abs(np.log(a / b) - np.log(w / h)) for a, b in choices)
        a, b = buckets.nearest_bucket(w, h, choices)
        assert abs(np.log(a / b) - np.log(w / h)) == pytest.approx(best)
    assert buckets.nearest_bucket(9, 9, [(64, 64), (128, 128), (192, 64)]) == (128, 128)  # a tie: the largest


def test_fine_buckets_are_near_every_shape():
    choices = buckets.bucket_sizes((333, 333), 8)
    for size in ((1600, 1000), (900, 1600), (1234, 567)):
        width, height = buckets.nearest_bucket(*size, choices)
        assert abs(np.log(width / height / (size[0] / size[1]))) < 0.03


def test_a_frame_knows_what_it_keeps_and_enlarges():
    half = buckets.frame((200, 100), (64, 64))
    assert half.scaled == (128, 64) and half.box == (32, 0, 96, 64) and half.kept == 0.5
    assert not half.enlarged and not buckets.frame((64, 64), (64, 64)).enlarged
    assert buckets.frame((63, 64), (64, 64)).enlarged and buckets.frame((64, 63), (64, 64)).enlarged
    for size, target in (((8, 1000), (8, 1008)), ((1000, 8), (1008, 8))):  # 8.06 pixels of the other side are still 8
        assert buckets.frame(size, target).scaled == target and buckets.frame(size, target).enlarged
    tall = buckets.frame((100, 200), (64, 64))
    assert tall.scaled == (64, 128) and tall.box == (0, 32, 64, 96)
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


def _kohyas_sizes(resolution, least, most, step):
    """sd-scripts' make_bucket_resolutions, written out: every width between the sides, with the height that the area
    and the sides leave.
    """
    area = resolution[0] * resolution[1]
    square = int(area**0.5 // step) * step
    sizes = {(square, square)}
    width = least
    while width <= most:
        height = min(most, int((area // width) // step) * step)
        if height >= least:
            sizes.add((width, height))
            sizes.add((height, width))
        width += step
    return sorted(sizes)


@pytest.mark.parametrize(
    ("resolution", "step", "least", "most"),
    [(1024, 64, 256, 2048), (512, 64, 256, 1024), (768, 32, 96, 4096), (1024, 64, 1024, 1024), (1000, 64, 128, 960)],
)
def test_buckets_between_two_sides_are_kohyas(resolution, step, least, most):
    found = buckets.bucket_sizes((resolution, resolution), step, least, most)
    assert found == _kohyas_sizes((resolution, resolution), least, most, step)
    assert all(least <= side <= most for size in found for side in size)


@pytest.mark.parametrize(
    ("resolution", "step"), [((512, 768), 64), ((768, 512), 64), ((960, 544), 16), ((640, 360), 8)]
)
def test_of_a_width_and_a_height_the_area_counts(resolution, step):
    assert buckets.bucket_sizes(resolution, step, 256, 1024) == _kohyas_sizes(resolution, 256, 1024, step)
    sizes = buckets.bucket_sizes(resolution, step)
    area = resolution[0] * resolution[1]
    assert all(width * height <= area < width * (height + step) for width, height in sizes if width > height)
    assert {resolution, resolution[::-1]} <= set(sizes) and max(width for width, _ in sizes) <= 2 * area**0.5
    with pytest.raises(ValueError, match=r"resolution is 64 x 128, expected at least bucket step \(128\)"):
        buckets.bucket_sizes((64, 128), 128)


def test_one_side_alone_leaves_the_other_to_the_area():
    assert buckets.bucket_sizes((1024, 1024), 64, 256) == _kohyas_sizes((1024, 1024), 256, 4096, 64)
    assert (4096, 256) in buckets.bucket_sizes((1024, 1024), 64, 256)  # 16:1, beyond 4:1
    assert buckets.bucket_sizes((1024, 1024), 64, 0, 2048) == _kohyas_sizes((1024, 1024), 64, 2048, 64)
    assert max(max(size) for size in buckets.bucket_sizes((8192, 8192), 8, 16)) == buckets.LONGEST_SIDE


@pytest.mark.parametrize(
    ("least", "most", "message"),
    [
        (100, 0, r"minimum bucket side is 100, expected a multiple of bucket step \(64\)"),
        (0, 1000, r"maximum bucket side is 1000, expected a multiple of bucket step \(64\)"),
        (576, 0, "minimum bucket side is 576, expected at most 512, the square bucket"),
        (0, 448, "maximum bucket side is 448, expected at least 512, the square bucket"),
    ],
)
def test_sides_that_fit_no_square_or_no_step_are_refused(least, most, message):
    with pytest.raises(ValueError, match=message):
        buckets.bucket_sizes((512, 512), 64, least, most)


def _kohyas_bucket(width, height, resolution, step):
    """sd-scripts' BucketManager.select_bucket with no_upscale, written out: (bucket, size before the crop)."""

    def rounded(x):
        x = int(x + 0.5)
        return x - x % step

    most, aspect = resolution[0] * resolution[1], width / height
    size = (width, height)
    if width * height > most:
        wide = float(np.sqrt(np.float64(most) * aspect))
        high = most / wide
        by_width = rounded(wide)
        aspect_by_width = by_width / rounded(by_width / aspect)
        by_height = rounded(high)
        aspect_by_height = rounded(by_height * aspect) / by_height
        if abs(aspect_by_width - aspect) < abs(aspect_by_height - aspect):
            size = (by_width, int(by_width / aspect + 0.5))
        else:
            size = (int(by_height * aspect + 0.5), by_height)
    return (size[0] - size[0] % step, size[1] - size[1] % step), size


@pytest.mark.parametrize(
    ("resolution", "step"),
    [((512, 512), 64), ((1024, 1024), 64), ((768, 768), 32), ((1000, 1000), 8), ((960, 544), 16)],
)
def test_buckets_without_upscale_are_kohyas(resolution, step):
    rng = np.random.default_rng(resolution[0] + step)
    for width, height in rng.integers(step * 2, 3 * resolution[0], (400, 2)).tolist():
        bucket, scaled = buckets.shrunk_bucket((width, height), resolution, step)
        assert (bucket, scaled) == _kohyas_bucket(width, height, resolution, step), (width, height)
        framing = buckets.frame((width, height), bucket, (0.5, 0.5), scaled)
        assert not framing.enlarged and framing.scaled == scaled and framing.target == bucket
        assert framing.left == (scaled[0] - bucket[0]) // 2 and framing.box[2] <= scaled[0]
        assert framing.box[3] <= scaled[1]


@pytest.mark.parametrize("size", [(63, 400), (40_000, 63), (100_000, 70)])
def test_an_image_too_narrow_for_a_bucket_is_refused(size):
    with pytest.raises(ValueError, match=rf"it is {size[0]} x {size[1]} pixels, .* lower bucket step"):
        buckets.shrunk_bucket(size, (512, 512), 64)
