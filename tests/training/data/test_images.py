"""Picture files of every format against pixels drawn by hand; masks; the frames of buckets against Pillow's own
transforms.
"""

import io

import numpy as np
import pytest
import torch
from graft_nodes.storage import pictures
from graft_nodes.training.data import images
from graft_nodes.training.data.buckets import frame
from PIL import Image, ImageOps, PngImagePlugin, features


def _noise(size=(16, 12), channels=3, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (size[1], size[0], channels), dtype=np.uint8)


def _opened(path):
    picture, alpha = images.open_image(path)
    return np.asarray(picture), None if alpha is None else np.asarray(alpha)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", [".png", ".webp"])
def test_every_exif_orientation(tmp_path, orientation, suffix):
    pixels = _noise()
    # What a viewer shows for each value of the tag (Exif 2.32, 4.6.4, orientation), as turns of the stored rows and
    # columns.
    shown = {
        1: pixels,
        2: pixels[:, ::-1],
        3: pixels[::-1, ::-1],
        4: pixels[::-1],
        5: pixels.transpose(1, 0, 2),
        6: np.rot90(pixels, -1),
        7: pixels[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(pixels),
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"a{suffix}"
    Image.fromarray(pixels).save(path, exif=exif, **({"lossless": True} if suffix == ".webp" else {}))
    assert (_opened(path)[0] == shown[orientation]).all()


def test_color_models_become_rgb(tmp_path):
    rgb, gray = _noise(), _noise(channels=1)[:, :, 0]
    palette = Image.fromarray(rgb).quantize(8)
    palette.save(tmp_path / "palette.png")
    Image.fromarray(gray).save(tmp_path / "gray.png")
    Image.fromarray(np.dstack([gray, gray * 0 + 255]), "LA").save(tmp_path / "gray alpha.png")
    Image.fromarray(gray.astype(np.uint16) * 257).save(tmp_path / "deep.png")
    Image.fromarray(rgb).save(tmp_path / "a.bmp")
    Image.fromarray(gray > 128).save(tmp_path / "bits.png")
    three = np.repeat(gray[:, :, None], 3, 2)
    assert (_opened(tmp_path / "palette.png")[0] == np.asarray(palette.convert("RGB"))).all()
    assert (_opened(tmp_path / "gray.png")[0] == three).all() and (
        _opened(tmp_path / "gray alpha.png")[0] == three
    ).all()
    assert (_opened(tmp_path / "deep.png")[0] == three).all()
    assert (_opened(tmp_path / "a.bmp")[0] == rgb).all()
    assert (_opened(tmp_path / "bits.png")[0] == (three > 128) * 255).all()


def test_cmyk_is_ink_on_white(tmp_path):
    Image.new("CMYK", (16, 16), (255, 0, 0, 0)).save(tmp_path / "cyan.jpg", quality=100)
    red, green, blue = _opened(tmp_path / "cyan.jpg")[0][8, 8]
    assert red < 60 and green > 120 and blue > 180


def test_16_bit_rgb(tmp_path):
    """A 16 bit RGB PNG, which Pillow cannot write: put together by hand."""
    import struct
    import zlib

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + struct.pack(">6H", 0, 65535, 32896, 65535, 0, 257) for _ in range(2))
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 2, 16, 2, 0, 0, 0))
    (tmp_path / "a.png").write_bytes(data + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))
    assert _opened(tmp_path / "a.png")[0][0].tolist() == [[0, 255, 128], [255, 0, 1]]


def test_the_first_frame_of_a_moving_picture(tmp_path):
    frames = [Image.new("RGB", (8, 8), color) for color in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    for name in ("a.gif", "a.webp", "a.png"):
        extra = {"lossless": True} if name.endswith("webp") else {}
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], duration=50, **extra)
        assert (_opened(tmp_path / name)[0] == (255, 0, 0)).all(), name


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow has no AVIF")
def test_avif(tmp_path):
    Image.new("RGB", (32, 32), (200, 100, 50)).save(tmp_path / "a.avif", quality=100)
    assert np.abs(_opened(tmp_path / "a.avif")[0].astype(int) - (200, 100, 50)).max() <= 4


def test_avif_without_support_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "a.avif").write_bytes(b"\0\0\0\x1cftypavif")
    monkeypatch.setattr(Image, "registered_extensions", dict)
    with pytest.raises(ValueError, match="this Pillow cannot read AVIF"):
        images.open_image(tmp_path / "a.avif")


