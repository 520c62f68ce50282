"""Folders of pictures: formats, orientation, transparency, damage, captions, repeats, buckets, the held-out share and the digest."""

import shutil

import numpy as np
import pytest
import torch
from graft_nodes.training import buckets, captions, encoding
from graft_nodes.training.dataset import Conditioning
from graft_nodes.training.folder import FolderSettings, read_folder
from graft_nodes.training.folder_report import report
from graft_nodes.training.pictures import fitted, open_picture
from PIL import Image

SMALL = {"resolution": 64, "bucket_step": 16}


def _picture(path, size=(64, 64), seed=0, **save):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, **save)
    return path


def _pictures(root, count=10):
    for i in range(count):
        _picture(root / f"{i}.png", seed=i).with_suffix(".txt").write_text(f"caption {i}", encoding="utf-8")
    return root


def test_an_exif_orientation_turns_the_picture(tmp_path):
    image = Image.new("RGB", (40, 20), (0, 0, 255))
    image.paste((255, 0, 0), (0, 0, 10, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # rows run right to left from the top: shown turned clockwise
    image.save(tmp_path / "a.jpg", exif=exif, quality=95)
    found = np.asarray(open_picture(tmp_path / "a.jpg")[0])
    assert found.shape == (40, 20, 3)
    assert found[2, 10, 0] > 200 > 60 > found[30, 10, 0]


def test_cmyk_grey_palette_and_16_bit_become_rgb(tmp_path):
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "cmyk.jpg", quality=95)
    Image.new("L", (8, 8), 77).save(tmp_path / "grey.png")
    Image.new("P", (8, 8), 0).save(tmp_path / "palette.png")
    Image.fromarray(np.full((8, 8), 257 * 100, dtype=np.uint16)).save(tmp_path / "deep.png")
    _picture(tmp_path / "web.webp", lossless=True)
    found = {path.stem: np.asarray(open_picture(path)[0]) for path in tmp_path.iterdir()}
    assert all(pixels.shape[2] == 3 for pixels in found.values())
    assert found["cmyk"][4, 4, 0] > 200 > 60 > found["cmyk"][4, 4, 1]
    assert (found["grey"] == 77).all() and (found["deep"] == 100).all()


def test_transparency_lies_over_white(tmp_path):
    image = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    image.putpixel((0, 0), (255, 0, 0, 255))
    image.putpixel((1, 0), (0, 0, 0, 51))
    image.save(tmp_path / "a.png")
    found = np.asarray(open_picture(tmp_path / "a.png")[0])
    assert found[0, 0].tolist() == [255, 0, 0] and found[0, 1].tolist() == [204, 204, 204] and found[3, 3].tolist() == [255, 255, 255]


def test_damaged_pictures_are_named_and_the_others_counted(tmp_path):
    _pictures(tmp_path, 4)
    whole = (tmp_path / "0.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.jpg").write_text("no picture")
    (tmp_path / "empty.webp").write_bytes(b"")
    (tmp_path / "3.txt").write_bytes(b"\xff\xfe caption")
    listing = read_folder(tmp_path, FolderSettings(**SMALL))
    assert len(listing.train) + len(listing.held_out) == 3
    assert [problem.split(":")[0] for problem in listing.problems] == ["3.png", "cut.png", "empty.webp", "text.jpg"]
    assert "3.txt: the caption is not UTF-8" in listing.problems[0]
    text = report(listing)
    assert "4 left out" in text and "cut.png" in text and "3 pictures: 2 to train on, 1 held out" in text


def test_a_folder_without_a_usable_picture(tmp_path):
    with pytest.raises(ValueError, match="has no pictures"):
        read_folder(tmp_path, FolderSettings(**SMALL))
    (tmp_path / "a.png").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"no picture in folder[\s\S]*a\.png"):
        read_folder(tmp_path, FolderSettings(**SMALL))


def test_captions_beside_apart_and_missing(tmp_path):
    for name in "abc":
        _picture(tmp_path / f"{name}.png")
    (tmp_path / "captions").mkdir()
    (tmp_path / "a.txt").write_text("\ufeff beside,\n two lines ", encoding="utf-8")
    for name in "ab":
        (tmp_path / "captions" / f"{name}.txt").write_text("apart", encoding="utf-8")

    def read(mode):
        listing = read_folder(tmp_path, FolderSettings(captions=mode, validation=0.0, **SMALL))
        return {entry.name[0]: entry.caption.plain for entry in listing.train}, report(listing)

    assert read("auto")[0] == {"a": "beside, two lines", "b": "apart", "c": ""}
    assert read("txt")[0] == {"a": "beside, two lines", "b": "", "c": ""}
    assert read("folder")[0] == {"a": "apart", "b": "apart", "c": ""}
    assert "1 without a caption, the empty caption is used: c.png" in read("auto")[1]
    with pytest.raises(ValueError, match=r"captions is 'pdf', expected one of auto, txt, folder, json, yaml"):
        FolderSettings(captions="pdf")


def test_repeats_multiply_with_kohyas_folders(tmp_path):
    _picture(tmp_path / "data" / "3_cats" / "a.png")
    _picture(tmp_path / "data" / "plain" / "b.png")
    listing = read_folder(tmp_path / "data", FolderSettings(repeats=2, validation=0.0, **SMALL))
    assert {entry.name: entry.repeats for entry in listing.train} == {"3_cats/a.png": 6, "plain/b.png": 2}
    assert captions.repeats_of(tmp_path / "4_dogs" / "x.png", tmp_path / "4_dogs") == 4


