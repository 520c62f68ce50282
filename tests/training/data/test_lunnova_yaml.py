"""LunNova's configuration as it is printed: `train` and `validation` with target and params."""

from dataclasses import replace
from pathlib import Path

import pytest
from graft_nodes.training.data.filters import Filters
from graft_nodes.training.data.folder_settings import FolderSettings

PRINTED = (Path(__file__).parent / "samples" / "lunnova.yaml").read_text(encoding="utf-8")


def test_what_is_printed_is_read_as_it_stands():
    found = Filters.parse(PRINTED)
    assert (found.size, found.flip_p, found.consider_every_nth, found.shuffle_tag_p) == (64, 0.333, 1, 0.5)
    assert found.blacklist_tags == ("animated", "machine learning generated")
    assert found.replacements == (("princess cadance", "cadance"), ("artist:", "by="), (":", "="), (" ", "_"))
    assert found.score_tags[:2] == (3200, 1600) and found.tag_bonus_scores[-1] == ("monochrome", -75)
    assert replace(found.validation, consider_every_nth=1, flip_p=0.333) == replace(found, validation=None)
    assert found.validation.consider_every_nth == 4


def test_flat_files_have_params_alone():
    found = Filters.parse("train: {target: lun.data.local.Local, params: {size: 512, flip_p: 0.333, mode: train}}")
    assert found == Filters(size=512, flip_p=0.333)


def test_its_size_and_flips_count_before_the_nodes():
    settings = FolderSettings(resolution=512, flip=0.0, filters=PRINTED)
    assert (settings.resolution, settings.flip) == (64, 0.333)
    assert FolderSettings(resolution=512, flip=0.1, filters="min_score: 3").flip == 0.1


def test_validation_takes_the_filters_of_training_but_for_its_own():
    found = Filters.parse(
        "non_caption_tags: [high res]\nmin_score: 5\nvalidation: {consider_every_nth: 8, min_score: 9}"
    )
    assert found.validation == Filters(consider_every_nth=8, non_caption_tags=("high res",), min_score=9)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("train: 3", r"train is 3, expected params, as in LunNova's configuration"),
        ("train: {params: {sizes: 512}}", r"train: unknown key 'sizes', did you mean size\?"),
        ("train: {params: {metadata_params: 5}}", "train: metadata_params is 5, expected lines of the form key: value"),
        ("train: {params: {}}\nmin_score: 3", r"min_score stands beside train: put it into its metadata_params"),
        ("train: {params: {size: 63}}", "size is 63, expected a whole number from 64 to 8192"),
        ("validation: 3", "validation is 3, expected lines of the form key: value"),
        ("validation: {validation: {crop: top}}", "expected no validation inside of it"),
        (
            "validation: {crop: up}",
            r"validation is \{'crop': 'up'\}, expected filters: crop is 'up', expected one of center, top, random",
        ),
        ("validation: {params: {size: 512}}", "validation is .*, expected filters: unknown key 'params'"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(text, error):
    with pytest.raises(ValueError, match=error):
        Filters.parse(text)