def test_transparency_is_over_white_and_kept_as_alpha(tmp_path):
    pixels = _noise(channels=4)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    found, alpha = _opened(tmp_path / "a.png")
    share = pixels[:, :, 3:].astype(float) / 255
    assert (
        np.abs(found - (pixels[:, :, :3] * share + 255 * (1 - share))).max() <= 1.01
        and (alpha == pixels[:, :, 3]).all()
    )
    palette = Image.fromarray(_noise()).quantize(4)
    palette.save(tmp_path / "p.png", transparency=0)
    assert (_opened(tmp_path / "p.png")[1] == np.where(np.asarray(palette) == 0, 0, 255)).all()
    assert _opened(tmp_path / "p.png")[0][np.asarray(palette) == 0].min() == 255


def test_damage_is_a_value_error(tmp_path):
    buffer = io.BytesIO()
    Image.fromarray(_noise((64, 64))).save(buffer, "PNG")
    for name, data in {"cut.png": buffer.getvalue()[:500], "empty.png": b"", "words.jpg": b"no picture"}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError):
            images.open_image(tmp_path / name)


def test_a_bomb_is_refused(tmp_path, monkeypatch):
    Image.fromarray(_noise((64, 64))).save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match="decompression bomb"):
        images.open_image(tmp_path / "a.png")


@pytest.mark.parametrize("name", ["masks/A.PNG", "Masks/A.png", "MASKS/A.PNG", "A.mask.PNG", "A.MASK.JPG"])
def test_masks_in_capitals(tmp_path, name):
    for file in ("A.PNG", name):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    assert images.find_images(tmp_path) == [tmp_path / "A.PNG"] and images.has_masks(tmp_path)
    assert images.mask_file(tmp_path / "A.PNG", tmp_path).samefile(tmp_path / name)


