"""Preference pairs from a folder: which pictures belong together, and what a dataset makes of them."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from graft_nodes.training.data import encoding
from graft_nodes.training.data.batches import make_batches
from graft_nodes.training.data.cache import Cache
from graft_nodes.training.data.caption_files import caption_path
from graft_nodes.training.data.combine import combine, hold_out
from graft_nodes.training.data.dataset import Conditioning
from graft_nodes.training.data.filters import Filters
from graft_nodes.training.data.folder_reader import glance_at_folder, read_folder
from graft_nodes.training.data.folder_report import memory, report
from graft_nodes.training.data.folder_settings import FolderSettings
from graft_nodes.training.data.preference_files import find_preferences
from PIL import Image

from .making_pictures import write_picture

ROOT = Path("/data")
SETTINGS = FolderSettings(
    resolution=64, bucket_step=32, validation=0.0, filters=Filters(size_conditioning=False, cache=True)
)


def _pair(folder, name, seed, size=(64, 64), caption=""):
    write_picture(folder / f"{name}.win.png", size, seed)
    write_picture(folder / f"{name}.lose.png", size, seed + 1000)
    if caption:
        (folder / f"{name}.txt").write_text(caption, encoding="utf-8")


def _read(folder, settings=SETTINGS, cache=None, calls=None):
    def encode_pixels(pixels):
        if calls is not None:
            calls.append(1)
        return pixels.movedim(-1, 1).clone()

    return encoding.encode(
        read_folder(folder, settings),
        encode_pixels,
        lambda texts: {text: Conditioning(torch.full((1, 1, 1), float(len(text)))) for text in texts},
        ("vae", "clip"),
        cache,
    )[0]


def _found(*names):
    found = find_preferences([ROOT / name for name in sorted(names)])
    worse = {better.relative_to(ROOT).as_posix(): other.name for better, other in found.worse.items()}
    return [path.relative_to(ROOT).as_posix() for path in found.images], worse


def test_pairs_are_told_apart_by_their_names():
    assert _found("a.win.png", "a.lose.png") == (["a.win.png"], {"a.win.png": "a.lose.png"})
    assert _found("a.WIN.jpg", "a.lose.png", "c.png") == (["a.WIN.jpg", "c.png"], {"a.WIN.jpg": "a.lose.png"})
    assert _found("x/a.b.win.png", "x/a.b.lose.webp")[1] == {"x/a.b.win.png": "a.b.lose.webp"}


@pytest.mark.parametrize(
    "names", [["a.win.png", "b.png"], ["x/a.win.png", "y/a.lose.png"], ["winter.png", "a.lose.png"]]
)
def test_folders_without_pairs_are_read_as_before(names):
    assert _found(*names) == (sorted(names), {})


def test_every_picture_without_its_partner_is_named():
    names = ["a.win.png", "a.lose.png", "b.win.png", "c.lose.jpg", "d.win.png", "d.win.jpg", "d.lose.png"]
    with pytest.raises(ValueError, match="preference pairs are incomplete") as refused:
        _found(*names)
    assert "b.win.png: there is no b.lose.png beside it" in str(refused.value)
    assert "c.lose.jpg: there is no c.win.jpg beside it" in str(refused.value)
    assert "d.win.jpg, d.win.png: a pair has one of them" in str(refused.value)
    assert "a.win.png" not in str(refused.value)


def test_both_pictures_of_a_pair_are_cropped_and_flipped_alike(tmp_path):
    """A pair of two pictures that differ in one row only has latents that differ in that row only."""
    pixels = np.random.default_rng(1).integers(0, 255, (64, 160, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.win.png")
    pixels[20] = 255 - pixels[20]
    Image.fromarray(pixels).save(tmp_path / "a.lose.png")
    filters = dataclasses.replace(SETTINGS.filters, crop="random")
    dataset = _read(tmp_path, dataclasses.replace(SETTINGS, flip=0.5, buckets=False, filters=filters))
    (image,) = dataset.images
    assert len(image.other_crops) == 3
    for number in range(4):
        crop = image.crop(number)
        for flipped, better in ((False, crop.latent), (True, crop.flipped_latent)):
            differ = (better - crop.worse.latent_as(flipped)).abs().amax(dim=(0, 2)) > 0
            assert differ.nonzero().flatten().tolist() == [20]
    for step in range(12):
        (batch,) = make_batches(dataset, 1, 0.0, 3, step, step, "part 0")
        differ = (batch.latents - batch.worse).abs().amax(dim=(0, 1, 3)) > 0
        assert differ.nonzero().flatten().tolist() == [20]


def test_the_caption_is_that_of_both_or_of_the_better_picture(tmp_path):
    _pair(tmp_path, "a", 1, caption="of both")
    _pair(tmp_path, "b", 2, caption="not this one")
    (tmp_path / "b.win.txt").write_text("of the better", encoding="utf-8")
    assert [image.caption for image in _read(tmp_path).images] == ["of both", "of the better"]
    assert caption_path(tmp_path / "a.win.png", tmp_path, "auto", "utf-8").name == "a.txt"
    assert caption_path(tmp_path / "b.win.png", tmp_path, "auto", "utf-8").name == "b.win.txt"


def test_a_pair_is_held_out_as_a_whole(tmp_path):
    for number in range(10):
        _pair(tmp_path, f"{number}", number)
    dataset = _read(tmp_path, dataclasses.replace(SETTINGS, validation=0.3))
    assert (len(dataset.images), len(dataset.held_out)) == (7, 3)
    for image in dataset.images + dataset.held_out:
        number = int(image.name.split(".")[0])
        pixels = np.random.default_rng(number + 1000).integers(0, 255, (64, 64, 3), dtype=np.uint8)
        assert torch.equal(image.worse.latent, torch.from_numpy(np.float32(pixels) / 255.0).movedim(-1, 0))


def test_pairs_that_share_a_picture_are_on_one_side(tmp_path):
    """A ranking of four pictures, written as the three pairs of neighbors, among pairs of their own."""
    for number in range(9):
        _pair(tmp_path, f"own{number}", number)
    for number in range(3):
        write_picture(tmp_path / f"rank{number}.win.png", seed=500 + number)
        write_picture(tmp_path / f"rank{number}.lose.png", seed=501 + number)
    for share in (0.1, 0.25, 0.3, 0.5, 0.7):
        listing = read_folder(tmp_path, dataclasses.replace(SETTINGS, validation=share))
        ranked = [entry.name for entry in listing.held_out if entry.name.startswith("rank")]
        assert listing.held_out and len(ranked) in (0, 3)


def test_the_digest_follows_the_worse_picture_and_is_the_old_one_without(tmp_path):
    write_picture(tmp_path / "a.png")
    assert not {"worse", "worse picture"} & read_folder(tmp_path, SETTINGS).entries[0].identity().keys()
    (tmp_path / "a.png").unlink()
    _pair(tmp_path, "a", 1)
    first = _read(tmp_path).digest
    assert _read(tmp_path).digest == first
    write_picture(tmp_path / "a.lose.png", seed=7)
    assert _read(tmp_path).digest != first


def test_what_is_in_the_cache_is_not_encoded_again(tmp_path):
    _pair(tmp_path / "pictures", "a", 1)
    cache, calls = Cache(tmp_path / "cache", 1.0), []
    first = _read(tmp_path / "pictures", cache=cache, calls=calls)
    assert len(calls) == 2
    second = _read(tmp_path / "pictures", cache=cache, calls=calls)
    assert len(calls) == 2
    assert torch.equal(first.images[0].worse.latent, second.images[0].worse.latent_as(False))
    assert first.digest == second.digest


def test_pairs_survive_being_put_together_and_count_as_memory(tmp_path):
    for folder in ("x", "y"):
        _pair(tmp_path / folder, "a", len(folder) + ord(folder))
    parts = [_read(tmp_path / folder) for folder in ("x", "y")]
    whole = combine(parts)
    assert [image.worse is not None for image in whole.images] == [True, True]
    assert memory(whole).startswith(f"{4 * 3 * 64 * 64 * 4 / 2**20:.1f} MB")


def test_a_pair_with_a_trained_picture_is_not_measured(tmp_path):
    write_picture(tmp_path / "x" / "a.win.png", seed=1)
    write_picture(tmp_path / "x" / "a.lose.png", seed=2)
    write_picture(tmp_path / "y" / "b.win.png", seed=2)
    write_picture(tmp_path / "y" / "b.lose.png", seed=3)
    trained, other = (_read(tmp_path / folder) for folder in ("x", "y"))
    with pytest.raises(ValueError, match=r"every image of validation folder .* is trained on too"):
        hold_out(trained, other)


def test_wrong_pairs_are_problems_that_name_both_pictures(tmp_path):
    _pair(tmp_path, "good", 1)
    _pair(tmp_path, "shape", 2)
    write_picture(tmp_path / "shape.lose.png", (96, 64), seed=3)
    write_picture(tmp_path / "same.win.png", seed=4)
    write_picture(tmp_path / "same.lose.png", seed=4)
    _pair(tmp_path, "broken", 5)
    (tmp_path / "broken.lose.png").write_bytes(b"no picture")
    listing = read_folder(tmp_path, SETTINGS)
    assert [entry.name for entry in listing.entries] == ["good.win.png"]
    problems = "\n".join(listing.problems)
    assert "shape.win.png: it is 64x64 and shape.lose.png 96x64" in problems
    assert "same.win.png: same.lose.png is the same picture" in problems
    assert "broken.win.png: its worse picture broken.lose.png cannot be used" in problems
    said = report(listing)
    assert "preference pairs: 1, as good.win.png better than good.lose.png" in said
    assert "without a worse picture" not in said
    write_picture(tmp_path / "alone.png", seed=6)
    assert "\n1 without a worse picture, which dpo cannot train on" in report(read_folder(tmp_path, SETTINGS))


def test_a_worse_picture_of_another_size_is_scaled_to_the_better_one(tmp_path):
    _pair(tmp_path, "a", 1)
    write_picture(tmp_path / "a.lose.png", (128, 128), seed=2)
    (image,) = _read(tmp_path).images
    assert image.worse.latent.shape == image.latent.shape


def test_the_panel_sees_pairs_without_reading_them(tmp_path):
    _pair(tmp_path, "a", 1)
    glance = glance_at_folder(tmp_path, SETTINGS, 100, 60.0)
    assert glance.found == 1 and glance.listing.entries[0].worse.name == "a.lose.png"
    write_picture(tmp_path / "b.win.png", seed=9)
    with pytest.raises(ValueError, match=r"b\.win\.png: there is no b\.lose\.png"):
        glance_at_folder(tmp_path, SETTINGS, 100, 60.0)
