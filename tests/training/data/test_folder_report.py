"""What several folders of one dataset say together, in the report and to the editor."""

import json

import pytest
from graft_nodes.training.data.folder_reader import read_folder
from graft_nodes.training.data.folder_report import ReadFolders, report
from graft_nodes.training.data.folder_settings import FolderSettings, FolderSource

from .making_pictures import write_picture


@pytest.fixture
def folders(tmp_path):
    """Two small pictures to train on, and three larger ones for validation."""
    read = []
    for name, count, side, more in (("low", 2, 64, {}), ("high", 3, 96, {"is_validation": True})):
        for number in range(count):
            write_picture(tmp_path / name / f"{number}.png", (side, side), seed=side + number)
        settings = FolderSettings(resolution=side, bucket_step=32, validation=0.0, batch_size=2 * (name == "low"))
        read.append(
            (f"all/{name}", FolderSource(tmp_path / name, settings, **more), read_folder(tmp_path / name, settings))
        )
    return ReadFolders(read)


def test_the_editor_gets_all_folders_as_one(folders):
    data = json.loads(json.dumps(folders.editor_data("the report")))
    plain = {name: data[name] for name in ("version", "folder", "resolution", "count", "train", "held_out", "report")}
    assert plain == {
        "version": 1,
        "folder": ".",
        "resolution": 96,
        "count": 5,
        "train": 2,
        "held_out": 3,
        "report": "the report",
    }
    assert [(row["width"], row["train"], row["held_out"]) for row in data["buckets"]] == [(64, 2, 0), (96, 0, 3)]
    names = [row["name"] for row in data["pictures"]]
    assert names == ["all/low/0.png", "all/low/1.png", "all/high/0.png", "all/high/1.png", "all/high/2.png"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "captions: 2 found, 2 different"),
        ({"shuffle_tags": True}, "captions: 2 found, 2 different, 2 vary by draw"),
        ({"shuffle_tags": True, "keep_tags": 3}, "captions: 2 found, 2 different, 1 vary by draw"),
    ],
)
def test_captions_that_vary_are_counted(tmp_path, settings, said):
    for number, caption in enumerate(("a, b, c", "a, b, c, d, e")):
        path = write_picture(tmp_path / f"{number}.png", seed=number)
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")
    listing = read_folder(tmp_path, FolderSettings(resolution=64, bucket_step=32, validation=0.0, **settings))
    assert said in report(listing).splitlines()


def test_one_folder_is_named_by_its_path(folders):
    data = ReadFolders(folders.folders[:1]).editor_data("")
    assert (data["folder"], data["count"], data["pictures"][0]["name"]) == ("all/low", 2, "0.png")


def test_the_report_says_what_each_folder_is_for(folders):
    lines = folders.lines(None, 0.0)
    assert lines[0] == "all/low (resolution 64, batch size 2):"
    assert "all/high (resolution 96, validation):" in lines
    assert lines[1].startswith("  2 pictures: 2 to train on, 0 held out")
    assert lines[lines.index("all/high (resolution 96, validation):") + 1].startswith(
        "  3 pictures: 0 to train on, 3 held"
    )
