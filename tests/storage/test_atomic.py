"""Files appear complete or not at all; folders are made durably and named when they cannot be."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from graft_nodes.storage import atomic
from graft_nodes.tests.faults.disk import Disk


@pytest.mark.parametrize("shared", [False, True])
def test_a_full_disk_leaves_the_file_of_before(tmp_path, shared):
    path = tmp_path / "file"
    atomic.write_whole(path, [b"be", b"fore"], shared)

    def chunks():
        yield b"half"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match=r"No space left.*free some space there.*file"):
        atomic.write_whole(str(path), chunks(), shared)
    assert os.listdir(tmp_path) == ["file"] and path.read_bytes() == b"before"


def test_two_drafts_of_a_shared_file_do_not_meet(tmp_path):
    path = tmp_path / "file"

    def chunks():
        yield b"outer"
        atomic.write_whole(path, [b"inner"], shared=True)
        assert path.read_bytes() == b"inner"

    atomic.write_whole(path, chunks(), shared=True)
    assert path.read_bytes() == b"outer" and os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(os.name == "nt", reason="modes of a POSIX system")
@pytest.mark.parametrize("shared", [False, True])
def test_files_have_the_mode_that_the_user_set(tmp_path, shared):
    before = os.umask(0o027)
    try:
        atomic.write_whole(tmp_path / "file", [], shared)
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


@pytest.mark.skipif(os.name == "nt", reason="modes of a POSIX system")
@pytest.mark.parametrize("shared", [False, True])
def test_a_file_that_is_written_again_keeps_its_mode_and_is_never_open_to_others(tmp_path, shared):
    path, seen = tmp_path / "file", []
    path.write_bytes(b"before")
    path.chmod(0o600)

    def chunks():
        seen.extend(one.stat().st_mode & 0o777 for one in tmp_path.iterdir())
        yield b"now"

    atomic.write_whole(path, chunks(), shared)
    assert seen == [0o600, 0o600] and path.read_bytes() == b"now"
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o664)
    atomic.write_whole(path, [b"again"], shared)
    assert path.stat().st_mode & 0o777 == 0o664


def test_a_moved_file_takes_the_place_of_another(tmp_path):
    (tmp_path / "a").write_text("new")
    (tmp_path / "b").write_text("old")
    atomic.move_file(tmp_path / "a", tmp_path / "b")
    assert os.listdir(tmp_path) == ["b"] and (tmp_path / "b").read_text() == "new"


def without_links(monkeypatch):
    def link(source, target):
        raise OSError(errno.EPERM, "Operation not permitted", os.fspath(source))

    monkeypatch.setattr(os, "link", link)


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_moves_only_to_a_free_name(tmp_path, monkeypatch, has_links):
    if not has_links:
        without_links(monkeypatch)
    for name in ("first", "second"):
        (tmp_path / name).write_text(name)
    (tmp_path / "to-nothing").symlink_to("nothing")
    (tmp_path / "folder").mkdir()
    atomic.move_to_free_name(tmp_path / "first", tmp_path / "there")
    for taken in ("there", "to-nothing", "folder"):
        with pytest.raises(FileExistsError):
            atomic.move_to_free_name(tmp_path / "second", tmp_path / taken)
    assert sorted(os.listdir(tmp_path)) == ["folder", "second", "there", "to-nothing"]
    assert (tmp_path / "there").read_text() == "first" and (tmp_path / "second").read_text() == "second"


def test_a_name_that_was_reserved_is_free_again_after_an_error(tmp_path, monkeypatch):
    without_links(monkeypatch)
    with pytest.raises(FileNotFoundError):
        atomic.move_to_free_name(tmp_path / "nothing", tmp_path / "name")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("has_links", [True, False])
def test_of_many_new_files_of_one_name_one_is_written(tmp_path, monkeypatch, has_links):
    if not has_links:
        without_links(monkeypatch)
    together = threading.Barrier(20)

    def write(number):
        together.wait()
        try:
            with atomic.whole_draft(tmp_path / "file", [b"%d" % number]) as draft:
                atomic.move_to_free_name(draft, tmp_path / "file")
        except FileExistsError:
            return None
        return number

    with ThreadPoolExecutor(20) as pool:
        written = [number for number in pool.map(write, range(20)) if number is not None]
    assert len(written) == 1 and (tmp_path / "file").read_bytes() == b"%d" % written[0]
    assert os.listdir(tmp_path) == ["file"]


def test_a_draft_that_gets_no_name_is_removed(tmp_path):
    with atomic.whole_draft(tmp_path / "file", [b"x"]) as draft, open(draft, "rb") as file:
        assert file.read() == b"x"
    assert os.listdir(tmp_path) == []


def test_new_folders_are_listed_and_a_failing_one_is_named(tmp_path):
    deep = tmp_path / "a" / "b" / "c"
    assert atomic.make_folders(deep) == [tmp_path / "a", tmp_path / "a" / "b", deep] and deep.is_dir()
    assert atomic.make_folders(deep) == []
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        atomic.make_folders(tmp_path / "file" / "below")


@pytest.mark.parametrize("shared", [False, True])
def test_a_file_is_whole_on_the_disk_before_it_gets_its_name(tmp_path, shared):
    synced = []

    def note_size(request, path, half):
        synced.append((request, os.path.getsize(path)))

    with Disk(tmp_path, at=4, answer=note_size).installed() as disk:
        atomic.write_whole(tmp_path / "file", [b"one", b"two"], shared)
    assert [request.split()[0] for request in disk.asked] == ["open", "write", "write", "fsync", "replace"]
    assert synced == [("fsync", 6)], "a buffer that is written after fsync can be lost"


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot sync folders")
def test_new_folders_are_on_the_disk_from_the_outermost(tmp_path):
    with Disk(tmp_path).installed() as disk:
        atomic.make_folders(tmp_path / "a" / "b")
    assert disk.asked == ["mkdir a", "fsync .", "mkdir a/b", "fsync a"]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files as Linux lists them")
def test_no_file_stays_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for number in range(10):
        atomic.make_folders(tmp_path / str(number))
    assert len(os.listdir("/proc/self/fd")) == before
