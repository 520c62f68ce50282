"""The YAML of filters: every key read, every wrong one said at once, nothing but plain data loaded."""

import dataclasses
import re

import pytest
from graft_nodes.training.data.filters import Filters

LUNNOVA = """
consider_every_nth: 8
shuffle_tag_p: 0.5
blacklist_tags:
- animated
- machine learning generated
non_caption_tags:
- high res
replacements:
  princess cadance: cadance
  'artist:': 'by='
  ':': '='
  ' ': '_'
tag_separator: ' '
abs_min_score: 50
min_score: 200
score_tags: [ 3200, 1600, 800, 600, 400, 300, 200, 150, 100, 50, 25, 5 ]
tag_bonus_scores:
  solo: 100
  pride flag: 50
  monochrome: -75
"""


def test_lunnovas_own_configuration():
    found = Filters.parse(LUNNOVA)
    assert found.consider_every_nth == 8 and found.shuffle_tag_p == 0.5 and found.tag_separator == " "
    assert found.blacklist_tags == ("animated", "machine learning generated") and found.non_caption_tags == (
        "high res",
    )
    assert found.replacements == (("princess cadance", "cadance"), ("artist:", "by="), (":", "="), (" ", "_"))
    assert (found.abs_min_score, found.min_score) == (50, 200) and found.score_tags[0] == 3200
    assert found.tag_bonus_scores == (("solo", 100), ("pride flag", 50), ("monochrome", -75)) and found.needs_scores


def test_nothing_is_the_defaults():
    assert Filters.parse("") == Filters.parse("  # a remark\n") == Filters()


@pytest.mark.parametrize(
    ("score", "tags", "reason"),
    [
        (49, ["solo"], "below abs_min_score"),
        (100, ["solo"], None),
        (99, ["solo"], "below min_score"),
        (50, ["solo", "pride flag"], None),
        (199, [], "below min_score"),
        (200, ["monochrome"], "below min_score"),
        (275, ["monochrome"], None),
        (150, ["solo", "pride flag", "monochrome"], None),
        (1000, ["animated"], "with a tag of blacklist_tags"),
        (None, [], "without a score"),
    ],
)
def test_which_pictures_are_taken(score, tags, reason):
    # 100 + 100 = 200, 99 + 100 < 200, 200 - 75 < 200, 275 - 75 = 200, 150 + 100 + 50 - 75 = 225
    settings = Filters.parse(LUNNOVA)
    assert settings.reason_to_skip(tags, score) == reason


def test_the_highest_score_that_is_reached_becomes_a_tag():
    settings = Filters.parse("score_tags: [5, 3200, 800]")
    found = [settings.score_tag(score) for score in (4, 5, 799, 800, 99999, None)]
    assert found == [(), ("scr5",), ("scr5",), ("scr800",), ("scr3200",), ()]


def test_everything_wrong_is_said_at_once():
    text = (
        "min_scor: 3\nflip: 1\ncrop: middle\nshuffle_tag_p: 2\nconsider_every_nth: 0\nreplacements: [a]\nwildcards: 1\n"
    )
    text += "encoding: klingon\n"
    with pytest.raises(ValueError) as caught:
        Filters.parse(text)
    said = str(caught.value)
    assert "unknown key 'min_scor', did you mean min_score?" in said and "unknown key 'flip'" in said
    assert (
        "crop is 'middle', expected one of center, top, random" in said
        and "shuffle_tag_p is 2, expected a number from 0 to 1" in said
    )
    assert "consider_every_nth is 0, expected a whole number, 1 or more" in said and "replacements is ['a']" in said
    assert "wildcards is 1, expected true or false" in said and "encoding is 'klingon'" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1", "the text is not YAML"),
        ("- a", "the text is YAML of a list"),
        ("just words", "the text is YAML of a str"),
        ("x: !!python/object/apply:os.system ['true']", "the text is not YAML"),
        ("crops: 3", "crops has no effect without crop: random"),
        ("cache: false\ncache_gb: 3", "cache_gb has no effect with cache: false"),
        ("tag_bonus_scores: {a: 1}", "tag_bonus_scores has no effect without min_score"),
        ("min_score: .nan", "min_score is nan"),
        ("cache_gb: .inf", "cache_gb is inf"),
        ("replacements: {'': x}", "not an empty text"),
    ],
)
def test_what_cannot_be(text, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        Filters.parse(text)


def test_a_bare_off_is_off():
    assert Filters.parse("masks: off").masks == "off" and Filters.parse("cache: off").cache is False


def test_defaults_stay():
    """A stored workflow names only what differs from them."""
    assert dataclasses.asdict(Filters()) == {
        "consider_every_nth": 1,
        "shuffle_tag_p": None,
        "blacklist_tags": (),
        "non_caption_tags": (),
        "replacements": (),
        "tag_separator": ", ",
        "abs_min_score": None,
        "min_score": None,
        "score_tags": (),
        "tag_bonus_scores": (),
        "wildcards": False,
        "keep_separator": "",
        "trigger": "",
        "caption_prefix": "",
        "caption_suffix": "",
        "encoding": "utf-8",
        "resolutions": (),
        "crop": "center",
        "crops": 4,
        "frame_sample": 4,
        "frame_stride": 10,
        "size_conditioning": True,
        "masks": "files",
        "small": "enlarge",
        "changed": "continue",
        "cache": True,
        "cache_gb": 20.0,
        "write_schedule": False,
        "workers": 0,
        "leave_out": (),
        "size": None,
        "flip_p": None,
        "validation": None,
    }


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("crop", ("center", "top", "random")),
        ("masks", ("files", "alpha", "both", "off")),
        ("small", ("enlarge", "skip")),
        ("changed", ("continue", "stop")),
    ],
)
def test_every_option_is_taken(key, options):
    assert tuple(getattr(Filters.parse(f"{key}: {option}"), key) for option in options) == options


@pytest.mark.parametrize(
    ("within", "beyond"),
    [
        ("consider_every_nth: 1", "consider_every_nth: 0"),
        ("shuffle_tag_p: 0", "shuffle_tag_p: -0.01"),
        ("shuffle_tag_p: 1", "shuffle_tag_p: 1.01"),
        ("crop: random\ncrops: 2", "crop: random\ncrops: 1"),
        ("crop: random\ncrops: 1000", "crop: random\ncrops: 1001"),
        ("resolutions: [64, 8192]", "resolutions: [63]"),
        ("resolutions: [8192]", "resolutions: [8193]"),
        ("cache_gb: 0.001", "cache_gb: 0.0009"),
        ("workers: 0", "workers: -1"),
        ("workers: 64", "workers: 65"),
        ("workers: 64", "workers: 1000000000"),
    ],
)
def test_bounds(within, beyond):
    key = within.splitlines()[-1].partition(":")[0]
    assert Filters.parse(within)
    with pytest.raises(ValueError, match=f"{key} is .*, expected "):
        Filters.parse(beyond)


@pytest.mark.parametrize("text", ["abs_min_score: 1", "min_score: 1", "score_tags: [5]"])
def test_scores_are_needed_where_a_filter_reads_them(text):
    assert Filters.parse(text).needs_scores and not Filters().needs_scores
    assert Filters.parse(text).reason_to_skip([], None) == "without a score"
