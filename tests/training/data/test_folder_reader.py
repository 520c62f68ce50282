"""Folders of pictures: formats, orientation, transparency, damage, captions, repeats, buckets, the held-out share and
the digest.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import sys
from itertools import permutations

import numpy as np
import pytest
import torch
from graft_nodes.comfyui_api_stubs.tests import ghostscript as starting
from graft_nodes.storage.digest import sha256_of_file
from graft_nodes.storage.safetensors import read_header
from graft_nodes.training.data import buckets, encoding, folder_reader
from graft_nodes.training.data.cache import KINDS, Cache
from graft_nodes.training.data.dataset import Conditioning
from graft_nodes.training.data.filters import Filters
from graft_nodes.training.data.folder_reader import glance_at_folder, read_folder
from graft_nodes.training.data.folder_report import editor_data, glance_data, report
from graft_nodes.training.data.folder_settings import FolderSettings
from graft_nodes.training.data.images import crop_image, open_image
from graft_nodes.training.data.layouts.layout import kohya_repeats
from graft_nodes.training.data.stored_latent import read_latent
from graft_nodes.training.random_draws import generator
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
    found = np.asarray(open_image(tmp_path / "a.jpg")[0])
    assert found.shape == (40, 20, 3)
    assert found[2, 10, 0] > 200 > 60 > found[30, 10, 0]


def test_cmyk_gray_palette_and_16_bit_become_rgb(tmp_path):
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "cmyk.jpg", quality=95)
    Image.new("L", (8, 8), 77).save(tmp_path / "gray.png")
    Image.new("P", (8, 8), 0).save(tmp_path / "palette.png")
    Image.fromarray(np.full((8, 8), 257 * 100, dtype=np.uint16)).save(tmp_path / "deep.png")
    _picture(tmp_path / "web.webp", lossless=True)
    found = {path.stem: np.asarray(open_image(path)[0]) for path in tmp_path.iterdir()}
    assert all(pixels.shape[2] == 3 for pixels in found.values())
    assert found["cmyk"][4, 4, 0] > 200 > 60 > found["cmyk"][4, 4, 1]
    assert (found["gray"] == 77).all() and (found["deep"] == 100).all()


def test_transparency_lies_over_white(tmp_path):
    image = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    image.putpixel((0, 0), (255, 0, 0, 255))
    image.putpixel((1, 0), (0, 0, 0, 51))
    image.save(tmp_path / "a.png")
    found = np.asarray(open_image(tmp_path / "a.png")[0])
    assert (
        found[0, 0].tolist() == [255, 0, 0]
        and found[0, 1].tolist() == [204, 204, 204]
        and found[3, 3].tolist() == [255, 255, 255]
    )


def test_damaged_pictures_are_named_and_the_others_counted(tmp_path):
    _pictures(tmp_path, 4)
    whole = (tmp_path / "0.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.jpg").write_text("no picture")
    (tmp_path / "empty.webp").write_bytes(b"")
    (tmp_path / "3.txt").write_bytes(b"\xff caption")
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
    (tmp_path / "a.txt").write_text("\ufeff\n beside,  two words \n another line", encoding="utf-8")
    for name in "ab":
        (tmp_path / "captions" / f"{name}.txt").write_text("apart", encoding="utf-8")

    def read(mode):
        listing = read_folder(tmp_path, FolderSettings(captions=mode, validation=0.0, **SMALL))
        return {entry.name[0]: entry.caption.plain for entry in listing.train}, report(listing)

    assert read("auto")[0] == {"a": "beside, two words", "b": "apart", "c": ""}
    assert read("txt")[0] == {"a": "beside, two words", "b": "", "c": ""}
    assert "1 captions have more than one line, and only the first is used" in read("txt")[1]
    assert read("folder")[0] == {"a": "apart", "b": "apart", "c": ""}
    assert "1 without a caption, the empty caption is used: c.png" in read("auto")[1]
    with pytest.raises(ValueError, match=r"caption source is 'pdf', expected one of auto, txt, folder, json, yaml"):
        FolderSettings(captions="pdf")


def test_repeats_multiply_with_kohyas_folders(tmp_path):
    _picture(tmp_path / "data" / "3_cats" / "a.png")
    _picture(tmp_path / "data" / "plain" / "b.png")
    listing = read_folder(tmp_path / "data", FolderSettings(repeats=2, validation=0.0, **SMALL))
    assert {entry.name: entry.repeats for entry in listing.train} == {"3_cats/a.png": 6, "plain/b.png": 2}
    assert kohya_repeats(tmp_path / "4_dogs" / "x.png", tmp_path / "4_dogs") == 4


def test_a_folder_of_no_repeats_is_left_out(tmp_path):
    for number, name in enumerate(("0_off/a.png", "0_off/in/b.png", "1_on/c.png", "0_off/2_on/d.png", "0_data/e.png")):
        _picture(tmp_path / "0_data" / name, seed=number)
    listing = read_folder(tmp_path / "0_data", FolderSettings(validation=0.0, **SMALL))
    assert {entry.name: entry.repeats for entry in listing.train} == {"1_on/c.png": 1, "0_off/2_on/d.png": 2}
    assert "3 left out with 0 repeats by folder name, as kohya's 0_name" in listing.notes
    alone = read_folder(tmp_path / "0_data" / "0_off" / "in", FolderSettings(validation=0.0, **SMALL))
    assert len(alone.train) == 1
    chosen = read_folder(tmp_path / "0_data" / "0_off", FolderSettings(validation=0.0, **SMALL))
    assert {entry.name: entry.repeats for entry in chosen.train} == {"a.png": 1, "in/b.png": 1, "2_on/d.png": 2}


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-8"])
def test_captions_with_a_mark_are_read(tmp_path, encoding):
    _picture(tmp_path / "a.png").with_suffix(".txt").write_bytes("\ufeffein Mädchen\r\nx".encode(encoding))
    listing = read_folder(tmp_path, FolderSettings(validation=0.0, **SMALL))
    assert listing.train[0].caption.plain == "ein Mädchen" and not listing.problems


def _kohya(caption, prefix="", separator="", keep=0, shuffle=False):
    """Every caption that sd-scripts' process_caption may make."""
    caption = f"{prefix} {caption}" if prefix else caption
    caption = caption.split("\n")[0]
    if not shuffle:
        return {caption}
    if separator and separator in caption:
        fixed, free = ([tag.strip() for tag in part.split(",") if tag.strip()] for part in caption.split(separator, 1))
    else:
        tags = [tag.strip() for tag in caption.split(",")]
        fixed, free = tags[:keep], tags[keep:]
    return {", ".join([*fixed, *order]) for order in permutations(free)}


@pytest.mark.parametrize("text", ["a, b, c", "one ||| a, b", "a, b\nc, d"])
@pytest.mark.parametrize("prefix", ["", "photo,", "photo of"])
@pytest.mark.parametrize("separator", ["", "|||"])
@pytest.mark.parametrize(("shuffle", "keep"), [(False, 0), (True, 0), (True, 1)])
def test_captions_are_kohyas(tmp_path, text, prefix, separator, shuffle, keep):
    _picture(tmp_path / "a.png").with_suffix(".txt").write_text(text, encoding="utf-8")
    given = [f"caption_prefix: '{prefix}'", f"keep_separator: '{separator}'"]
    settings = FolderSettings(
        validation=0.0,
        shuffle_tags=shuffle,
        keep_tags=keep,
        filters=Filters.parse("\n".join(given)),
        **SMALL,
    )
    caption = read_folder(tmp_path, settings).train[0].caption
    draws = {caption.draw(generator(0, i, "test")) for i in range(400)}
    assert draws == _kohya(text, prefix, separator, keep, shuffle)


