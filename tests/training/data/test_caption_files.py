"""One caption as a person edits it: the file that the dataset reads, whole or not at all, nothing of others lost."""

import errno
import os

import pytest
from graft_nodes.training.data.caption_files import CaptionChangedError, caption_path, read_caption, write_caption
from graft_nodes.training.data.layouts import registry


@pytest.mark.parametrize(
    ("files", "source", "expected"),
    [
        ([], "auto", "a.txt"),
        ([], "txt", "a.txt"),
        (["a.caption"], "auto", "a.caption"),
        (["a.caption", "a.txt"], "txt", "a.txt"),
        (["captions/a.txt"], "auto", "captions/a.txt"),
        (["captions/b.txt"], "folder", "captions/a.txt"),
    ],
)
def test_it_is_the_file_that_the_dataset_reads(tmp_path, files, source, expected):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x", encoding="utf-8")
    found = caption_path(tmp_path / "a.png", tmp_path, source, "utf-8")
    assert found.relative_to(tmp_path).as_posix() == expected


def test_a_caption_in_another_kind_of_file_is_not_hidden_behind_a_new_one(tmp_path):
    (tmp_path / "a.png").write_bytes(b"")
    (tmp_path / "a.json").write_text('{"tags": ["cat"]}', encoding="utf-8")
    for source in ("auto", "json"):
        with pytest.raises(ValueError, match="its caption is in one JSON file per image"):
            caption_path(tmp_path / "a.png", tmp_path, source, "utf-8")
    with pytest.raises(ValueError, match="caption source folder reads text files in a captions folder"):
        caption_path(tmp_path / "a.png", tmp_path, "folder", "utf-8")
    assert {layout.name for layout in registry.LAYOUTS if layout.text_files(tmp_path / "a.png", tmp_path)} == {
        "txt",
        "folder",
    }


@pytest.mark.parametrize(
    ("before", "encoding"),
    [
        (b"old\nsecond line\n", "utf-8"),
        ("ältere\r\nzweite\r\n".encode("utf-8-sig"), "utf-8"),
        ("ältere\n".encode("utf-16"), "utf-8"),
        (b"\xfe\xff" + "ältere\n".encode("utf-16-be"), "utf-8"),
        ("ältere\r\n".encode("cp1252"), "cp1252"),
        ("older\r\nsecond\r\n".encode("utf-16-le"), "utf-8"),
        ("older\n".encode("utf-16-be"), "utf-8"),
    ],
)
def test_encoding_and_line_ends_stay_and_undo_gives_the_bytes_back(tmp_path, before, encoding):
    path = tmp_path / "a.txt"
    path.write_bytes(before)
    read = read_caption(path, encoding)
    old, now = write_caption(path, encoding, "neu, ü\nzwei", read.version)
    assert old == read.text
    assert path.read_bytes()[:2] in (before[:2], b"ne", b"n\0", b"\0n")
    assert (b"\r\n" in path.read_bytes()) == (b"\r\n" in before)
    assert read_caption(path, encoding).text.replace("\r\n", "\n") == "neu, ü\nzwei"
    write_caption(path, encoding, old, now.version)
    assert path.read_bytes() == before


def test_a_new_caption_is_a_new_file_and_undo_removes_it(tmp_path):
    path = tmp_path / "a.txt"
    assert read_caption(path, "utf-8").text is None
    old, now = write_caption(path, "utf-8", "new", "")
    assert old is None and path.read_text(encoding="utf-8") == "new"
    assert write_caption(path, "utf-8", None, now.version) == ("new", read_caption(path, "utf-8"))
    assert not path.exists()


def test_what_somebody_else_wrote_meanwhile_stays(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old", encoding="utf-8")
    read = read_caption(path, "utf-8")
    path.write_text("theirs", encoding="utf-8")
    for text in ("mine", None):
        with pytest.raises(CaptionChangedError, match=r"a\.txt has changed on disk since it was read"):
            write_caption(path, "utf-8", text, read.version)
    with pytest.raises(CaptionChangedError):
        write_caption(path, "utf-8", "mine", "")
    assert path.read_text(encoding="utf-8") == "theirs"


def test_what_cannot_be_written_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"plain")
    version = read_caption(path, "cp1252").version
    with pytest.raises(ValueError, match="cannot be written in cp1252"):
        write_caption(path, "cp1252", "cat 猫", version)
    with pytest.raises(ValueError, match="are not a caption"):
        write_caption(path, "utf-8", "x" * 2_000_000, version)
    path.write_bytes(b"\xff\xff\xff")
    with pytest.raises(ValueError, match="not utf-8 text"):
        read_caption(path, "utf-8")
    with pytest.raises(CaptionChangedError):
        write_caption(path, "utf-8", "over it", version)
    assert os.listdir(tmp_path) == ["a.txt"] and path.read_bytes() == b"\xff\xff\xff"


def test_a_folder_of_the_captions_name_is_said_and_left_alone(tmp_path):
    path = tmp_path / "a.txt"
    path.mkdir()
    (path / "kept").touch()
    for attempt in (lambda: read_caption(path, "utf-8"), lambda: write_caption(path, "utf-8", "mine", "")):
        with pytest.raises(ValueError, match=r"a\.txt is a folder, .* rename the folder"):
            attempt()
    assert (path / "kept").exists()


def test_a_read_only_file_is_left_alone(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_bytes(b"plain")
    version = read_caption(path, "utf-8").version
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everything
    with pytest.raises(PermissionError, match="read-only"):
        write_caption(path, "utf-8", "x", version)
    assert path.read_bytes() == b"plain"


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_bytes(b"plain")
    version = read_caption(path, "utf-8").version

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="free some space"):
        write_caption(path, "utf-8", "x", version)
    assert os.listdir(tmp_path) == ["a.txt"] and path.read_bytes() == b"plain"