def test_masks_and_hidden_folders_are_no_pictures(tmp_path):
    for name in ("a.png", "a.mask.png", "masks/a.png", ".cache/b.png", "deep/c.JPG", "deep/masks/c.png", "d.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    assert [p.relative_to(tmp_path).as_posix() for p in images.find_images(tmp_path)] == ["a.png", "deep/c.JPG"]
    assert images.mask_file(tmp_path / "a.png", tmp_path) == tmp_path / "a.mask.png"
    assert images.mask_file(tmp_path / "deep" / "c.JPG", tmp_path) == tmp_path / "deep" / "masks" / "c.png"
    (tmp_path / "a.mask.png").unlink()
    assert images.mask_file(tmp_path / "a.png", tmp_path) == tmp_path / "masks" / "a.png"
    assert images.mask_file(tmp_path / "deep" / "a.png", tmp_path) == tmp_path / "masks" / "a.png"


@pytest.mark.parametrize("place", [(0.5, 0.5), (0.5, 0.0), (0.0, 0.0), (1.0, 1.0), (0.3, 0.8)])
@pytest.mark.parametrize("size", [(100, 50), (50, 100), (640, 630), (31, 200), (64, 48)])
def test_a_frame_is_pillows_resize_and_crop(size, place):
    bucket = (64, 48)
    picture = Image.fromarray(_noise(size))
    found = frame(size, bucket, place)
    scaled = picture.resize(found.scaled, Image.Resampling.LANCZOS)
    assert found.scaled[0] >= 64 and found.scaled[1] >= 48 and (found.scaled[0] == 64 or found.scaled[1] == 48)
    assert abs(found.scaled[0] / found.scaled[1] / (size[0] / size[1]) - 1) < 0.02  # the shape stays
    assert 0 <= found.left <= found.scaled[0] - 64 and 0 <= found.top <= found.scaled[1] - 48
    expected = np.asarray(scaled)[found.top : found.top + 48, found.left : found.left + 64]
    assert (np.asarray(images.crop_image(picture, found)) == expected).all()
    assert found.enlarged == (size[0] < 64 or size[1] < 48)
    mirrored = ImageOps.mirror(scaled).crop(found.flipped.box)
    assert (np.asarray(mirrored) == expected[:, ::-1]).all()


@pytest.mark.parametrize("size", [(4, 12_000), (12_000, 4)])
def test_a_long_strip_is_never_scaled_whole(monkeypatch, size):
    made = []

    def resize(picture, target, *others):
        made.append(target)
        return Image.new(picture.mode, target)

    monkeypatch.setattr(Image.Image, "resize", resize)
    framing = frame(size, (512, 512))
    assert images.crop_image(Image.new("RGB", size), framing).size == (512, 512)
    assert images.latent_mask(Image.new("L", size), framing, (64, 64)).shape == (1, 64, 64)
    assert made == [(512, 512), (512, 512)]


@pytest.mark.parametrize("place", [(0.5, 0.5), (0.0, 0.0), (1.0, 1.0), (0.3, 0.8)])
@pytest.mark.parametrize("size", [(4, 1201), (1201, 4), (7, 1000)])
def test_a_strip_that_is_not_scaled_whole_looks_the_same(monkeypatch, size, place):
    pixels = _noise(size) // 4 + 96  # so that Pillow clips nothing between its two passes, whose order is its own
    picture, mask = Image.fromarray(pixels), Image.fromarray(pixels[:, :, 0])
    framing = frame(size, (64, 48), place)
    expected = np.asarray(images.crop_image(picture, framing)).astype(int)
    expected_mask = images.latent_mask(mask, framing, (6, 8))
    monkeypatch.setattr(images, "MOST_SCALED", 0)
    found = np.asarray(images.crop_image(picture, framing)).astype(int)
    assert np.abs(found - expected).max() <= 2
    assert (images.latent_mask(mask, framing, (6, 8)) - expected_mask).abs().max() < 2 / 255


def test_what_sdxl_is_told():
    found = frame((2000, 1000), (1024, 1024), (0.5, 0.0))
    assert found.scaled == (2048, 1024) and found.size_conditioning() == {
        "width": 2000,
        "height": 1000,
        "crop_w": 512,
        "crop_h": 0,
        "target_width": 1024,
        "target_height": 1024,
    }
    left = frame((2000, 1000), (1024, 1024), (0.0, 0.0))
    assert left.size_conditioning()["crop_w"] == 0 and left.flipped.size_conditioning()["crop_w"] == 1024


def test_a_mask_is_the_mean_of_the_pixels_under_each_latent():
    pixels = _noise((64, 48), 1)[:, :, 0]
    found = images.latent_mask(Image.fromarray(pixels), frame((64, 48), (64, 48)), (6, 8))
    expected = pixels.reshape(6, 8, 8, 8).astype(np.float64).mean((1, 3)) / 255
    assert found.shape == (1, 6, 8) and torch.allclose(found[0].double(), torch.from_numpy(expected), atol=1e-6)


def test_a_mask_follows_the_cut_of_its_picture():
    pixels = np.zeros((50, 100), np.uint8)
    pixels[:, 50:] = 255
    framing = frame((100, 50), (64, 64), (1.0, 0.0))  # scaled to 128x64, the right half kept
    assert torch.equal(images.latent_mask(Image.fromarray(pixels), framing, (8, 8))[0, :, 1:], torch.ones(8, 7))
    framing = frame((100, 50), (64, 64), (0.0, 0.0))
    assert torch.equal(images.latent_mask(Image.fromarray(pixels), framing, (8, 8))[0, :, :7], torch.zeros(8, 7))


def test_a_contact_sheet_shows_36_pictures_in_rows():
    colors = [(10 + 6 * number, 250 - 5 * number, 60) for number in range(40)]
    pictures = [Image.new("RGB", (40, 20), color) for color in colors]
    expected = np.full((36, 20, 20, 3), 32, np.uint8)
    expected[:, 6:14, 2:18] = np.array(colors[:36], np.uint8)[:, None, None]  # 16 x 8 in the middle of 20 x 20
    expected = expected.reshape(6, 6, 20, 20, 3).swapaxes(1, 2).reshape(120, 120, 3)
    assert (np.asarray(images.contact_sheet(pictures, side=20)) == expected).all()
    assert images.contact_sheet(pictures[:2]).size == (320, 160)
    assert images.contact_sheet(pictures[:7]).size == (960, 320)


def test_sheets_below_each_other_have_their_background_beside_the_narrower_one():
    red = [Image.new("RGB", (16, 16), (200, 0, 0))]
    narrow, wide = images.contact_sheet(red, side=20), images.contact_sheet(red * 2, side=20)
    both = images.stack_sheets([images.image_tensor(narrow), images.image_tensor(wide)])
    background = images.image_tensor(narrow)[0, 0, 0]
    assert both.shape == (1, 40, 40, 3) and torch.equal(both[:, 20:], images.image_tensor(wide))
    assert torch.equal(both[:, :20, :20], images.image_tensor(narrow)) and (both[:, :20, 20:] == background).all()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp"])
def test_a_header_says_what_the_whole_picture_does(tmp_path, suffix, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.new("RGB", (40, 20)).save(tmp_path / f"a{suffix}", exif=exif)
    whole, alpha = images.open_image(tmp_path / f"a{suffix}")
    assert images.open_header(tmp_path / f"a{suffix}") == (whole.size, alpha is not None)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16", "CMYK"])
def test_headers_and_thumbnails_of_every_kind_of_pixels(tmp_path, mode):
    path = tmp_path / ("a.jpg" if mode == "CMYK" else "a.png")
    Image.new(mode, (400, 200)).save(path)
    whole, alpha = images.open_image(path)
    assert images.open_header(path) == (whole.size, alpha is not None)
    small = Image.open(io.BytesIO(images.thumbnail(path, 100)))
    assert small.format == "WEBP" and small.size == (100, 50)


def test_a_header_of_what_is_no_picture(tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0")
    for read in (images.open_header, lambda path: images.thumbnail(path, 8)):
        with pytest.raises(ValueError, match="not a picture that can be read"):
            read(tmp_path / "a.png")
    Image.new("RGB", (40, 20)).save(tmp_path / "a.png")
    monkeypatch.setattr(pictures, "MOST_PIXELS", 799)
    with pytest.raises(ValueError, match="40x20 is too large for a thumbnail"):
        images.thumbnail(tmp_path / "a.png", 8)


@pytest.mark.parametrize("in_text", [True, False])
def test_broken_exif_does_not_count_as_broken_pixels(tmp_path, in_text):
    """As img2img of a web UI writes it (a text chunk), and as an eXIf chunk without a TIFF's header."""
    pixels, path, texts = _noise(), tmp_path / "a.png", PngImagePlugin.PngInfo()
    if in_text:
        texts.add_text("exif", str(b"Exif\0\0MM\0*\0\0\0\x08\0\0"))
        Image.fromarray(pixels).save(path, pnginfo=texts)
    else:
        Image.fromarray(pixels).save(path, exif=b"Exif\0\0\0\x08\0\x02\x01\x12\0\x03")
    assert (_opened(path)[0] == pixels).all()
    assert images.open_header(path) == ((16, 12), False)
    assert (np.asarray(images.open_mask(path)[0]) == np.asarray(Image.fromarray(pixels).convert("L"))).all()
    assert Image.open(io.BytesIO(images.thumbnail(path, 16))).size == (16, 12)


_SHAPE = np.zeros((12, 16), np.uint8)
_SHAPE[:6] = 255
_SHAPE[6] = 100


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
@pytest.mark.parametrize("color", [0, 255, 90])
def test_a_mask_drawn_in_transparency_is_read(tmp_path, mode, color):
    """A shape of one color on an empty layer, whatever the color of the pixels that nobody sees."""
    shape = np.where(_SHAPE == 100, 0, _SHAPE) if mode == "P" else _SHAPE
    if mode == "P":
        image = Image.fromarray(np.where(shape, 0, 1).astype(np.uint8), "P")
        image.putpalette([color] * 3 + [9, 200, 77])
        image.save(tmp_path / "a.png", transparency=1)
    else:
        hidden = np.where(shape, color, 255 - color).astype(np.uint8)
        layers = [hidden] * (3 if mode == "RGBA" else 1)
        Image.fromarray(np.dstack([*layers, shape]), mode).save(tmp_path / "a.png")
    mask, is_alpha = images.open_mask(tmp_path / "a.png")
    assert is_alpha and mask.mode == "L" and (np.asarray(mask) == shape).all()


def test_a_mask_whose_shape_is_in_its_color_is_read_by_it(tmp_path):
    opaque, half = np.full_like(_SHAPE, 255), np.full_like(_SHAPE, 128)
    for name, alpha in {"opaque": opaque, "half": half, "left": np.tile(np.r_[[0] * 2, [255] * 14], (12, 1))}.items():
        Image.fromarray(np.dstack([_SHAPE, _SHAPE, _SHAPE, alpha.astype(np.uint8)])).save(tmp_path / f"{name}.png")
        mask, is_alpha = images.open_mask(tmp_path / f"{name}.png")
        assert not is_alpha and (np.asarray(mask) == _SHAPE).all(), name


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "it is HEIC, whatever its name says; save it as PNG"),
        (b"8BPS\0\1" + bytes(30), "it is PSD, whatever its name says; save it as PNG"),
        (b"<svg/>", "it is SVG, whatever its name says; save it as PNG"),
        (b"<!doctype html>", "it is a web page, whatever its name says"),
        (b"\x89PNG\r\n\x1a\n", "it is a damaged PNG"),
        (b"", "it is empty"),
    ],
)
def test_what_is_no_picture_is_named_for_what_it_is(tmp_path, content, said):
    (tmp_path / "a.jpg").write_bytes(content)
    for read in (images.open_image, images.open_header, images.open_mask, lambda path: images.thumbnail(path, 8)):
        with pytest.raises(ValueError) as caught:
            read(tmp_path / "a.jpg")
        assert said in str(caught.value)


def test_avif_under_another_name_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "a.jpg").write_bytes(b"\0\0\0\x1cftypavif\0\0\0\0mif1miaf")
    Image.init()
    monkeypatch.delitem(Image.OPEN, "AVIF", raising=False)
    monkeypatch.setattr(Image, "registered_extensions", dict)
    with pytest.raises(ValueError, match="it is AVIF, and this Pillow cannot read AVIF"):
        images.open_image(tmp_path / "a.jpg")
