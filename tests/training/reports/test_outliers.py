"""What stands out among pictures: planted ones are named with their reason, and no others."""

import math
from types import SimpleNamespace

import pytest
from graft_nodes.training.reports import outliers
from graft_nodes.training.run.picture_losses import PictureLoss

USUAL = [0.101, 0.11, 0.095, 0.12, 0.105, 0.09, 0.115, 0.1]


def losses(after, bare=None, hashes=()):
    """Losses by name: p0, p1 …"""
    found = {}
    for number, loss in enumerate(after):
        image = SimpleNamespace(name=f"p{number}", sha256=hashes[number] if hashes else f"{number}")
        found[image.name] = PictureLoss(image, False, 2 * loss, loss, bare[number] if bare else None)
    return found


def test_pictures_that_are_alike_have_no_outlier():
    assert outliers.outliers(losses(USUAL)) == {}
    assert outliers.outliers(losses([0.1] * 8)) == {}, "all equal"


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (0.4, outliers.FAR_ABOVE),
        (0.02, outliers.FAR_BELOW),
        (math.nan, outliers.NOT_FINITE),
        (math.inf, outliers.NOT_FINITE),
    ],
)
def test_one_far_from_the_others_is_named(loss, reason):
    assert outliers.outliers(losses([*USUAL, loss])) == {"p8": [reason]}


def test_a_caption_that_helps_far_less_is_named():
    bare = [loss * share for loss, share in zip(USUAL, [1.2, 1.25, 1.22, 1.3, 1.24, 1.2, 1.28, 0.9], strict=True)]
    assert outliers.outliers(losses(USUAL, bare)) == {"p7": [outliers.NO_HELP]}


def test_copies_name_each_other():
    found = outliers.outliers(losses(USUAL, hashes=["x", *"abcde", "x", "f"]))
    assert found == {"p0": ["the same file as p6"], "p6": ["the same file as p0"]}


def test_a_few_pictures_are_not_compared_and_the_report_says_so():
    few = losses([0.1, 0.11, 0.1, 5.0])
    assert outliers.outliers(few) == {}
    assert "fewer than 5 pictures cannot tell which stands out" in outliers.describe(few, 3)


def test_the_score_is_the_deviation_in_those_of_a_normal_distribution():
    scores = outliers.far_scores({"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0, "e": 10.0})
    assert scores == pytest.approx({"a": -1.349, "b": -0.6745, "c": 0.0, "d": 0.6745, "e": 4.7215})


def test_the_report_has_the_means_the_highest_and_what_stands_out():
    found = losses([0.4, *USUAL])
    text = outliers.describe(found, 20)
    assert text.startswith("9 pictures at step 20, all at the same noise levels and with the same noise")
    assert f"mean of 9 to train on: {2 * sum([0.4, *USUAL]) / 9:.4g} before training" in text
    assert "  p0: 0.8, 0.4\n" in text and f"p0: {outliers.FAR_ABOVE}" in text