def test_a_separator_that_does_nothing_is_said_and_part_of_the_digest(tmp_path):
    path = _picture(tmp_path / "a.png").with_suffix(".txt")
    settings = FolderSettings(validation=0.0, filters=Filters.parse("keep_separator: '|||'"), **SMALL)
    path.write_text("one, a, b", encoding="utf-8")
    assert "keep_separator" not in report(read_folder(tmp_path, settings))
    path.write_text("one ||| a, b", encoding="utf-8")
    listing = read_folder(tmp_path, settings)
    assert "keep_separator is part of 1 captions" in report(listing)
    shuffled = dataclasses.replace(settings, shuffle_tags=True)
    assert "keep_separator" not in report(read_folder(tmp_path, shuffled))


def test_what_is_not_read_is_said(tmp_path):
    _picture(tmp_path / "data" / "a.png")
    _picture(tmp_path / "data" / "deep" / "b.TIFF", seed=1)
    (tmp_path / "data" / "c.heic").write_bytes(b"x")
    _picture(tmp_path / "other" / "d.png", seed=2)
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "other", target_is_directory=True)
    listing = read_folder(tmp_path / "data", FolderSettings(validation=0.0, **SMALL))
    assert [entry.name for entry in listing.train] == ["a.png"]
    said = report(listing)
    assert "1 linked folders are not read: linked;" in said
    assert "2 pictures of formats that are not read: c.heic, deep/b.TIFF;" in said


def test_formats_that_are_not_read_are_counted(tmp_path):
    _picture(tmp_path / "a.png")
    for ending in ("tif", "tiff", "heic", "heif", "jxl", "jp2", "tga", "psd", "svg"):
        (tmp_path / f"picture.{ending}").write_bytes(b"x")
    for ending in ("avi", "mpg", "mpeg", "ts", "wmv", "flv", "ogv", "3gp"):
        (tmp_path / f"clip.{ending}").write_bytes(b"x")
    said = report(read_folder(tmp_path, FolderSettings(validation=0.0, **SMALL)))
    assert "9 pictures of formats that are not read: picture.heic, picture.heif, picture.jp2, picture.jxl, " in said
    assert "8 clips of formats that are not read: clip.3gp, clip.avi, clip.flv, clip.mpeg, clip.mpg …;" in said


def test_a_picture_of_which_more_than_half_is_cut_is_said(tmp_path):
    _picture(tmp_path / "long.png", (640, 64), seed=1)
    _picture(tmp_path / "square.png", (64, 64), seed=2)
    said = report(read_folder(tmp_path, FolderSettings(validation=0.0, **SMALL)))
    assert "1 lose more than half of the picture to the shape of their bucket: long.png" in said


