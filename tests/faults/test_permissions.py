"""Files and folders that the user who runs Graft may not open, as on servers that several people share."""

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from graft_nodes.storage.atomic import write_whole
from graft_nodes.training.data.folder_reader import read_folder
from graft_nodes.training.data.folder_report import report
from graft_nodes.training.data.folder_settings import FolderSettings
from PIL import Image

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="rights are others on Windows")
SETTINGS = FolderSettings(resolution=64, bucket_step=16)
NOBODY = 65534


@contextmanager
def as_a_user():
    """Root may read everything: the block runs as another user then."""
    if os.geteuid() != 0:
        yield
        return
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.fixture
def place():
    """A folder that everyone may open: pytest's own are for one user."""
    folder = Path(tempfile.mkdtemp(prefix="graft-rights-"))
    folder.chmod(0o755)
    yield folder
    for path in folder.rglob("*"):
        path.chmod(0o755)
    shutil.rmtree(folder)


def closed(path):
    path.chmod(0)
    return path


def test_what_may_not_be_read_is_named_and_the_rest_is_read(place):
    for name in ("a", "b", "c", "sub/d"):
        (place / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (64, 64), (ord(name[-1]), 0, 0)).save(place / f"{name}.png")
        (place / f"{name}.txt").write_text(name)
    closed(place / "b.png"), closed(place / "c.txt"), closed(place / "sub")
    with as_a_user():
        read = read_folder(place, SETTINGS)
        said = report(read)
    assert [image.caption.plain for image in read.entries] == ["a"]
    assert "b.png: Permission denied" in said and "c.png: c.txt: Permission denied" in said
    assert "1 folders cannot be opened, so nothing in them is read: sub (Permission denied)" in said


def test_a_folder_that_may_not_be_opened_is_not_called_empty(place):
    data = place / "data"
    data.mkdir()
    closed(data)
    with as_a_user(), pytest.raises(ValueError, match=r"these folders cannot be opened: data \(Permission denied\)"):
        read_folder(data, SETTINGS)


def test_a_folder_that_may_not_be_written_is_named_with_what_to_do(place):
    with as_a_user(), pytest.raises(PermissionError, match="this user may not write there") as refused:
        write_whole(place / "a.bin", [b"1"])
    assert str(place) in str(refused.value) and not list(place.iterdir())
