"""Pictures are of the usual formats, whatever their names say: nothing that Pillow would hand to another program is
opened.
"""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from graft_nodes.comfyui_api_stubs.tests import ghostscript as starting
from graft_nodes.storage import pictures
from graft_nodes.storage.pictures import FORMATS, open_picture, turn_upright, upright_size
from PIL import Image, PngImagePlugin, UnidentifiedImageError, features

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


_PIXELS = np.random.default_rng(0).integers(0, 255, (16, 24, 3), dtype=np.uint8)
_ENTRY = b"Exif\0\0MM\0*\0\0\0\x08\0\x01"
BROKEN_EXIF = {
    "cut": b"Exif\0\0\0\x08\0\x02\x01\x12\0\x03",
    "noise": b"junk" * 20,
    "header alone": b"Exif\0\0MM\0*\0\0",
    "name alone": b"Exif\0\0",
    "far offset": b"Exif\0\0II*\0\xff\xff\xff\xff",
    "orientation in words": _ENTRY + b"\x01\x12\0\x02\0\0\0\4abc\0\0\0\0\0",
    "orientation divided by 0": _ENTRY + b"\x01\x12\0\x0a\0\0\0\1\0\0\0\x1a\0\0\0\0" + bytes(8),
    "orientation 77": _ENTRY + b"\x01\x12\0\x03\0\0\0\1\0\x4d\0\0\0\0\0\0",
}


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize("exif", BROKEN_EXIF.values(), ids=BROKEN_EXIF)
@pytest.mark.parametrize("name", ["PNG", "WEBP", "JPEG"])
def test_broken_exif_leaves_the_pixels_whole(tmp_path, name, exif):
    path = tmp_path / "a.picture"
    Image.fromarray(_PIXELS).save(path, format=name, exif=exif, **({"lossless": True} if name == "WEBP" else {}))
    with open_picture(path) as picture:
        assert upright_size(picture) == (24, 16)
        whole = np.asarray(turn_upright(picture))
    expected = _PIXELS
    if name == "JPEG":
        plain = io.BytesIO()
        Image.fromarray(_PIXELS).save(plain, format=name)
        expected = np.asarray(Image.open(plain))
    assert (whole == expected).all()


def test_exif_as_a_text_of_a_png_leaves_the_pixels_whole(tmp_path):
    texts = PngImagePlugin.PngInfo()
    texts.add_text("exif", str(b"Exif\0\0MM\0*\0\0\0\x08\0\0"))
    texts.add_text("Raw profile type exif", "\nexif\n      8\nno hexadecimal digits\n")
    Image.fromarray(_PIXELS).save(tmp_path / "a.png", pnginfo=texts)
    with open_picture(tmp_path / "a.png") as picture:
        assert upright_size(picture) == (24, 16) and (np.asarray(turn_upright(picture)) == _PIXELS).all()


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow has no AVIF")
@pytest.mark.parametrize("as_file", [True, False])
def test_broken_exif_of_an_avif_leaves_the_pixels_whole(tmp_path, as_file):
    """The decoder itself refuses the whole file."""
    mark = _ENTRY + b"\x01\x0e\0\2\0\0\0\x28\0\0\0\x1a\0\0\0\0" + b"Q" * 39 + b"\0"
    path, plain = tmp_path / "a.avif", tmp_path / "plain.avif"
    Image.fromarray(_PIXELS).save(path, exif=mark)
    Image.fromarray(_PIXELS).save(plain)
    content = path.read_bytes()
    assert content.count(mark[6:]) == 1
    path.write_bytes(content.replace(mark[6:], b"no EXIF".ljust(len(mark) - 6, b"\1")))
    with open_picture(path if as_file else io.BytesIO(path.read_bytes())) as picture, Image.open(plain) as expected:
        assert upright_size(picture) == (24, 16)
        assert (np.asarray(turn_upright(picture)) == np.asarray(expected)).all()


@pytest.mark.parametrize("orientation", [1, 6])
def test_a_tiff_on_its_side(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(_PIXELS).save(tmp_path / "a.png", format="TIFF", exif=exif)
    with open_picture(tmp_path / "a.png") as picture:
        size = upright_size(picture)
        assert size == turn_upright(picture).size == ((24, 16) if orientation == 1 else (16, 24))


def test_every_picture_is_turned_by_one_function():
    """Pillow's own function fails for a whole picture whose EXIF is broken."""
    found = [
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if re.search(r"exif_transpose|\.getexif\(", path.read_text(encoding="utf-8"))
    ]
    assert found == ["storage/pictures.py"]


def peak_of(script, *arguments):
    """How many MB more a process of its own held at most while it ran this, after its imports."""
    code = f"import resource, sys\nfrom graft_nodes.storage import pictures\n{script}"
    held = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=True
    )
    return int(held.stdout)


SHRINK = """
from PIL import Image
most = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with pictures.open_picture(sys.argv[1]) as file:
    before = most()
    small = pictures.shrink(file, 160)
print((most() - before) // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts memory as Linux does")
@pytest.mark.parametrize(("kind", "name"), [("I;16", "a.png"), ("I;16", "a.tif"), ("CMYK", "a.jpg"), ("RGB", "a.jpg")])
def test_a_large_picture_is_shrunk_in_little_memory(tmp_path, kind, name):
    Image.new(kind, (6000, 6000)).save(tmp_path / name)
    assert peak_of(SHRINK, tmp_path / name) < 200, "36 million pixels of 16 bit, once, and half of that in 8 bit"


def test_16_bit_is_scaled_to_8_bit_row_by_row_as_at_once():
    values = np.random.default_rng(1).integers(0, 65536, (333, 17), dtype=np.uint16)
    values[0, :4] = 0, 65535, 128, 129  # halves
    image = Image.fromarray(values)
    expected = (values.astype(np.float64) / 257).round().astype(np.uint8)
    assert image.mode.startswith("I")
    assert (np.asarray(pictures.to_eight_bit(image)) == expected).all()
    wide = Image.fromarray(values.astype(np.int32) * 3 - 1000)  # beyond 16 bit, and below 0
    assert (np.asarray(pictures.to_eight_bit(wide)) == ((values * 3.0 - 1000) / 257).round().clip(0, 255)).all()


def test_too_many_pixels_are_refused_before_they_are_read(tmp_path):
    Image.new("1", (9000, 8000)).save(tmp_path / "a.png")
    with pictures.open_picture(tmp_path / "a.png") as file, pytest.raises(ValueError, match="9000x8000 is too large"):
        pictures.shrink(file, 160)
    Image.new("L", (9000, 8000)).save(tmp_path / "a.jpg")
    with pictures.open_picture(tmp_path / "a.jpg") as file:  # read at an eighth of its size
        assert pictures.shrink(file, 160).size == (160, 142)
