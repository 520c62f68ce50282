"""kohya's words about a dataset, counted by hand: directories, tags, buckets, batches and epochs."""

import json

import pytest
import torch
from graft_nodes.training.data import encoding, kohya_metadata
from graft_nodes.training.data.dataset import Conditioning
from graft_nodes.training.data.filters import Filters
from graft_nodes.training.data.folder_reader import read_folder
from graft_nodes.training.data.folder_settings import FolderSettings

from .making_pictures import write_picture


def _picture(path, size, seed, caption):
    write_picture(path, size, seed)
    path.with_suffix(".txt").write_text(caption, encoding="utf-8")


def _dataset(folder, regularization=None, **settings):
    listing = read_folder(
        folder, FolderSettings(**{"resolution": 64, "bucket_step": 16, "validation": 0.0, **settings})
    )

    def pixels(given):
        return given.movedim(-1, 1)[:, :, ::8, ::8]

    def captions(texts):
        return {text: Conditioning(torch.zeros(1, 1, 1)) for text in texts}

    share = {} if regularization is None else {"regularization": regularization, "regularization_share": 0.25}
    return encoding.encode(listing, pixels, captions, ("v", "c"), caption_dropout=0.1, clip_skip=2, **share)[0]


@pytest.fixture
def folder(tmp_path):
    for number in range(3):
        _picture(tmp_path / "data" / "10_cat" / f"{number}.png", (64, 64), number, f"Cat, sitting, tag {number}")
    _picture(tmp_path / "data" / "plain" / "a.png", (96, 48), 9, "cat, Dog")
    for number in range(2):
        _picture(tmp_path / "regular" / "1_animal" / f"{number}.png", (48, 96), 20 + number, "animal")
    return tmp_path


def test_a_folder_with_repeats_and_regularization(folder):
    data = _dataset(
        folder / "data",
        _dataset(folder / "regular"),
        flip=0.5,
        shuffle_tags=True,
        keep_tags=1,
        filters=Filters(crop="random"),
    )
    said = kohya_metadata.training_metadata(data, batch_size=4, accumulation=2, total_steps=50, dropout=0.2)
    assert all(isinstance(value, str) for value in said.values())
    assert json.loads(said["ss_dataset_dirs"]) == {
        "10_cat": {"n_repeats": 10, "img_count": 3},
        "plain": {"n_repeats": 1, "img_count": 1},
    }
    assert json.loads(said["ss_reg_dataset_dirs"]) == {"1_animal": {"n_repeats": 1, "img_count": 2}}
    assert json.loads(said["ss_tag_frequency"]) == {
        "10_cat": {"cat": 3, "sitting": 3, "tag 0": 1, "tag 1": 1, "tag 2": 1},
        "plain": {"cat": 1, "dog": 1},
        "1_animal": {"animal": 2},
    }
    buckets = json.loads(said["ss_bucket_info"])
    assert buckets["buckets"] == {
        "0": {"resolution": [48, 80], "count": 2},
        "1": {"resolution": [64, 64], "count": 30},
        "2": {"resolution": [80, 48], "count": 1},
    }
    assert (said["ss_num_train_images"], said["ss_num_reg_images"]) == ("31", "2")
    # a quarter of each batch is regularization: 3 of 31 pictures a batch, buckets by themselves: 10 + 1; steps are two
    # batches
    assert said["ss_num_batches_per_epoch"] == "11" and said["ss_num_epochs"] == "10"  # ceil(2 * 50 / 11)
    assert (
        said["ss_caption_dropout_rate"] == "0.28"
        and said["ss_resolution"] == "(64, 64)"
        and said["ss_clip_skip"] == "2"
    )
    flags = (
        "ss_flip_aug",
        "ss_random_crop",
        "ss_shuffle_caption",
        "ss_enable_bucket",
        "ss_keep_tokens",
        "ss_batch_size_per_device",
    )
    assert [said[name] for name in flags] == ["True", "True", "True", "True", "1", "4"]


def test_buckets_are_counted_and_held_out_pictures_are_not(folder):
    data = _dataset(folder / "data", validation=0.25)
    (held,) = data.held_out
    said = kohya_metadata.training_metadata(data, 1, 1, 10, 0.0)
    repeats = 31 - (1 if held.name.startswith("plain") else 10)
    assert said["ss_num_train_images"] == str(repeats)
    assert sum(row["count"] for row in json.loads(said["ss_bucket_info"])["buckets"].values()) == repeats
    assert sum(row["img_count"] for row in json.loads(said["ss_dataset_dirs"]).values()) == 3
    squares = kohya_metadata.training_metadata(_dataset(folder / "data", buckets=False), 1, 1, 10, 0.0)
    assert json.loads(squares["ss_bucket_info"]) is None


def test_the_error_of_aspect_ratios_is_kohyas(folder):
    data = _dataset(folder / "data")
    info = json.loads(kohya_metadata.training_metadata(data, 1, 1, 10, 0.0)["ss_bucket_info"])
    (wide,) = ((w, h) for w, h in (row["resolution"] for row in info["buckets"].values()) if w != h)
    assert info["mean_img_ar_error"] == pytest.approx(abs(wide[0] / wide[1] - 96 / 48) / 4)


def test_latents_in_memory_have_their_counts_alone(lab):
    said = kohya_metadata.training_metadata(lab.pictures(10), 4, 1, 9, 0.0)
    assert (
        said["ss_num_train_images"] == "10" and said["ss_num_batches_per_epoch"] == "3" and said["ss_num_epochs"] == "3"
    )
    assert "ss_bucket_info" not in said and "ss_dataset_dirs" not in said


def test_a_trigger_is_said_as_modelspec_says_it(folder):
    data = _dataset(folder / "data", filters=Filters(trigger="zorp"))
    assert kohya_metadata.training_metadata(data, 1, 1, 10, 0.0)["modelspec.trigger_phrase"] == "zorp"
    assert "modelspec.trigger_phrase" not in kohya_metadata.training_metadata(_dataset(folder / "data"), 1, 1, 10, 0.0)


def test_the_tags_of_the_subject_stay_where_a_regularization_folder_has_its_name(tmp_path):
    for place, text in (("subject", "zorp, red circle"), ("others", "person, blue square")):
        for number in range(2):
            path = write_picture(tmp_path / place / "images" / f"{number}.png", seed=number)
            path.with_suffix(".txt").write_text(text, encoding="utf-8")
    others = _dataset(tmp_path / "others" / "images")
    data = _dataset(tmp_path / "subject" / "images", regularization=others)
    said = kohya_metadata.training_metadata(data, 2, 1, 10, 0.0)
    assert json.loads(said["ss_tag_frequency"]) == {"images": {"zorp": 2, "red circle": 2}}


@pytest.mark.parametrize(
    ("steps", "batches", "accumulation", "epochs"),
    [(6, 3, 2, 4), (1, 3, 2, 1), (2, 3, 2, 2), (10, 3, 1, 4), (5, 2, 4, 10), (0, 3, 2, 0), (3, 3, 1, 1)],
)
def test_epochs_are_counted_by_the_batches_that_were_drawn(steps, batches, accumulation, epochs):
    drawn = [number // batches for number in range(steps * accumulation)]
    assert kohya_metadata.epoch_of(steps, batches, accumulation) == len(set(drawn)) == epochs
