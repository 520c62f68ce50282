"""The settings of a dataset folder: their bounds, and that everything wrong is said at once."""

import pytest
from graft_nodes.training.data.filters import Filters
from graft_nodes.training.data.folder_settings import FolderSettings, read_settings


@pytest.mark.parametrize(
    ("name", "label", "within", "beyond"),
    [
        ("repeats", "repeats", (1,), (0,)),
        ("keep_tags", "keep first tags", (0,), (-1,)),
        ("flip", "flip probability", (0.0, 1.0), (-0.01, 1.01)),
        ("tag_dropout", "tag dropout", (0.0, 1.0), (-0.01, 1.01)),
        ("validation", "validation split", (0.0, 0.9), (-0.01, 1.0)),
    ],
)
def test_bounds(name, label, within, beyond):
    for value in within:
        assert getattr(FolderSettings(**{name: value}), name) == value
    for value in beyond:
        with pytest.raises(ValueError, match=f"^Dataset: {label} is {value}, expected "):
            FolderSettings(**{name: value})


@pytest.mark.parametrize(
    ("frame_step", "taken"), [({}, [15, 16, 17]), ({"frame_step": 0}, [15, 16, 17]), ({"frame_step": 4}, [13, 17])]
)
def test_numbers_of_frames_are_those_that_a_vae_takes(frame_step, taken):
    """Until the VAE is known every number is."""
    assert FolderSettings(frames="17, 15, 16", **frame_step).frame_counts == taken


def test_resolutions_fit_the_buckets():
    filters = Filters(resolutions=(64, 96, 64))
    assert FolderSettings(resolution=96, filters=filters).resolutions == ((96, 96), (64, 64))
    assert FolderSettings(resolution=72, buckets=False, bucket_step=8).bucket_choices() == [[(72, 72)]]
    assert len(FolderSettings(resolution=256, filters=filters, bucket_step=32).bucket_choices()) == 3
    with pytest.raises(ValueError, match="resolution is 68, expected a multiple of 8"):
        FolderSettings(resolution=68, buckets=False, bucket_step=8)
    assert FolderSettings(resolution=68, bucket_step=8).bucket_choices()
    large_step = {"resolution": 64, "bucket_step": 72}
    for wrong, says in ((large_step, "at least bucket step"), ({"bucket_step": 12}, "a multiple of 8 pixels")):
        with pytest.raises(ValueError, match=says):
            FolderSettings(**wrong)


def test_shuffling_is_set_in_one_place():
    assert FolderSettings(shuffle_tags=True).shuffle_tags and FolderSettings(filters=Filters(shuffle_tag_p=0.5))
    with pytest.raises(ValueError, match="shuffle tags shuffles always and shuffle_tag_p of filters now and then"):
        FolderSettings(shuffle_tags=True, filters=Filters(shuffle_tag_p=0.5))


def test_scores_need_a_layout_that_reads_them():
    with pytest.raises(ValueError, match="need scores from JSON files; caption source txt reads none"):
        FolderSettings(captions="txt", filters=Filters(min_score=1.0))
    for source in ("auto", "json"):
        assert FolderSettings(captions=source, filters=Filters(min_score=1.0))


def test_an_unknown_caption_source_is_refused_with_those_there_are():
    for settings in ({}, {"repeats": 0}):
        with pytest.raises(
            ValueError, match=r"caption source is 'scroll', expected one of auto, txt, .*json"
        ) as caught:
            FolderSettings(captions="scroll", **settings)
        assert ("repeats is 0" in str(caught.value)) == bool(settings)


def test_everything_wrong_is_said_at_once():
    with pytest.raises(ValueError) as caught:
        FolderSettings(filters="crop: middle", repeats=0, flip=2.0)
    said = str(caught.value)
    assert said.startswith("Dataset: repeats is 0, expected from 1 to 10000; flip probability is 2.0, expected from 0")
    assert "; filters (YAML): crop is 'middle'" in said and said.count("Dataset") == 1
    assert FolderSettings(filters="crop: top", repeats=3) == FolderSettings(repeats=3, filters=Filters(crop="top"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"no_upscale": True, "buckets": False}, "no upscale has no effect without aspect ratio buckets"),
        ({"min_side": 256, "buckets": False}, "minimum and maximum bucket side have no effect without"),
        ({"max_side": 1024, "no_upscale": True}, "minimum and maximum bucket side have no effect with no upscale"),
        ({"min_side": 512, "max_side": 256}, r"minimum bucket side is 512, larger than maximum bucket side \(256\)"),
        ({"max_side": 16448}, "maximum bucket side is 16448, expected from 0 to 16384"),
        ({"min_side": -8}, "minimum bucket side is -8, expected from 0 to 16384"),
        (
            {"no_upscale": True, "filters": Filters(small="skip")},
            "small: skip of filters has no effect with no upscale",
        ),
    ],
)
def test_bucket_settings_that_would_do_nothing_are_refused(given, message):
    with pytest.raises(ValueError, match=f"^Dataset: .*{message}"):
        FolderSettings(**given)


def test_the_longest_side_of_a_bucket_is_a_setting():
    assert FolderSettings(max_side=16384).max_side == 16384


def test_sides_of_buckets_go_for_every_resolution():
    wide = FolderSettings(resolution=512, min_side=128, max_side=2048, filters=Filters(resolutions=(1024,)))
    assert [max(max(size) for size in choices) for choices in wide.bucket_choices()] == [2048, 2048]
    with pytest.raises(ValueError, match="maximum bucket side is 768, expected at least 1024"):
        FolderSettings(resolution=512, max_side=768, filters=Filters(resolutions=(1024,)))


def test_settings_as_the_editor_sends_them():
    sent = {"resolution": 64, "flip": 0, "captions": "txt", "filters": "crop: top", "vae": ["1", 2], "folder": "x"}
    settings = read_settings(sent)
    assert settings == FolderSettings("x", 64, flip=0.0, captions="txt", filters=Filters.parse("crop: top"))
    assert read_settings({}) == FolderSettings()
    with pytest.raises(ValueError) as refused:
        read_settings({"resolution": "64", "buckets": 1, "flip": [0], "captions": None, "filters": "crops: 3"})
    for part in (
        "resolution is '64', expected a whole number",
        "aspect ratio buckets is 1, expected true or false",
        "flip probability is [0], expected a number",
        "caption source is None, expected text",
        "crops",
    ):
        assert part in str(refused.value)
