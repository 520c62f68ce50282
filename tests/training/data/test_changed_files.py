"""Files that change while training: each change said once, at the next look or the end; a touch changes nothing."""

import os
from pathlib import Path

import pytest
from graft_nodes.training.data import changed_files
from graft_nodes.training.data.cache import Cache
from graft_nodes.training.data.changed_files import DatasetChangedError, FileWatcher, WatchedFiles, stamp_files


@pytest.fixture
def folder(tmp_path):
    for i in range(6):
        (tmp_path / f"{i}.png").write_bytes(b"picture %d" % i)
        (tmp_path / f"{i}.txt").write_text(f"caption {i}", encoding="utf-8")
    (tmp_path / "notes.md").write_text("not of the dataset", encoding="utf-8")
    return tmp_path


def _watcher(folder, stop=False, at_once=64):
    return FileWatcher([WatchedFiles(folder, stamp_files(folder), stop)], at_once)


def test_nothing_changed_is_nothing_said(folder):
    watcher = _watcher(folder)
    (folder / "notes.md").write_text("more", encoding="utf-8")
    (folder / "new.md").write_text("more", encoding="utf-8")
    os.utime(folder / "0.png", (1, 1))  # touched, with the same contents
    assert watcher.check_all() == [] and watcher.check_next() == [] and watcher.check_next() == []


def test_each_change_is_said_once(folder):
    watcher = _watcher(folder)
    (folder / "1.txt").write_text("another caption", encoding="utf-8")
    (folder / "2.png").unlink()
    (folder / "9.png").write_bytes(b"new")
    assert (
        sorted(watcher.check_next()) == ["1.txt has changed", "2.png is gone", "9.png is new"]
        and watcher.check_next() == []
    )
    (folder / "3.png").write_bytes(b"picture x")  # of the same size
    assert watcher.check_next() == ["3.png has changed"] and watcher.check_all() == []


def test_a_few_files_at_a_time_and_all_in_turn(folder):
    watcher = _watcher(folder, at_once=5)
    (folder / "5.txt").write_text("another caption", encoding="utf-8")
    assert [watcher.check_next() for _ in range(4)] == [[], [], ["5.txt has changed"], []]
    (folder / "0.png").write_bytes(b"x")
    assert _watcher(folder, at_once=5).check_all() == []
    assert watcher.check_all() == ["0.png has changed"]


def test_stop_names_what_changed_and_what_to_do(folder):
    watcher = _watcher(folder, stop=True)
    assert watcher.check_next() == []
    (folder / "1.txt").write_text("another caption", encoding="utf-8")
    with pytest.raises(DatasetChangedError, match=r"1\.txt has changed.*Put the files back.*changed: continue"):
        watcher.check_next()


def test_a_folder_that_is_gone(folder):
    import shutil

    watcher = _watcher(folder)
    shutil.rmtree(folder)
    assert len(watcher.check_next()) == 12


def _process(monkeypatch):
    """Begins as a new process does, and gives the list of files whose contents are read from now on."""
    read, of_file = [], changed_files.sha256_of_file
    monkeypatch.setattr(changed_files, "KNOWN", changed_files.KnownHashes())
    monkeypatch.setattr(changed_files, "sha256_of_file", lambda path: read.append(Path(path).name) or of_file(path))
    return read


def test_another_process_reads_only_what_changed(folder, tmp_path, monkeypatch):
    cache = Cache(tmp_path / "cache")
    monkeypatch.setattr(changed_files, "SETTLED", 0)
    with monkeypatch.context() as first:
        _process(first)
        before = stamp_files(folder)
        changed_files.keep_hashes(cache, folder)
    with monkeypatch.context() as second:
        read = _process(second)
        changed_files.recall_hashes(Cache(cache.folder), folder)
        assert stamp_files(folder) == before and not read
        assert cache.write_counts["files"] == 1
        changed_files.keep_hashes(cache, folder)
        assert cache.write_counts["files"] == 1, "nothing changed, so nothing is written"
    times = (folder / "3.png").stat()
    (folder / "3.png").write_bytes(b"picture x")  # of the same size
    os.utime(folder / "3.png", ns=(times.st_atime_ns, times.st_mtime_ns))  # and of the same time
    (folder / "new.png").write_bytes(b"new")
    read = _process(monkeypatch)
    changed_files.recall_hashes(Cache(cache.folder), folder)
    after = stamp_files(folder)
    assert sorted(read) == ["3.png", "new.png"]
    assert after["3.png"].sha256 != before["3.png"].sha256


def test_the_hash_of_a_file_that_has_just_changed_is_not_kept(folder, tmp_path, monkeypatch):
    """Another change could have the same time."""
    cache = Cache(tmp_path / "cache")
    with monkeypatch.context() as first:
        _process(first)
        stamp_files(folder)
        changed_files.keep_hashes(cache, folder)
    read = _process(monkeypatch)
    changed_files.recall_hashes(Cache(cache.folder), folder)
    stamp_files(folder)
    assert len(read) == 12
