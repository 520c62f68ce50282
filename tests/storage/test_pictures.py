"""Pictures are of the usual formats, whatever their names say: nothing that Pillow would hand to another program is
opened.
"""

import os
import re
from pathlib import Path

import pytest
from graft_nodes.storage.pictures import FORMATS, open_picture
from graft_nodes.tests.storage import starting
from PIL import Image, UnidentifiedImageError

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("storage", "patches", "ema", "training", "host", "nodes", "headless", "demo")


@pytest.mark.parametrize("name", FORMATS)
def test_the_usual_formats_open_under_any_name(tmp_path, name):
    Image.init()
    if name not in Image.SAVE:
        pytest.skip(f"this Pillow cannot write {name}")
    path = tmp_path / "a.png"
    Image.new("RGB", (8, 6), (10, 20, 30)).save(path, format=name)
    with open_picture(path) as picture:
        assert picture.format == name and picture.size == (8, 6)
    with path.open("rb") as file, open_picture(file) as picture:
        assert picture.format == name


@pytest.mark.parametrize("name", ["EPS", "PDF", "PPM", "ICO", "TGA", "PCX"])
def test_other_formats_are_refused(tmp_path, name):
    path = tmp_path / "a.png"
    Image.new("RGB", (8, 6)).save(path, format=name)
    with pytest.raises(UnidentifiedImageError):
        open_picture(path)


@pytest.mark.skipif(os.name == "nt", reason="Ghostscript is stood in for by a shell script")
def test_an_eps_starts_no_program(tmp_path, monkeypatch):
    started = starting.watch_ghostscript(tmp_path, monkeypatch)
    path = tmp_path / "a.png"
    path.write_bytes(starting.EPS)
    with pytest.raises(UnidentifiedImageError):
        open_picture(path).load()
    assert not started.exists()


def test_a_pillow_without_a_format_reads_the_others(tmp_path, monkeypatch):
    Image.init()
    monkeypatch.delitem(Image.OPEN, "AVIF", raising=False)
    Image.new("RGB", (8, 6)).save(tmp_path / "a.webp")
    assert open_picture(tmp_path / "a.webp").format == "WEBP"
    (tmp_path / "a.avif").write_bytes(b"\0\0\0\x1cftypavif")
    with pytest.raises(UnidentifiedImageError):
        open_picture(tmp_path / "a.avif")


def test_nothing_else_opens_pictures():
    """Every other `Image.open` would try all formats that Pillow knows."""
    found = []
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if re.search(r"\bImage\.open\(", path.read_text(encoding="utf-8")):
                found.append(path.relative_to(ROOT).as_posix())
    assert found == ["storage/pictures.py"]