@pytest.mark.parametrize("resolution", [256, 512, 640, 1024])
@pytest.mark.parametrize("step", [8, 64])
def test_buckets_are_multiples_of_the_step_below_the_area(resolution, step):
    found = buckets.sizes(resolution, step)
    assert (resolution, resolution) in found and len(set(found)) == len(found)
    for w, h in found:
        assert w % step == h % step == 0 and w * h <= resolution**2 and max(w, h) <= 4 * min(w, h)
        assert (w + step) * h > resolution**2 or (h + step) * w > resolution**2  # nothing is given away in both directions
        assert (h, w) in found


def test_the_bucket_is_the_nearest_in_log_ratio():
    choices = buckets.sizes(512, 64)
    for w, h in [(512, 512), (1000, 500), (500, 1000), (3000, 400), (640, 480), (7, 9)]:
        best = min(abs(np.log(a / b) - np.log(w / h)) for a, b in choices)
        a, b = buckets.nearest(w, h, choices)
        assert abs(np.log(a / b) - np.log(w / h)) == pytest.approx(best)


@pytest.mark.parametrize("size", [(100, 50), (50, 100), (64, 64), (640, 630), (31, 200)])
def test_fitting_scales_to_cover_and_crops_the_middle(size):
    bucket = (64, 48)
    across, down = np.meshgrid(np.linspace(0, 255, size[0]), np.linspace(0, 255, size[1]))
    picture = Image.fromarray(np.stack([across, down, across * 0], -1).round().astype(np.uint8))
    found = np.asarray(fitted(picture, buckets.frame(size, bucket)), dtype=float)
    assert found.shape == (48, 64, 3)
    assert found[..., 0].mean() == pytest.approx(127.5, abs=3) and found[..., 1].mean() == pytest.approx(127.5, abs=3)
    scale = max(bucket[0] / size[0], bucket[1] / size[1])
    assert np.ptp(found[24, :, 0]) == pytest.approx(255 * min(1, bucket[0] / (size[0] * scale)), abs=8)


def test_the_held_out_share_depends_on_contents_alone(tmp_path):
    _pictures(tmp_path / "a")
    (tmp_path / "b").mkdir()
    for i, path in enumerate(sorted((tmp_path / "a").glob("*.png"), reverse=True)):
        shutil.copy(path, tmp_path / "b" / f"other{i}.png")
    one, two = (read_folder(tmp_path / name, FolderSettings(validation=0.3, **SMALL)) for name in "ab")
    assert len(one.held_out) == 3 and {e.sha256 for e in one.held_out} == {e.sha256 for e in two.held_out}
    for share, count in ((0.0, 0), (0.01, 1), (0.89, 9)):
        assert len(read_folder(tmp_path / "a", FolderSettings(validation=share, **SMALL)).held_out) == count


def _encode(root, digest="encoders", **settings):
    listing = read_folder(root, FolderSettings(**{**SMALL, **settings}))
    seen = []

    def encode_captions(texts):
        seen.extend(texts)
        return {text: Conditioning(torch.zeros(1, 1, 1)) for text in texts}

    dataset, sheet = encoding.encode(listing, lambda pixels: pixels.movedim(-1, 1)[:, :, ::8, ::8], encode_captions, (digest, digest))
    return dataset, sheet, seen


def test_encoding_gives_latents_captions_and_a_sheet(tmp_path):
    dataset, sheet, seen = _encode(_pictures(tmp_path, 5), flip=0.5)
    assert len(dataset.pictures) == 4 and len(dataset.held_out) == 1
    assert sorted(seen) == ["", *(f"caption {i}" for i in range(5))]
    picture = next(p for p in dataset.pictures + dataset.held_out if p.name == "0.png")
    expected = torch.from_numpy(np.asarray(Image.open(tmp_path / "0.png"), dtype=np.float32) / 255).movedim(-1, 0)
    assert torch.equal(picture.latent, expected[:, ::8, ::8]) and torch.equal(picture.flipped, expected.flip(2)[:, ::8, ::8])
    assert sheet.shape[0] == 1 and sheet.shape[3] == 3 and sheet.min() >= 0 and sheet.max() <= 1


def test_the_digest_follows_contents_and_settings_and_no_place(tmp_path):
    _pictures(tmp_path / "a", 4)
    shutil.copytree(tmp_path / "a", tmp_path / "b" / "deep")
    plain = _encode(tmp_path / "a")[0].digest
    assert _encode(tmp_path / "b" / "deep")[0].digest == plain
    others = [_encode(tmp_path / "a", **s)[0].digest for s in ({"flip": 0.1}, {"repeats": 2}, {"validation": 0.5}, {"resolution": 48})]
    others.append(_encode(tmp_path / "a", "other")[0].digest)
    (tmp_path / "a" / "0.txt").write_text("changed")
    others.append(_encode(tmp_path / "a")[0].digest)
    _picture(tmp_path / "a" / "1.png", seed=99)
    others.append(_encode(tmp_path / "a")[0].digest)
    assert len({plain, *others}) == len(others) + 1
