"""Pairs that a person marks: read as preference pairs, never in place of another picture, and whole after any fault."""

import errno

import pytest
from graft_nodes.tests.faults.disk import Disk, fails
from graft_nodes.training.data.marked_pairs import PairChangedError, keep_pair
from graft_nodes.training.data.preference_files import find_preferences

ONE, OTHER = b"one picture", b"another picture"


def _files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


def _pairs(folder):
    found = find_preferences(sorted(folder.glob("*.jpg")))
    return [(better.read_bytes(), worse.read_bytes()) for better, worse in found.worse.items()]


def test_a_mark_is_a_pair_with_its_caption_and_the_other_way_round_replaces_it(tmp_path):
    folder = tmp_path / "new" / "run"
    first = keep_pair(folder, "steps-5-10", ONE, OTHER, "a zörp")
    assert _pairs(folder) == [(ONE, OTHER)] and first.pairs == 1 and first.captioned
    assert _files(folder)[f"{first.name}.txt"].decode() == "a zörp"
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert keep_pair(folder, "steps-5-10", ONE, OTHER, "a zörp") == first
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before, "the same again writes nothing"
    assert keep_pair(folder, "steps-5-10", OTHER, ONE, "a zörp") == first
    assert _pairs(folder) == [(OTHER, ONE)] and len(_files(folder)) == 3
    second = keep_pair(folder, "steps-5-10", ONE, b"a third picture", "")
    assert second.pairs == 2 and not second.captioned and len(_files(folder)) == 5


def test_what_a_person_has_written_stays(tmp_path):
    name = keep_pair(tmp_path, "steps-5-10", ONE, OTHER, "a zorp").name
    (tmp_path / f"{name}.txt").write_text("my own words")
    keep_pair(tmp_path, "steps-5-10", OTHER, ONE, "a zorp")
    assert (tmp_path / f"{name}.txt").read_text() == "my own words"
    (tmp_path / f"{name}.win.jpg").write_bytes(b"retouched")
    before = _files(tmp_path)
    with pytest.raises(PairChangedError, match=rf"{name}\.win\.jpg has been changed since it was marked"):
        keep_pair(tmp_path, "steps-5-10", ONE, OTHER, "a zorp")
    with pytest.raises(ValueError, match="the same picture"):
        keep_pair(tmp_path, "steps-5-10", ONE, ONE, "")
    assert _files(tmp_path) == before


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_fault_at_any_request_leaves_no_half_pair_and_the_same_mark_works_afterwards(tmp_path, number):
    counted = Disk(tmp_path / "counted")
    with counted.installed():
        keep_pair(tmp_path / "counted", "steps-5-10", ONE, OTHER, "a zorp")
    assert len(counted.asked) >= 12  # a folder, and three files: opened, written, synced, renamed
    for at in range(1, len(counted.asked) + 1):
        folder = tmp_path / str(at)
        with Disk(folder, at, fails(number), lasting=True).installed(), pytest.raises(OSError, match=str(folder)):
            keep_pair(folder, "steps-5-10", ONE, OTHER, "a zorp")
        assert not _files(folder)
        assert keep_pair(folder, "steps-5-10", ONE, OTHER, "a zorp").pairs == 1
        assert _pairs(folder) == [(ONE, OTHER)]


def test_a_fault_while_a_pair_is_turned_round_leaves_whole_pictures_and_the_same_mark_works_afterwards(tmp_path):
    for at in range(1, 9):
        folder = tmp_path / str(at)
        name = keep_pair(folder, "steps-5-10", ONE, OTHER, "").name
        with Disk(folder, at, fails(errno.ENOSPC), lasting=True).installed(), pytest.raises(OSError, match=str(folder)):
            keep_pair(folder, "steps-5-10", OTHER, ONE, "")
        found = _files(folder)
        assert set(found) == {f"{name}.win.jpg", f"{name}.lose.jpg"} and set(found.values()) <= {ONE, OTHER}
        keep_pair(folder, "steps-5-10", OTHER, ONE, "")
        assert _pairs(folder) == [(OTHER, ONE)]
