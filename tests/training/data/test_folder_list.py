"""Counts the pictures of every folder by their names: what a dataset would find there."""

import os
import sys

import pytest
from graft_nodes.training.data.folder_list import file_names, picture_folders
from graft_nodes.training.data.images import find_images


def touch(root, *names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")


def test_counts_are_those_that_a_dataset_finds(tmp_path):
    touch(tmp_path, "cat/10_a/1.png", "cat/10_a/2.JPG", "cat/10_a/1.txt", "cat/3.webp", "cat/3.mask.png")
    touch(tmp_path, "cat/@eaDir/3.png/t.jpg", "cat/__MACOSX/3.png", "cat/3-masklabel.png", "cat/Masks/3.png")
    touch(tmp_path, "cat/masks/3.png", "cat/.hidden/4.png", "loose.png", "texts/captions/1.txt", "deep/er/still/1.gif")
    (tmp_path / "nothing").mkdir()
    found = picture_folders(str(tmp_path))
    assert not found.cut
    assert found.counts == {
        "cat": 3,
        "cat/10_a": 2,
        "deep": 1,
        "deep/er": 1,
        "deep/er/still": 1,
        "nothing": 0,
        "texts": 0,
    }
    for name, count in found.counts.items():
        assert count == len(find_images(tmp_path / name))


def test_clips_and_folders_of_frames_count_as_one_each(tmp_path):
    touch(
        tmp_path, "cat/1.mp4", "cat/2.MKV", "cat/3.png", "cat/4.avi", "cat/walk.frames/1.png", "cat/walk.frames/2.png"
    )
    assert picture_folders(str(tmp_path)).counts == {"cat": 4}


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
def test_linked_folders_and_links_to_nothing_do_not_count(tmp_path):
    touch(tmp_path, "input/a/1.png", "outside/2.png")
    os.symlink(tmp_path / "outside", tmp_path / "input" / "linked")
    os.symlink(tmp_path / "input", tmp_path / "input" / "a" / "round")
    os.symlink(tmp_path / "none.png", tmp_path / "input" / "a" / "gone.png")
    assert picture_folders(str(tmp_path / "input")).counts == {"a": 1}


def test_the_limits_end_it_and_it_says_so(tmp_path):
    touch(tmp_path, *(f"{folder}/{number}.png" for folder in "abc" for number in range(10)))
    assert not picture_folders(str(tmp_path), most_entries=33).cut
    few = picture_folders(str(tmp_path), most_entries=12)
    assert few.cut and sum(few.counts.values()) < 12
    assert picture_folders(str(tmp_path), seconds=-1.0).cut
    assert picture_folders(str(tmp_path / "none")).counts == {}


def test_names_of_files_that_are_there(tmp_path):
    touch(tmp_path, "a/1.png", "a/1.txt", "b.png", ".c/d")
    assert file_names(str(tmp_path), 10) == [".c/d", "a/1.png", "a/1.txt", "b.png"]
    assert file_names(str(tmp_path), 3) is None


def test_a_folder_that_stays_is_not_read_again_and_one_that_changes_is(tmp_path, monkeypatch):
    touch(tmp_path, "a/1.png", "b/c/2.png")
    long_ago = 1_700_000_000
    for name in ("a", "b", "b/c", "."):
        os.utime(tmp_path / name, (long_ago, long_ago))
    first = picture_folders(str(tmp_path)).counts
    read = []
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder: read.append(folder) or scan(folder))
    assert picture_folders(str(tmp_path)).counts == first and read == []
    touch(tmp_path, "b/c/3.png")
    for _ in range(2):  # it has just changed, so it is read until it is left alone
        assert picture_folders(str(tmp_path)).counts == {"a": 1, "b": 2, "b/c": 2}
    assert read == [str(tmp_path / "b/c")] * 2