def test_copies_of_a_picture_are_on_one_side_of_the_split(tmp_path):
    for i in range(12):
        _picture(tmp_path / f"{i}.png", seed=i // 3)
    for share in (0.1, 0.25, 0.4, 0.5, 0.75, 0.9):
        listing = read_folder(tmp_path, FolderSettings(validation=share, **SMALL))
        train, held_out = ({entry.sha256 for entry in part} for part in (listing.train, listing.held_out))
        assert train and held_out and not train & held_out, share


def test_copies_of_one_picture_are_not_held_out(tmp_path):
    for i in range(3):
        _picture(tmp_path / f"{i}.png")
    listing = read_folder(tmp_path, FolderSettings(**SMALL))
    assert len(listing.train) == 3 and not listing.held_out
    assert "copies of one picture cannot be held out too, so there is no validation" in report(listing)


def test_only_a_name_after_the_number_makes_it_repeats(tmp_path):
    for number, name in enumerate(("10_1girl", "2024_05_holiday", "2024_05", "3_2b (nier)", "7_", "x_10_y")):
        _picture(tmp_path / "data" / name / "a.png", seed=number)
    listing = read_folder(tmp_path / "data", FolderSettings(validation=0.0, **SMALL))
    assert {entry.name.split("/")[0]: entry.repeats for entry in listing.train} == {
        "10_1girl": 10,
        "2024_05_holiday": 1,
        "2024_05": 1,
        "3_2b (nier)": 3,
        "7_": 7,
        "x_10_y": 1,
    }
    said = report(listing)
    assert "repeats by folder name: 10_1girl 10, 3_2b (nier) 3, 7_ 7\n" in said
    assert "no repeats in 2024_05, 2024_05_holiday: " in said


@pytest.mark.parametrize("name", ["20000000_x", "10001_x/deep"])
def test_a_number_that_nobody_means_is_refused_with_its_folder(tmp_path, name):
    _picture(tmp_path / "data" / name / "a.png")
    _picture(tmp_path / "data" / "b.png", seed=1)
    with pytest.raises(ValueError, match=rf"the folder data/{name} says [\d,]+ repeats .* at most 10,000"):
        read_folder(tmp_path / "data", FolderSettings(**SMALL))


def test_an_endless_epoch_is_refused(tmp_path):
    _picture(tmp_path / "data" / "5000_x" / "a.png")
    with pytest.raises(ValueError, match=r"shows 15,000,000 images, expected at most 10,000,000.*5000_x/a.png"):
        read_folder(tmp_path / "data", FolderSettings(repeats=3000, validation=0.0, **SMALL))


@pytest.mark.parametrize("size", [(100, 50), (50, 100), (64, 64), (640, 630), (31, 200)])
def test_fitting_scales_to_cover_and_crops_the_middle(size):
    bucket = (64, 48)
    across, down = np.meshgrid(np.linspace(0, 255, size[0]), np.linspace(0, 255, size[1]))
    picture = Image.fromarray(np.stack([across, down, across * 0], -1).round().astype(np.uint8))
    found = np.asarray(crop_image(picture, buckets.frame(size, bucket)), dtype=float)
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

    dataset, sheet = encoding.encode(
        listing, lambda pixels: pixels.movedim(-1, 1)[:, :, ::8, ::8], encode_captions, (digest, digest)
    )
    return dataset, sheet, seen


def test_encoding_gives_latents_captions_and_a_sheet(tmp_path):
    dataset, sheet, seen = _encode(_pictures(tmp_path, 5), flip=0.5)
    assert len(dataset.images) == 4 and len(dataset.held_out) == 1
    assert sorted(seen) == ["", *(f"caption {i}" for i in range(5))]
    picture = next(p for p in dataset.images + dataset.held_out if p.name == "0.png")
    expected = torch.from_numpy(np.asarray(Image.open(tmp_path / "0.png"), dtype=np.float32) / 255).movedim(-1, 0)
    assert torch.equal(picture.latent, expected[:, ::8, ::8]) and torch.equal(
        picture.flipped_latent, expected.flip(2)[:, ::8, ::8]
    )
    assert sheet.shape[0] == 1 and sheet.shape[3] == 3 and sheet.min() >= 0 and sheet.max() <= 1


@pytest.mark.parametrize(("count", "validation"), [(1, 0.0), (3, 0.0), (3, 0.5)])
@pytest.mark.parametrize("filters", ["", "keep_separator: two", "wildcards: true"])
def test_the_digest_is_that_of_one_text(tmp_path, count, validation, filters):
    """The whole of a folder as one JSON text, as digests were made from the beginning."""
    for number in range(count):
        path = _picture(tmp_path / f"{number}.png", seed=number)
        path.with_suffix(".txt").write_text(f"one two __lot__ {number}", encoding="utf-8")
    (tmp_path / "wildcards").mkdir()
    (tmp_path / "wildcards" / "lot.txt").write_text("red\nblue", encoding="utf-8")
    settings = FolderSettings(validation=validation, filters=Filters.parse(filters), **SMALL)
    listing = read_folder(tmp_path, settings)
    body = {"train": [], "held out": [], "size conditioning": True}
    for name, entries in (("train", listing.train), ("held out", listing.held_out)):
        body[name] = [entry.identity() for entry in entries]
    if "separator" in filters:
        body["separators"] = "part of the text"
    if "wildcards" in filters:
        body["word lists"] = listing.train[0].caption.rules.lists.digest
    assert listing.digest == hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def test_the_digest_follows_contents_and_settings_and_no_place(tmp_path):
    _pictures(tmp_path / "a", 4)
    shutil.copytree(tmp_path / "a", tmp_path / "b" / "deep")
    plain = _encode(tmp_path / "a")[0].digest
    assert _encode(tmp_path / "b" / "deep")[0].digest == plain
    others = [
        _encode(tmp_path / "a", **s)[0].digest
        for s in ({"flip": 0.1}, {"repeats": 2}, {"validation": 0.5}, {"resolution": 96})
    ]
    others.append(_encode(tmp_path / "a", "other")[0].digest)
    (tmp_path / "a" / "0.txt").write_text("changed")
    others.append(_encode(tmp_path / "a")[0].digest)
    _picture(tmp_path / "a" / "1.png", seed=99)
    others.append(_encode(tmp_path / "a")[0].digest)
    assert len({plain, *others}) == len(others) + 1


def _encoder(calls=None):
    def encode(pixels):
        if calls is not None:
            calls.append(pixels)
        return pixels.movedim(-1, 1)[:, :, ::8, ::8]

    return encode


def _texts(texts):
    return {text: Conditioning(torch.full((1, 1, 1), float(len(text)))) for text in texts}


def _made(
    root, cache=None, calls=None, texts=_texts, captions="auto", filters="", encoders=("vae", "clip"), **settings
):
    settings = FolderSettings(
        **{**SMALL, "validation": 0.0, **settings}, captions=captions, filters=Filters.parse(filters)
    )
    listing = read_folder(root, settings, cache)
    return encoding.encode(listing, _encoder(calls), texts, encoders, cache)[0]


def test_captions_folders_beside_above_and_at_the_top(tmp_path):
    for name in ("images/1.png", "deep/images/2.png", "sub/3.png"):
        _picture(tmp_path / name)
    for name in ("captions/1.txt", "deep/captions/2.txt", "captions/sub/3.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name, encoding="utf-8")
    listing = read_folder(tmp_path, FolderSettings(captions="folder", validation=0.0, **SMALL))
    assert {entry.name: entry.caption.plain for entry in listing.train} == {
        "images/1.png": "captions/1.txt",
        "deep/images/2.png": "deep/captions/2.txt",
        "sub/3.png": "captions/sub/3.txt",
    }


def test_another_encoding_is_said_and_can_be_named(tmp_path):
    _picture(tmp_path / "a.png").with_suffix(".txt").write_bytes("Mädchen".encode("cp1252"))
    with pytest.raises(ValueError, match=r"the caption is not UTF-8 text .*encoding: cp1252"):
        _made(tmp_path)
    assert _made(tmp_path, filters="encoding: cp1252").images[0].caption == "Mädchen"


def test_the_same_picture_and_the_same_name_are_said(tmp_path):
    _picture(tmp_path / "a.png")
    shutil.copy(tmp_path / "a.png", tmp_path / "b.png")
    _picture(tmp_path / "a.webp", seed=1)
    text = report(read_folder(tmp_path, FolderSettings(validation=0.0, **SMALL)))
    assert "the same picture 2 times: a.png, b.png" in text
    assert "one name for 2 pictures, so one caption file too: a.png, a.webp" in text


def test_many_of_a_kind_are_said_in_few_lines(tmp_path):
    for i in range(9):
        _picture(tmp_path / f"{i}.png", seed=i)
        shutil.copy(tmp_path / f"{i}.png", tmp_path / f"again {i}.png")
    notes = read_folder(tmp_path, FolderSettings(validation=0.0, **SMALL)).notes
    assert len(notes) == 6 and notes[-1] == "and 4 more like this"


def test_a_small_picture_is_enlarged_or_left_out(tmp_path):
    _picture(tmp_path / "small.png", (20, 30))
    _picture(tmp_path / "large.png", (80, 80))
    listing = read_folder(tmp_path, FolderSettings(validation=0.0, **SMALL))
    assert len(listing.train) == 2 and "1 smaller than their bucket, enlarged: small.png" in report(listing)
    listing = read_folder(tmp_path, FolderSettings(validation=0.0, filters=Filters.parse("small: skip"), **SMALL))
    assert [e.name for e in listing.train] == ["large.png"]
    assert "1 left out, smaller than their bucket (small: skip): small.png" in report(listing)


def test_one_picture_is_trained_and_said(tmp_path):
    _picture(tmp_path / "a.png")
    listing = read_folder(tmp_path, FolderSettings(**SMALL))
    assert (
        len(listing.train) == 1
        and not listing.held_out
        and "one picture alone cannot be held out too" in report(listing)
    )


def test_settings_that_could_change_nothing_are_refused(tmp_path):
    _pictures(tmp_path, 2)
    with pytest.raises(ValueError, match="keep first tags has no effect where no tags are shuffled or dropped"):
        _made(tmp_path, keep_tags=1)
    with pytest.raises(ValueError, match="masks is alpha, but no picture is transparent"):
        _made(tmp_path, filters="masks: alpha")
    assert _made(tmp_path, keep_tags=1, tag_dropout=0.5).images


def test_captions_that_look_like_wildcards_are_said(tmp_path):
    _picture(tmp_path / "a.png").with_suffix(".txt").write_text("a {red|blue} ball\nanother line", encoding="utf-8")
    assert "wildcards: true in filters makes choices of it: a.png" in report(
        read_folder(tmp_path, FolderSettings(**SMALL))
    )
    assert (
        _made(tmp_path).images[0].caption == "a {red|blue} ball" and _made(tmp_path).images[0].caption_template is None
    )
    picture = _made(tmp_path, filters="wildcards: true").images[0]
    assert picture.caption == "a red ball" and picture.caption_template.varies


def test_latents_that_are_not_finite_are_refused_by_name_and_not_taken_from_the_cache(tmp_path):
    _picture(tmp_path / "a.png")
    _picture(tmp_path / "dark.png", seed=1)
    listing = read_folder(tmp_path, FolderSettings(validation=0.0, **SMALL))
    whole, calls = _encoder(), []

    def overflowing(pixels):
        calls.append(pixels)
        return whole(pixels) * (float("nan") if len(calls) == 2 else 1.0)

    cache = Cache(tmp_path / "cache")
    with pytest.raises(ValueError, match=r"NaN or infinite latents of dark\.png.*--fp32-vae"):
        encoding.encode(listing, overflowing, _texts, ("vae", "clip"), cache)
    made = encoding.encode(listing, whole, _texts, ("vae", "clip"), cache)[0]
    read, broken = Cache.read, {"latent": read_latent(made.images[0].latent) * float("inf")}
    cache.read = lambda kind, key: (
        (broken, None) if kind == "latents" else read(cache, kind, key)
    )  # as an earlier Graft kept them
    again = encoding.encode(listing, whole, _texts, ("vae", "clip"), cache)[0]
    assert all(read_latent(image.latent).isfinite().all() for image in again.images)


def test_masks_from_files_and_alpha(tmp_path):
    alpha = np.zeros((64, 64, 4), np.uint8)
    alpha[:, 32:, 3] = 255
    Image.fromarray(alpha).save(tmp_path / "clear.png")
    _picture(tmp_path / "masked.png", seed=1)
    Image.fromarray(np.tile(np.arange(64, dtype=np.uint8) * 4, (64, 1))).save(tmp_path / "masked.mask.png")
    _picture(tmp_path / "plain.png", seed=2)

    def masks(filters):
        return {picture.name[0]: picture.mask for picture in _made(tmp_path, filters=filters, flip=0.5).images}

    found = masks("")
    assert found["c"] is None and found["p"] is None
    assert torch.allclose(found["m"][0, 0], torch.arange(8) * 32 * 1.0 / 255 + 14 / 255, atol=1e-6)
    half = torch.tensor([0.0] * 4 + [1.0] * 4).expand(1, 8, 8)
    assert torch.equal(masks("masks: alpha")["c"], half) and masks("masks: alpha")["m"] is None
    both = masks("masks: both")
    assert torch.equal(both["c"], half) and both["m"] is not None
    assert not any(mask is not None for mask in masks("masks: off").values())
    digests = {_made(tmp_path, filters=f).digest for f in ("", "masks: alpha", "masks: both", "masks: off")}
    assert len(digests) == 4
    Image.new("L", (64, 64), 9).save(tmp_path / "masked.mask.png")
    assert _made(tmp_path).digest not in digests
    (tmp_path / "masked.mask.png").write_bytes(b"x")
    listing = read_folder(tmp_path, FolderSettings(**SMALL))
    assert any("masked.png: its mask masked.mask.png cannot be used" in problem for problem in listing.problems)


def test_crops_and_what_they_tell(tmp_path):
    across = np.tile(np.linspace(0, 255, 256).astype(np.uint8), (64, 1))
    Image.fromarray(across).save(tmp_path / "wide.png")
    plain = {"buckets": False}
    center, top = (_made(tmp_path, filters=f, **plain).images[0] for f in ("", "crop: top"))
    assert (
        (center.framing.left, center.framing.top) == (96, 0)
        and top.framing == center.framing
        and not center.other_crops
    )
    picture = _made(tmp_path, filters="crop: random\ncrops: 3", **plain).images[0]
    lefts = [picture.crop(i).framing.left for i in range(3)]
    assert len(picture.other_crops) == 2 and len(set(lefts)) == 3
    for i, left in enumerate(lefts):
        assert torch.equal(
            picture.crop(i).latent[0, 0], torch.from_numpy(across[0, left : left + 64 : 8].astype(np.float32) / 255)
        )
    again = _made(tmp_path, filters="crop: random\ncrops: 3", **plain).images[0]
    assert [again.crop(i).framing for i in range(3)] == [picture.crop(i).framing for i in range(3)]
    assert _made(tmp_path, filters="size_conditioning: false").images[0].framing is None
    tall = Image.fromarray(across).rotate(90, expand=True)
    tall.save(tmp_path / "wide.png")
    assert _made(tmp_path, filters="crop: top", **plain).images[0].framing.top == 0
    assert _made(tmp_path, **plain).images[0].framing.top == 96


def test_a_tag_at_the_end_of_a_line_is_left_out(tmp_path):
    for name, caption in (("a", "a cat, nsfw\na dog"), ("b", "a cat\na dog")):
        _picture(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text(caption, encoding="utf-8")
    found = _made(tmp_path, filters="wildcards: true\nblacklist_tags: [nsfw]", buckets=False)
    assert [entry.name for entry in found.images] == ["b.png"]


def test_every_setting_of_the_filters_changes_the_digest(tmp_path):
    for i in range(6):
        _picture(tmp_path / f"{i}.png", (40, 50) if i == 5 else (64, 100), seed=i)
        record = {"tags": [f"tag {i}", "all", "{a|b}"], "score": 10 * i}
        (tmp_path / f"{i}.json").write_text(json.dumps(record), encoding="utf-8")
    texts = (
        "",
        "consider_every_nth: 2",
        "shuffle_tag_p: 0.5",
        "blacklist_tags: [tag 1]",
        "non_caption_tags: [all]",
        "replacements: {tag: x}",
        "tag_separator: ' '",
        "abs_min_score: 20",
        "min_score: 30",
        "min_score: 30\ntag_bonus_scores: {tag 1: 50}",
        "score_tags: [20]",
        "wildcards: true",
        "crop: top",
        "crop: random",
        "crop: random\ncrops: 2",
        "size_conditioning: false",
        "keep_separator: '|||'",
        "trigger: zorp",
        "caption_prefix: a",
        "caption_suffix: a",
        "resolutions: [128]",
        "small: skip",
        "size: 128",
        "flip_p: 0.5",
        "leave_out: ['2.png']",
    )
    digests = {text: _made(tmp_path, filters=text, buckets=False).digest for text in texts}
    assert len(set(digests.values())) == len(texts)
    # test_masks_from_files_and_alpha, test_another_encoding_is_said_and_can_be_named, and of clips test_clip_files.py
    elsewhere = {"masks", "encoding", "frame_sample", "frame_stride"}
    speed = (
        "cache: false",
        "cache_gb: 3",
        "workers: 2",
        "write_schedule: true",
        "changed: stop",
        "validation: {crop: top}",
    )  # these change no picture
    named = {line.partition(":")[0] for text in (*texts, *speed) for line in text.splitlines()}
    assert named | elsewhere == {field.name for field in dataclasses.fields(Filters)}
    for same in speed:
        assert _made(tmp_path, filters=same, buckets=False).digest == digests[""]
    nodes = ({"shuffle_tags": True}, {"tag_dropout": 0.5}, {"tag_dropout": 0.5, "keep_tags": 1})
    assert len({digests[""], *(_made(tmp_path, buckets=False, **s).digest for s in nodes)}) == 4


def test_a_changed_picture_recomputes_just_itself(tmp_path):
    root, cache = _pictures(tmp_path / "data", 6), tmp_path / "cache"
    first, second, third, fourth = [], [], [], []
    before = _made(root, Cache(cache), first, flip=0.5)
    assert len(first) == 12
    again = _made(root, Cache(cache), second, flip=0.5)
    assert not second and again.digest == before.digest
    pairs = list(zip(before.images, again.images, strict=True))
    for a, b in pairs:
        assert torch.equal(a.latent, read_latent(b.latent))
        assert torch.equal(a.flipped_latent, read_latent(b.flipped_latent))
    _picture(root / "3.png", seed=77)
    after = _made(root, Cache(cache), third, flip=0.5)
    assert len(third) == 2 and after.digest != before.digest
    assert torch.equal(third[0], torch.from_numpy(np.asarray(Image.open(root / "3.png"), np.float32) / 255)[None])
    _made(root, Cache(cache), fourth, flip=0.5, encoders=("another vae", "clip"))
    assert len(fourth) == 12


def test_damaged_cache_files_are_made_again_and_said(tmp_path):
    root, cache = _pictures(tmp_path / "data", 3), tmp_path / "cache"
    before = _made(root, Cache(cache))
    for path in cache.rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    used, calls = Cache(cache), []
    again = _made(root, used, calls)
    assert len(calls) == 3 and all(
        torch.equal(a.latent, b.latent) for a, b in zip(before.images, again.images, strict=True)
    )
    # latents of each picture, captions, sizes of pictures, hashes of the folder's files, index
    assert sum("made again" in line for line in used.report()) == 3 + 1 + 1 + 1 + 1
    assert not [line for line in Cache(cache).report() if "made again" in line]


def test_a_bit_that_flips_is_found_when_a_picture_is_drawn(tmp_path, caplog):
    root, cache = _pictures(tmp_path / "data", 3), tmp_path / "cache"
    before = _made(root, Cache(cache))
    Cache(cache).report()
    for path in (cache / "latents").rglob("*.safetensors"):
        content = bytearray(path.read_bytes())
        content[-3] ^= 4
        path.write_bytes(content)
    used, calls = Cache(cache), []
    again = _made(root, used, calls)
    assert not calls and not any("made again" in line for line in used.report())
    for a, b in zip(before.images, again.images, strict=True):
        assert torch.equal(a.latent, read_latent(b.latent))
    assert len(calls) == 3 and caplog.text.count("its contents are not what was written; made again") == 3
    third = []
    for a, b in zip(before.images, _made(root, Cache(cache), third).images, strict=True):
        assert torch.equal(a.latent, read_latent(b.latent))
    assert not third


def test_a_cache_of_an_earlier_release_is_read(tmp_path):
    """It had a file for each latent, caption and picture, and no index."""
    root, cache = _pictures(tmp_path / "data", 3), tmp_path / "cache"
    before = _made(root, Cache(cache), flip=0.5)
    packed, plain = Cache(cache), Cache(tmp_path / "plain")
    for kind in KINDS:
        for path in (cache / kind).rglob("*.safetensors"):
            for key in json.loads(read_header(str(path))[1]["entries"]):
                plain.write(kind, key, *packed.read(kind, key))
    calls, texts = [], []
    again = _made(root, Cache(plain.folder), calls, lambda wanted: texts.append(wanted) or _texts(wanted), flip=0.5)
    assert not calls and not texts and again.digest == before.digest
    for a, b in zip(before.images, again.images, strict=True):
        assert torch.equal(a.latent, read_latent(b.latent))
        assert torch.equal(a.flipped_latent, read_latent(b.flipped_latent))
        assert torch.equal(before.conditionings[a.caption].context, again.conditionings[b.caption].context)


def test_a_file_that_changes_while_it_is_encoded_is_said(tmp_path):
    _pictures(tmp_path, 2)
    listing = read_folder(tmp_path, FolderSettings(**SMALL))
    _picture(tmp_path / "0.png", seed=5)
    with pytest.raises(ValueError, match=r"0\.png changed while the folder was read"):
        encoding.encode(listing, _encoder(), _texts, ("", ""))


def test_the_editors_data_is_json(tmp_path):
    _pictures(tmp_path, 4)
    (tmp_path / "cut.png").write_bytes(b"x")
    (tmp_path / "batch_id.txt").write_text("mine", encoding="utf-8")
    listing = read_folder(tmp_path, FolderSettings(**SMALL))
    data = json.loads(json.dumps(editor_data(listing, "text")))
    assert (
        data["count"] == 4
        and data["train"] + data["held_out"] == 4
        and data["report"] == "text"
        and data["version"] == 1
    )
    assert data["buckets"] == [{"width": 64, "height": 64, "batch_id": "mine", "train": 3, "held_out": 1}]
    assert [row["name"] for row in data["pictures"]] == ["0.png", "1.png", "2.png", "3.png"]
    assert data["pictures"][0]["caption"] == "caption 0" and sum(row["held_out"] for row in data["pictures"]) == 1
    assert data["problems"] == [{"name": "cut.png", "message": "not a picture that can be read"}]


def test_a_picture_is_shown_at_each_resolution_and_held_out_at_none_or_all(tmp_path):
    _pictures(tmp_path, 5)
    _picture(tmp_path / "wide.png", (96, 48), seed=9)
    settings = {**SMALL, "validation": 0.3, "repeats": 2}
    listing = read_folder(tmp_path, FolderSettings(**settings, filters=Filters(resolutions=(32, 64, 96))))
    shown = {}
    for entry in listing.entries:
        shown.setdefault(entry.name, []).append(entry.bucket)
    assert len(shown) == 6 and {tuple(sizes) for name, sizes in shown.items() if name != "wide.png"} == {
        ((64, 64), (32, 32), (96, 96))
    }
    assert [w * h <= side * side for (w, h), side in zip(shown["wide.png"], (64, 32, 96), strict=True)] == [True] * 3
    held, train = ({entry.name for entry in part} for part in (listing.held_out, listing.train))
    plain = read_folder(tmp_path, FolderSettings(**settings))
    assert not held & train and held == {entry.name for entry in plain.held_out} and listing.digest != plain.digest
    text = report(listing)
    assert (
        "6 pictures: 4 to train on, 2 held out" in text
        and "at resolutions 64, 32, 96: 12 to train on, 6 held out" in text
    )
    assert (
        "the same picture" not in text
        and editor_data(listing, text)["count"] == 6
        and len(editor_data(listing, text)["pictures"]) == 18
    )

    def captions(texts):
        return {text: Conditioning(torch.zeros(1, 1, 1)) for text in texts}

    data, _ = encoding.encode(listing, lambda pixels: pixels.movedim(-1, 1)[:, :, ::8, ::8], captions, ("v", "c"))
    assert len(data.images) == 12 and len({tuple(picture.latent.shape) for picture in data.images}) >= 3
    few = read_folder(tmp_path, FolderSettings(**settings, filters=Filters(resolutions=(96,), small="skip")))
    assert {entry.bucket for entry in few.entries if entry.name != "wide.png"} == {(64, 64)}


def test_resolutions_that_cannot_be(tmp_path):
    with pytest.raises(ValueError, match=r"resolution is 8, expected at least bucket step"):
        FolderSettings(**SMALL, filters=Filters(resolutions=(8,)))
    with pytest.raises(ValueError, match=r"resolution is 70, expected a multiple of 8"):
        FolderSettings(resolution=64, buckets=False, filters=Filters(resolutions=(70,)))
    with pytest.raises(ValueError, match=r"resolutions is \[1\], expected a list of whole numbers from 64"):
        Filters.parse("resolutions: [1]")


@pytest.mark.skipif(os.name == "nt", reason="Ghostscript is stood in for by a shell script")
def test_an_eps_named_png_starts_no_program_and_is_one_problem_of_the_folder(tmp_path, monkeypatch):
    started = starting.watch_ghostscript(tmp_path, monkeypatch)
    root = _pictures(tmp_path / "set", 3)
    (root / "drawing.png").write_bytes(starting.EPS)
    _picture(root / "masked.png", seed=7)
    (root / "masked.mask.png").write_bytes(starting.EPS)
    listing = read_folder(
        root, FolderSettings(**SMALL, validation=0.0, filters=Filters.parse("masks: files")), Cache(tmp_path / "cache")
    )
    assert [entry.name for entry in listing.entries] == ["0.png", "1.png", "2.png"]
    assert [problem.partition(":")[0] for problem in listing.problems] == ["drawing.png", "masked.png"]
    assert all("not a picture that can be read" in problem for problem in listing.problems)
    assert not started.exists()


def test_a_picture_that_was_whole_for_an_older_version_is_named_when_it_cannot_be_opened(tmp_path):
    root, cache = _pictures(tmp_path / "set", 2), Cache(tmp_path / "cache")
    (root / "1.png").write_bytes(starting.EPS)
    cache.write("pictures", sha256_of_file(root / "1.png"), {}, [[64, 64], False])
    listing = read_folder(root, FolderSettings(validation=0.0, **SMALL), cache)
    with pytest.raises(ValueError, match=r"1\.png: not a picture that can be read"):
        encoding.encode(listing, _encoder(), _texts, ("vae", "clip"))


def test_a_picture_that_is_removed_after_it_was_listed_is_named(tmp_path):
    listing = read_folder(_pictures(tmp_path, 2), FolderSettings(validation=0.0, **SMALL))
    (tmp_path / "1.png").unlink()
    with pytest.raises(ValueError, match=r"1\.png changed while the folder was read"):
        encoding.encode(listing, _encoder(), _texts, ("vae", "clip"))


def test_class_folders_give_their_words_where_no_file_does(tmp_path):
    for number, name in enumerate(("10_sks dog/a", "10_sks dog/b", "1_ink_wash style/c", "2024_05/d", "7_/e", "f")):
        _picture(tmp_path / f"{name}.png", seed=number)
    (tmp_path / "10_sks dog" / "b.txt").write_text("sks dog, sitting", encoding="utf-8")

    def read(captions, folder=tmp_path):
        listing = read_folder(folder, FolderSettings(captions=captions, validation=0.0, **SMALL))
        return {entry.name.split("/")[-1][0]: entry.caption.plain for entry in listing.train}, report(listing)

    expected = {"a": "sks dog", "b": "sks dog, sitting", "c": "ink_wash style", "d": "", "e": "", "f": ""}
    for captions in ("auto", "txt"):
        captions_read, said = read(captions)
        assert captions_read == expected
        assert "2 captions are the words of their class folder, as kohya's 10_name says name" in said
        assert "3 without a caption, the empty caption is used" in said
    assert read("auto", tmp_path / "10_sks dog")[0] == {"a": "sks dog", "b": "sks dog, sitting"}
    assert read("yaml")[0]["a"] == "a"  # EveryDream2 takes the file's name
    assert "no caption was found with caption source folder, but the folder has text files" in read("folder")[1]


def test_class_words_keep_the_settings_of_files_and_the_rules_of_captions(tmp_path):
    _picture(tmp_path / "3_sks dog" / "a.png")
    (tmp_path / "3_sks dog" / "local.yaml").write_text("multiply: 2", encoding="utf-8")
    filters = Filters(trigger="zorp", replacements=(("dog", "cat"),))
    (entry,) = read_folder(tmp_path, FolderSettings(validation=0.0, filters=filters, **SMALL)).train
    assert entry.caption.plain == "zorp sks cat" and entry.repeats == 6 and entry.captioned
    (tmp_path / "3_sks dog" / "local.yaml").write_text("multiply: 2\ntags: [photo]", encoding="utf-8")
    (entry,) = read_folder(tmp_path, FolderSettings(validation=0.0, filters=filters, **SMALL)).train
    assert entry.caption.plain == "zorp sks cat, photo" and entry.repeats == 6 and entry.captioned
    (tmp_path / "3_sks dog" / "local.yaml").write_text("main_prompt: a cat", encoding="utf-8")
    listing = read_folder(tmp_path, FolderSettings(validation=0.0, **SMALL))
    assert listing.train[0].caption.plain == "a cat" and "class folder" not in report(listing)


def test_no_image_is_enlarged_without_upscale(tmp_path):
    sizes = {"small": (50, 40), "large": (400, 300), "narrow": (15, 400), "wide": (640, 40)}
    for number, (name, size) in enumerate(sizes.items()):
        _picture(tmp_path / f"{name}.png", size, number)
    settings = FolderSettings(validation=0.0, no_upscale=True, filters=Filters(resolutions=(128,)), **SMALL)
    listing = read_folder(tmp_path, settings)
    found = {(entry.name[:-4], entry.bucket, entry.framings[0].scaled) for entry in listing.train}
    assert found == {
        ("small", (48, 32), (50, 40)),  # once: it is smaller than both resolutions
        ("large", (64, 48), (64, 48)),
        ("large", (128, 96), (128, 96)),
        ("wide", (256, 16), (256, 16)),  # 16:1
        ("wide", (512, 32), (512, 32)),
    }
    assert not any(framing.enlarged for entry in listing.train for framing in entry.framings)
    (problem,) = listing.problems
    assert problem.startswith("narrow.png: it is 15 x 400 pixels") and "enlarged" not in report(listing)


def test_shapes_beyond_four_to_one_keep_theirs_between_the_sides(tmp_path):
    _picture(tmp_path / "wide.png", (800, 100))
    plain = read_folder(tmp_path, FolderSettings(validation=0.0, **SMALL)).train[0]
    wide = read_folder(tmp_path, FolderSettings(validation=0.0, min_side=16, **SMALL)).train[0]
    assert plain.bucket == (128, 32) and plain.framings[0].kept < 0.55
    assert wide.bucket[0] / wide.bucket[1] > 4 and wide.framings[0].kept > 0.85
    shorter = read_folder(tmp_path, FolderSettings(validation=0.0, min_side=16, max_side=128, **SMALL)).train[0]
    assert max(shorter.bucket) == 128


def test_a_glance_says_what_the_run_will_without_reading_a_picture(tmp_path, monkeypatch):
    root = tmp_path / "10_"
    _pictures(root)
    _picture(root / "wide.png", (128, 64), seed=90)
    _picture(root / "small.png", (20, 20), seed=91)
    (root / "broken.png").write_bytes(b"no picture")
    settings = FolderSettings(**SMALL, validation=0.2)
    read = read_folder(root, settings)

    def fail(*_):
        raise AssertionError("a picture was read")

    monkeypatch.setattr(folder_reader, "content_hash", fail)
    monkeypatch.setattr(folder_reader.images, "open_image", fail)
    glance = glance_at_folder(root, settings, 100, 60.0)
    data, whole = glance_data(glance), editor_data(read, "")
    assert (glance.found, glance.seen, glance.refusal) == (13, 13, "")
    for name in ("count", "train", "held_out", "problems"):
        assert data[name] == whole[name]
    pictures = [{**row, "held_out": False} for row in whole["pictures"]]
    assert data["pictures"] == pictures and data["a_round"] == 120
    totals = {(row["width"], row["height"]): row["train"] + row["held_out"] for row in whole["buckets"]}
    assert {(row["width"], row["height"]): row["train"] for row in data["buckets"]} == totals
    assert "1 smaller than their bucket, enlarged: small.png" in data["notes"]
    assert "2 without a caption, the empty caption is used: small.png, wide.png" in data["notes"]


def test_a_glance_ends_at_its_limits(tmp_path):
    _pictures(tmp_path)
    settings = FolderSettings(**SMALL, keep_tags=3)
    part = glance_at_folder(tmp_path, settings, 4, 60.0)
    assert (part.found, part.seen, len(part.listing.entries), part.refusal) == (10, 4, 4, "")
    late = glance_at_folder(tmp_path, settings, 100, -1.0)
    assert (late.found, late.seen) == (10, 0) and glance_data(late)["pictures"] == []
    one = glance_at_folder(tmp_path, settings, 100, 60.0, "3.png")
    assert [row["caption"] for row in glance_data(one)["pictures"]] == ["caption 3"]


def test_a_glance_says_what_a_run_would_refuse(tmp_path):
    _pictures(tmp_path)
    settings = FolderSettings(**SMALL, keep_tags=3)
    with pytest.raises(ValueError, match="keep first tags has no effect") as refused:
        read_folder(tmp_path, settings)
    assert glance_at_folder(tmp_path, settings, 100, 60.0).refusal == str(refused.value)
    for path in tmp_path.glob("*.png"):
        path.write_bytes(b"no picture")
    glance = glance_at_folder(tmp_path, FolderSettings(**SMALL), 100, 60.0)
    assert "no picture in folder" in glance.refusal and len(glance.listing.problems) == 10
    with pytest.raises(ValueError, match="has no pictures"):
        glance_at_folder(tmp_path / "none", FolderSettings(**SMALL), 100, 60.0)


def _masked(root, mask, size=(64, 64), settings=(), **save):
    """(problems, notes, entries) of a folder with one plain picture and one of that size with that mask."""
    _picture(root / "0.png", seed=1)
    _picture(root / "a.png", size, seed=2, **save)
    Image.fromarray(mask).save(root / "a.mask.png")
    listing = read_folder(root, FolderSettings(**{**SMALL, "validation": 0.0, **dict(settings)}))
    seen = glance_at_folder(root, listing.settings, 10, 60.0).listing
    assert seen.problems == listing.problems and seen.notes == listing.notes
    return listing.problems, listing.notes, {entry.name: entry for entry in listing.entries}


@pytest.mark.parametrize("value", [0, 1])
def test_a_black_mask_is_a_problem(tmp_path, value):
    """One with the classes 0 and 1, as segmentation tools write it, is as good as black."""
    mask = np.zeros((64, 64), np.uint8)
    mask[:20] = value
    problems, _, entries = _masked(tmp_path, mask)
    assert len(problems) == 1 and "a.mask.png is black everywhere" in problems[0] and list(entries) == ["0.png"]


def test_a_mask_that_is_black_where_its_bucket_shows_the_picture_is_a_problem(tmp_path):
    mask = np.zeros((64, 256), np.uint8)
    mask[:, :16] = 255
    problems, _, entries = _masked(tmp_path, mask, (256, 64), {"buckets": False})
    assert len(problems) == 1 and "black in all that the bucket 64x64 shows" in problems[0]
    assert list(entries) == ["0.png"]
    mask[:, 100:101] = 255
    assert _masked(tmp_path, mask, (256, 64), {"buckets": False})[0] == ()


def test_transparency_that_hides_all_is_a_problem(tmp_path):
    _picture(tmp_path / "0.png", seed=1)
    Image.new("RGBA", (64, 64), (9, 9, 9, 0)).save(tmp_path / "clear.png")
    Image.new("RGBA", (64, 64), (9, 9, 9, 90)).save(tmp_path / "pale.png")
    filters = Filters.parse("masks: alpha")
    listing = read_folder(tmp_path, FolderSettings(**SMALL, validation=0.0, filters=filters))
    assert [problem.partition(":")[0] for problem in listing.problems] == ["clear.png"]
    assert "its transparency is black everywhere" in listing.problems[0]


def test_a_mask_of_another_shape_is_a_problem(tmp_path):
    problems, _, entries = _masked(tmp_path, np.full((64, 32), 255, np.uint8))
    assert "a.mask.png is 32x64 and the picture 64x64" in problems[0] and list(entries) == ["0.png"]
    assert _masked(tmp_path, np.full((32, 32), 255, np.uint8))[0] == ()  # the same shape at another size


def test_a_mask_of_a_picture_that_exif_turns_is_a_problem(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    problems, _, _ = _masked(tmp_path, np.full((48, 64), 255, np.uint8), (64, 48), exif=exif)
    assert "a.mask.png is 64x48 and the picture 48x64" in problems[0] and "EXIF" in problems[0]
    assert _masked(tmp_path, np.full((64, 48), 255, np.uint8), (64, 48), exif=exif)[0] == ()


def test_masks_in_transparency_are_named_and_used(tmp_path):
    mask = np.zeros((64, 64, 4), np.uint8)
    mask[:32, :, 3] = 255
    problems, notes, entries = _masked(tmp_path, mask)
    assert problems == () and entries["a.png"].mask == "a.mask.png"
    assert any("shape in transparency" in note and "a.mask.png" in note for note in notes)
    made = {picture.name: picture.mask for picture in _made(tmp_path, validation=0.0).images}
    assert torch.equal(made["a.png"], torch.tensor([1.0] * 4 + [0.0] * 4)[None, :, None].expand(1, 8, 8))


def _read(root, **settings):
    return read_folder(root, FolderSettings(**{**SMALL, "validation": 0.0, **settings}))


def _captions(listing):
    return {entry.name: entry.caption.plain for entry in listing.entries}


def test_onetrainers_masks_and_conditioning_pictures_are_none_of_the_images(tmp_path):
    for number, ending in ((0, ".png"), (1, ".jpg")):
        _picture(tmp_path / f"{number}{ending}", seed=number)
        _picture(tmp_path / f"{number}-condlabel.png", seed=10 + number)
        Image.new("L", (64, 64), 200).save(tmp_path / f"{number}-masklabel.png")
    Image.new("L", (64, 64), 200).save(tmp_path / "0-MaskLabel-2.PNG")
    for control_pictures in ("auto", "off"):
        listing = _read(tmp_path, control_pictures=control_pictures)
        masks = {entry.name: entry.mask for entry in listing.entries}
        assert masks == {"0.png": "0-masklabel.png", "1.jpg": "1-masklabel.png"}
        assert not any(entry.controls for entry in listing.entries)
        notes = "\n".join(listing.notes)
        assert "0-condlabel.png, 1-condlabel.png; to train with them, choose in control pictures" in notes
        assert "numbered masks are not read: 0-MaskLabel-2.PNG" in notes
    listing = _read(tmp_path, control_pictures="reference latents")
    controls = {entry.name: [control.name for control in entry.controls] for entry in listing.entries}
    assert controls == {"0.png": ["0-condlabel.png"], "1.jpg": ["1-condlabel.png"]}
    assert not any("condlabel" in note for note in listing.notes)


def test_thumbnails_and_folders_of_the_system_are_left_out_and_named(tmp_path):
    _picture(tmp_path / "1.png", seed=1)
    _picture(tmp_path / "thumbnails" / "2.png", seed=2)  # not those of a picture beside it
    others = ("@eaDir/1.png/SYNOPHOTO_THUMB_M.jpg", "__MACOSX/1.png", "#recycle/9.png", "Thumbs/1.jpg")
    for number, name in enumerate((*others, ".thumbnails/1.png")):
        _picture(tmp_path / name, seed=10 + number)
    listing = _read(tmp_path)
    assert set(_captions(listing)) == {"1.png", "thumbnails/2.png"}
    (note,) = [note for note in listing.notes if "are left out" in note]
    assert note.startswith("4 thumbnails and pictures in the system's folders") and all(name in note for name in others)


NFC, NFD = "\u00e9t\u00e9", "e\u0301te\u0301"


@pytest.mark.parametrize(
    ("picture", "caption"),
    [
        ("2.PNG", "2.TXT"),
        ("2.png", "2.Caption"),
        (f"{NFD}.png", f"{NFC}.txt"),
        (f"{NFC}.png", f"{NFD}.TXT"),
        (f"deep/{NFC}.png", f"Captions/deep/{NFD}.txt"),
        ("images/1.png", "CAPTIONS/1.TXT"),
        ("Cat.png", "cat.txt"),
    ],
)
def test_captions_are_found_under_another_spelling(tmp_path, picture, caption):
    (tmp_path / caption).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / caption).write_text("a cat", encoding="utf-8")
    _picture(tmp_path / picture)
    assert _captions(_read(tmp_path)) == {picture: "a cat"}


def test_everything_beside_a_picture_is_found_under_another_spelling(tmp_path):
    _picture(tmp_path / f"{NFD}.PNG", seed=1)
    _picture(tmp_path / "Control" / f"{NFC}.PNG", seed=2)
    Image.new("L", (64, 64), 200).save(tmp_path / f"{NFC}.Mask.Png")
    (tmp_path / f"{NFC}.YAML").write_text("main_prompt: a cat\nmultiply: 3\n")
    (tmp_path / "Cond_Dropout.TXT").write_text("0.25")
    (entry,) = _read(tmp_path, control_pictures="reference latents").entries
    assert [control.name for control in entry.controls] == [f"Control/{NFC}.PNG"]
    assert (entry.mask, entry.caption.plain, entry.repeats, entry.dropout) == (f"{NFC}.Mask.Png", "a cat", 3, 0.25)
    other = tmp_path.with_name("pairs")
    for number, name in enumerate((f"{NFC}.win.png", f"{NFD}.LOSE.png")):
        _picture(other / name, seed=number)
    (entry,) = _read(other).entries
    assert (entry.name, entry.worse.name) == (f"{NFC}.win.png", f"{NFD}.LOSE.png")


@pytest.mark.parametrize(
    "ending", [".jpe", ".JPE", ".jif", ".jfi", ".jfif", ".mpo", ".apng", ".dib", ".tif", ".hif", ".cr2", ".j2k", ".qoi"]
)
def test_every_ending_of_a_picture_is_read_or_named(tmp_path, ending):
    kinds = {".apng": "PNG", ".dib": "BMP"}
    _picture(tmp_path / "0.png", seed=1)
    _picture(tmp_path / f"1{ending}", format=kinds.get(ending.lower(), "JPEG"))
    listing = _read(tmp_path)
    named = any(f"1{ending}" in note for note in listing.notes)
    assert (f"1{ending}" in _captions(listing)) != named
    assert named == (ending in (".tif", ".hif", ".cr2", ".j2k", ".qoi"))


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize(
    "text", ["a red circle left", "\u4e00\u4e2a\u7ea2\u8272\u7684\u5706, red", "\u30c6\u30b9\u30c8\n"]
)
def test_utf_16_without_its_mark(tmp_path, encoding, text):
    """Texts without any NUL byte have no such encoding: they are not UTF-8 either, and are named."""
    _picture(tmp_path / "0.png").with_suffix(".txt").write_bytes(text.encode(encoding))
    assert _captions(_read(tmp_path)) == {"0.png": text.strip()}


@pytest.mark.parametrize(
    ("content", "filters"), [(b"a\0\0\0b\0\0\0", ""), (b"a\0b", ""), (b"a\0b\0", "encoding: cp1252")]
)
def test_nul_characters_are_named(tmp_path, content, filters):
    _picture(tmp_path / "1.png", seed=1)
    _picture(tmp_path / "0.png").with_suffix(".txt").write_bytes(content)
    listing = _read(tmp_path, filters=Filters.parse(filters))
    assert listing.problems[0].startswith("0.png: 0.txt: it has NUL characters") and set(_captions(listing)) == {
        "1.png"
    }


def _bytes_name(folder, content, name, **save):
    """A picture, or a folder with one, under a name that is not UTF-8."""
    path = _picture(folder / "renamed.png", **save) if content is None else folder / content
    os.rename(path, os.path.join(os.fsencode(folder), name))


@pytest.mark.skipif(os.name == "nt" or sys.platform == "darwin", reason="these systems have no such names")
def test_names_that_are_not_utf_8(tmp_path):
    sjis = "\u30c6\u30b9\u30c8".encode("shift_jis")
    _picture(tmp_path / "0.png", seed=1)
    _bytes_name(tmp_path, None, sjis + b".png", seed=2)
    _picture(tmp_path / "10_x" / "3.png", seed=3)
    _bytes_name(tmp_path, "10_x", b"10_" + sjis)
    for listing in (_read(tmp_path), glance_at_folder(tmp_path, FolderSettings(**SMALL), 10, 60.0).listing):
        assert len(listing.entries) == 3 and not any(entry.caption.plain for entry in listing.entries)
        assert any("of a folder's name is not a caption, as it is not UTF-8" in note for note in listing.notes)
        data = editor_data(listing, "")
        json.dumps(data, ensure_ascii=False).encode()
        assert {row["name"] for row in data["pictures"]} == {
            *("0.png", "\\udc83e\\udc83X\\udc83g.png", "10_\\udc83e\\udc83X\\udc83g/3.png")
        }
    for image in _made(tmp_path).images:
        image.name.encode()
    listing = _read(tmp_path, captions="yaml")  # takes the names of files for captions
    assert [problem.partition(": ")[2][:20] for problem in listing.problems] == ["its caption '\\udc83e"]


def test_a_caption_with_half_a_character_is_named(tmp_path):
    _picture(tmp_path / "0.png", seed=1)
    _picture(tmp_path / "1.png", seed=2)
    (tmp_path / "1.json").write_text('{"tags": ["a \\ud83d b"]}')
    listing = _read(tmp_path)
    assert listing.problems[0].startswith("1.png: its caption 'a \\ud83d b' has broken characters")
