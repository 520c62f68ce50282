"""Listings of folders in which another process removes files: what is gone is left out, and nothing fails."""

import errno
import os

import pytest
from graft_nodes.storage.file_list import files_below, names_in
from graft_nodes.tests.storage.vanishing import remove_after_listing


def _tree(folder):
    for name in ("b/c.txt", "b/a.txt", "a.txt", "d/e/f.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def test_every_file_with_its_size_by_path(tmp_path):
    found = files_below(_tree(tmp_path))
    assert [path.relative_to(tmp_path).as_posix() for path, _ in found] == ["a.txt", "b/a.txt", "b/c.txt", "d/e/f.txt"]
    assert all(status.st_size == len(path.relative_to(tmp_path).as_posix()) for path, status in found)
    assert names_in(tmp_path) == ["a.txt", "b", "d"]


def test_no_folder_has_no_files(tmp_path):
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "none", tmp_path / "file", tmp_path / "file" / "below"):
        assert names_in(folder) == [] and files_below(folder) == []


@pytest.mark.parametrize("listed", [".", "b", "d"])
@pytest.mark.parametrize("removed", ["a.txt", "b/c.txt", "b", "d", "d/e"])
def test_what_goes_after_it_was_listed_is_left_out(tmp_path, monkeypatch, listed, removed):
    _tree(tmp_path)
    remove_after_listing(monkeypatch, tmp_path / listed, tmp_path / removed)
    found = {path.relative_to(tmp_path).as_posix() for path, _ in files_below(tmp_path)}
    monkeypatch.undo()
    there = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert there <= found <= there | {"a.txt", "b/a.txt", "b/c.txt"}  # or it was seen before it went


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_links_to_nothing_and_to_folders_are_left_out(tmp_path):
    _tree(tmp_path)
    (tmp_path / "nowhere").symlink_to(tmp_path / "none")
    (tmp_path / "itself").symlink_to(tmp_path / "itself")
    (tmp_path / "again").symlink_to(tmp_path / "b")
    (tmp_path / "a link.txt").symlink_to(tmp_path / "a.txt")
    names = [path.relative_to(tmp_path).as_posix() for path, _ in files_below(tmp_path)]
    assert names == ["a link.txt", "a.txt", "b/a.txt", "b/c.txt", "d/e/f.txt"]


def test_a_broken_disk_is_an_error(tmp_path, monkeypatch):
    def broken(path, **_):
        raise OSError(errno.EIO, "Input/output error", path)

    _tree(tmp_path)
    for name in ("scandir", "stat"):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, broken)
            with pytest.raises(OSError, match="Input/output error"):
                files_below(tmp_path)
