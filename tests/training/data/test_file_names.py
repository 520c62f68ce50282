"""Names that a disk spells otherwise than a picture's: endings in capitals, composed and decomposed letters."""

import os
import unicodedata

import pytest
from graft_nodes.training.data.file_names import FolderNames, compose, drop_thumbnails, is_of_system

NFC, NFD = (unicodedata.normalize(form, "\u00e9t\u00e9 \u304c") for form in ("NFC", "NFD"))


def _touch(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")


def _found(root, name):
    found = FolderNames().first([root / name])
    return None if found is None else found.relative_to(root).as_posix()


@pytest.mark.parametrize(
    ("there", "wanted"),
    [
        ("2.TXT", "2.txt"),
        ("2.Txt", "2.txt"),
        ("2.txt", "2.TXT"),
        (f"{NFC}.txt", f"{NFD}.txt"),
        (f"{NFD}.txt", f"{NFC}.txt"),
        (f"{NFD}.TXT", f"{NFC}.txt"),
        ("IMG.txt", "img.txt"),
        ("Captions/1.TXT", "captions/1.txt"),
        (f"{NFD}/deep/1.txt", f"{NFC}/deep/1.txt"),
        ("a.MASK.PNG", "a.mask.png"),
        ("STRASSE.txt", "stra\u00dfe.txt"),
    ],
)
def test_a_file_is_found_under_another_spelling(tmp_path, there, wanted):
    _touch(tmp_path, there)
    assert _found(tmp_path, wanted) == there


def test_the_name_as_it_is_written_comes_first(tmp_path):
    _touch(tmp_path, "2.TXT", "2.txt", f"{NFC}.txt", f"{NFD}.txt", "captions/1.txt", "Captions/1.txt", "Captions/2.txt")
    for name in ("2.TXT", "2.txt", f"{NFC}.txt", f"{NFD}.txt", "captions/1.txt", "Captions/1.txt"):
        assert _found(tmp_path, name) == name
    assert _found(tmp_path, "captions/2.txt") is None  # that folder is there


def test_another_picture_keeps_its_file(tmp_path):
    """`A.png` has no caption where `a.txt` belongs to `a.png`."""
    _touch(tmp_path, "A.png", "a.png", "a.txt")
    assert _found(tmp_path, "A.txt") is None and _found(tmp_path, "a.txt") == "a.txt"
    _touch(tmp_path, "B.png", "b.txt", "B.TXT.bak", "C.png", "c.txt", "c.TXT")
    assert _found(tmp_path, "B.txt") == "b.txt" and _found(tmp_path, "C.txt") is None


def test_what_is_no_file_is_not_found(tmp_path):
    (tmp_path / "1.TXT").mkdir()
    _touch(tmp_path, "file")
    for name in ("1.txt", "no/1.txt", "file/1.txt", "x" * 300 + ".txt"):
        assert _found(tmp_path, name) is None
    assert FolderNames().first(["nowhere/at all/1.txt", os.fspath(tmp_path / "FILE")]) == tmp_path / "file"


def test_beside_takes_the_suffixes_in_their_order(tmp_path):
    _touch(tmp_path, "1.CAPTION", "2.caption", "2.TXT")
    names = FolderNames()
    assert names.find_beside(tmp_path / "1.PNG", (".txt", ".caption")) == tmp_path / "1.CAPTION"
    assert names.find_beside(tmp_path / "2.png", (".txt", ".caption")) == tmp_path / "2.TXT"
    assert names.find_beside(tmp_path / "3.png", (".txt", ".caption")) is None


def test_a_folder_is_listed_once(tmp_path, monkeypatch):
    _touch(tmp_path, "1.TXT")
    names, listed = FolderNames(), []
    real = os.listdir
    monkeypatch.setattr(os, "listdir", lambda folder: listed.append(folder) or real(folder))
    for number in range(50):
        names.find_beside(tmp_path / f"{number}.png", (".txt", ".caption"))
    assert listed == [str(tmp_path)]


def test_composed_letters():
    assert compose(NFD) == NFC == compose(NFC) and NFD != NFC and compose("plain") == "plain"


def test_folders_of_the_system():
    for name in ("@eaDir", ".thumbnails", "__MACOSX", "#recycle", "$RECYCLE.BIN", ".ipynb_checkpoints", "@Recycle"):
        assert is_of_system(name), name
    for name in ("cats", "thumbnails", "10_cats", "@me"):
        assert not is_of_system(name), name


def test_thumbnails_are_those_of_pictures_beside_their_folder(tmp_path):
    paths = [tmp_path / name for name in ("1.png", "Thumbs/1.jpg", "Thumbs/3.jpg", "youtube/thumbnails/9.jpg")]
    assert drop_thumbnails(paths) == [paths[0], paths[2], paths[3]]
    assert drop_thumbnails(paths[2:]) == paths[2:]
