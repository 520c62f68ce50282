"""Control pictures from a folder to the conditioning of each crop: crops, flips, cache, digest, problems."""

import dataclasses
import os

import numpy as np
import pytest
import torch
from graft_nodes.training.data import encoding
from graft_nodes.training.data.batches import image_conditioning
from graft_nodes.training.data.cache import Cache
from graft_nodes.training.data.combine import combine
from graft_nodes.training.data.control_encoding import ControlEncoder
from graft_nodes.training.data.control_methods import find_method
from graft_nodes.training.data.dataset import Conditioning
from graft_nodes.training.data.filters import Filters
from graft_nodes.training.data.folder_reader import glance_at_folder, read_folder
from graft_nodes.training.data.folder_report import editor_data, memory, report
from graft_nodes.training.data.folder_settings import FolderSettings
from graft_nodes.training.run.batch_loader import BatchSchedule
from PIL import Image

from .making_clips import write_clip
from .making_pictures import write_picture

SETTINGS = FolderSettings(
    resolution=64, bucket_step=32, validation=0.0, filters=Filters(size_conditioning=False, cache=True)
)


def _encode_pixels(pixels):
    """The pixels themselves are the latents."""
    return pixels.movedim(-1, 1).clone()


def _text(value, pictures=()):
    return Conditioning(torch.tensor([[[float(len(value)), *(float(picture.sum()) for picture in pictures)]]]))


def _read(root, method="reference latents", cache=None, calls=None, settings=SETTINGS):
    listing = read_folder(root, dataclasses.replace(settings, control_pictures=method))

    def encode_prompt(caption, pictures, way):
        if calls is not None:
            calls.append(caption)
        return _text(caption, pictures)

    controls = ControlEncoder(root, find_method(method, ""), _encode_pixels, encode_prompt, "vae", cache)
    return encoding.encode(
        listing,
        _encode_pixels,
        lambda texts: {text: _text(text) for text in texts},
        ("vae", "clip"),
        cache,
        controls=controls,
    )[0]


def _extras(dataset, number=0, crop=0, flipped=False):
    image = dataset.images[number]
    return image_conditioning(dataset, image.caption, image.crop(crop), flipped).extras


def test_crops_and_flips_are_those_of_the_image(tmp_path):
    """A control picture with the image's own pixels has the image's own latents, in every crop, flipped or not."""
    write_picture(tmp_path / "a.png", (160, 64))
    write_picture(tmp_path / "a.control.png", (160, 64))
    filters = dataclasses.replace(SETTINGS.filters, crop="random")
    dataset = _read(tmp_path, settings=dataclasses.replace(SETTINGS, flip=0.5, buckets=False, filters=filters))
    assert len(dataset.images) == 1 and len(dataset.images[0].other_crops) == 3
    for number in range(4):
        crop = dataset.images[0].crop(number)
        assert torch.equal(_extras(dataset, crop=number)["reference_latents"][0][0], crop.latent)
        flipped = _extras(dataset, crop=number, flipped=True)["reference_latents"][0][0]
        assert torch.equal(flipped, crop.flipped_latent) and not torch.equal(flipped, crop.latent)


def test_three_control_pictures_keep_their_order(tmp_path):
    write_picture(tmp_path / "a.png")
    for number, name in enumerate(("a.control.png", "a.control2.png", "control3/a.png")):
        write_picture(tmp_path / name, seed=number + 1)
    found = _extras(_read(tmp_path))["reference_latents"]
    for number, latent in enumerate(found):
        pixels = np.random.default_rng(number + 1).integers(0, 255, (64, 64, 3), dtype=np.uint8)
        assert torch.equal(latent, torch.from_numpy(np.float32(pixels) / 255.0).movedim(-1, 0)[None])
    assert len(found) == 3
    with pytest.raises(ValueError, match=r"a\.png has 3 control pictures, and with control pictures set to concat"):
        _read(tmp_path, "concatenated latents")


def test_the_digest_follows_control_pictures_and_is_the_old_one_without(tmp_path):
    for number in range(3):
        write_picture(tmp_path / f"{number}.png", seed=number)
    plain = read_folder(tmp_path, SETTINGS)
    identity = plain.entries[0].identity()
    assert "controls" not in identity and "control pictures" not in identity
    before = _read(tmp_path).digest
    for number in range(3):
        write_picture(tmp_path / "control" / f"{number}.png", seed=10 + number)
    paired = _read(tmp_path)
    assert paired.digest != before and len(paired.images) == 3
    assert _read(tmp_path).digest == paired.digest != _read(tmp_path, "concatenated latents").digest
    write_picture(tmp_path / "control" / "1.png", seed=77)
    assert _read(tmp_path).digest != paired.digest
    assert {f"control/{number}.png" for number in range(3)} < set(paired.watched[0].files)


def test_latents_and_captions_come_from_the_cache(tmp_path):
    folder = tmp_path / "data"
    for number in range(2):
        write_picture(folder / f"{number}.png", seed=number)
        write_picture(folder / f"{number}.control.png", seed=10 + number)
    calls, again = [], []
    first = _read(folder, "Qwen-Image-Edit", Cache(tmp_path / "cache"), calls)
    cache = Cache(tmp_path / "cache")
    second = _read(folder, "Qwen-Image-Edit", cache, again)
    assert calls == ["", ""] and again == [] and cache.write_counts["latents"] == 0
    for number in range(2):
        found = [image_conditioning(data, "", data.images[number].crop(0)) for data in (first, second)]
        assert torch.equal(found[0].context, found[1].context) and found[0].context.shape[-1] == 2
        (one,), (other,) = (conditioning.extras["reference_latents"] for conditioning in found)
        assert torch.equal(one, other)
    assert not torch.equal(found[0].context, image_conditioning(first, "", first.images[0].crop(0)).context)


def test_captions_that_a_step_draws_are_encoded_before_it_with_their_pictures(tmp_path):
    """Dropped captions, other crops, and of a dataset of two folders those of the folder that the picture is in."""
    parts, calls = [], []
    for place in ("one", "two"):
        write_picture(tmp_path / place / "a.png", (160, 64), len(place))
        write_picture(tmp_path / place / "a.control.png", (160, 64), 10 + ord(place[0]))
        (tmp_path / place / "a.txt").write_text(f"in {place}", encoding="utf-8")
        parts.append(_read(tmp_path / place, "Qwen-Image-Edit", calls=calls))
    both = combine(parts)
    assert sorted(calls) == ["in one", "in two"]
    schedule = BatchSchedule(
        both,
        2,
        1,
        1.0,
        0,
    )
    assert schedule.prepare(0, 4) == 2 and calls[2:] == ["", ""]
    for batch in schedule.batches(0, 0):
        assert batch.captions == ("", "") and len({float(one.context[..., 1]) for one in batch.conditionings}) == 2
    assert len(calls) == 4


def test_problems_are_said_before_anything_is_encoded(tmp_path):
    for name in ("a.png", "b.png", "c.png", "control/a.png", "control/c.png", "control/z.png"):
        write_picture(tmp_path / name, seed=len(name) + ord(name[-5]))
    whole = (tmp_path / "control" / "c.png").read_bytes()
    (tmp_path / "control" / "c.png").write_bytes(whole[:40])
    listing = read_folder(tmp_path, SETTINGS)
    assert [entry.name for entry in listing.entries] == ["a.png"]
    problems = "\n".join(listing.problems)
    assert "control/z.png: no image uses this control picture" in problems
    assert "b.png: it has no control picture, as 2 others have: add b.control.png beside it" in problems
    assert "c.png: its control picture c.png cannot be used: " in problems
    glance = glance_at_folder(tmp_path, SETTINGS, 100, 60.0)
    assert len(glance.listing.problems) == 3 and glance.found == 3
    assert [row["controls"] for row in editor_data(glance.listing, "")["pictures"]] == [1]


def test_an_inpainting_mask_is_gray_in_its_image_and_goes_along(tmp_path):
    """Written out in numpy, of a crop and its mirror image, from memory and from the cache."""
    image = np.asarray(Image.open(write_picture(tmp_path / "a" / "a.png", (96, 64))).convert("RGB"))
    mask = np.zeros((64, 96), dtype=np.uint8)
    mask[10:40, 20:50], mask[0, 0], mask[1, 20] = 255, 100, 200
    Image.fromarray(mask).save(tmp_path / "a" / "a.control.png")
    settings = dataclasses.replace(SETTINGS, flip=0.5, bucket_step=32, buckets=False)
    for cache in (None, Cache(tmp_path / "cache"), Cache(tmp_path / "cache")):
        dataset = _read(tmp_path / "a", "inpainting mask", cache, settings=settings)
        for flipped in (False, True):
            extras = _extras(dataset, flipped=flipped)
            left, right = 16, 80
            pixels, part = image[:, left:right] / 255.0, mask[:, left:right] / 255.0
            if flipped:
                pixels, part = pixels[:, ::-1], part[:, ::-1]
            hole = np.where(np.round(part)[..., None] == 1.0, 0.5, pixels)
            assert extras.keys() == {"concat_latent_image", "concat_mask"}
            assert extras["concat_mask"].shape == (1, 1, 64, 64) and extras["concat_mask"].dtype == torch.float32
            np.testing.assert_allclose(extras["concat_mask"][0, 0], part, atol=1e-7)
            np.testing.assert_allclose(extras["concat_latent_image"][0].movedim(0, -1), hole, atol=1e-6)


def test_the_same_mask_of_another_image_is_another_latent_in_the_cache(tmp_path):
    cache, found = Cache(tmp_path / "cache"), []
    for seed in (1, 2):
        write_picture(tmp_path / f"{seed}" / "a.png", seed=seed)
        write_picture(tmp_path / f"{seed}" / "a.control.png", seed=9)
        found.append(_extras(_read(tmp_path / f"{seed}", "inpainting mask", cache)))
    assert torch.equal(found[0]["concat_mask"], found[1]["concat_mask"])
    assert not torch.equal(found[0]["concat_latent_image"], found[1]["concat_latent_image"])


def test_a_clip_has_no_inpainting_mask_and_goes_through_samples(tmp_path):
    write_clip(tmp_path / "a.mkv", 5, (64, 64))
    write_picture(tmp_path / "a.control.png")
    settings = dataclasses.replace(SETTINGS, frames="5", frame_step=4)
    with pytest.raises(
        ValueError, match=r"a\.mkv is a clip, and control pictures set to inpainting mask are for pictures"
    ):
        _read(tmp_path, "inpainting mask", settings=settings)


def test_a_control_clip_is_refused_by_name_and_says_where_it_goes(tmp_path):
    for name in ("a.mkv", "a.control.mkv", "b.mkv", "control/b.mkv", "c.mkv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_clip(tmp_path / name, 5, (64, 64), seed=len(name) + ord(name[-5]))
    for name in ("c.control.png", "d.png", "d.control.frames/1.png"):
        write_picture(tmp_path / name, seed=ord(name[0]))
    listing = read_folder(tmp_path, dataclasses.replace(SETTINGS, frames="5", frame_step=4))
    assert [entry.name for entry in listing.entries] == ["c.mkv"]
    controls = {"a.mkv": "a.control.mkv", "b.mkv": "b.mkv", "d.png": "d.control.frames"}
    for problem, (name, control) in zip(listing.problems, controls.items(), strict=True):
        assert problem == (
            f"{name}: its control {control} is a clip, and a folder has control pictures only: connect control clips to"
            " Samples, through the model's own node, such as WanFunControlToVideo or WanVaceToVideo"
        )


def test_numbers_and_shapes_are_in_the_report(tmp_path):
    for name in ("a.png", "b.png", "a.control.png", "a.control2.png"):
        write_picture(tmp_path / name, seed=ord(name[0]) + len(name))
    write_picture(tmp_path / "b.control.png", (64, 40))
    said = report(read_folder(tmp_path, SETTINGS))
    assert "control pictures: 3, 1 or 2 for each image" in said
    assert "1 control pictures have another shape than their images, so they are not cropped with them: b.c" in said
    plain = report(read_folder(tmp_path, dataclasses.replace(SETTINGS, control_pictures="off")))
    assert "control" not in plain.replace(".control", "") and plain.startswith("5 pictures")


def test_splits_and_repeats_are_those_of_the_images(tmp_path):
    for number in range(8):
        write_picture(tmp_path / "3_cats" / f"{number}.png", seed=number)
    settings = dataclasses.replace(SETTINGS, validation=0.25)
    alone = read_folder(tmp_path, settings)
    for number in range(8):
        write_picture(tmp_path / "3_cats" / "control" / f"{number}.png", seed=50 + number)
    paired = read_folder(tmp_path, settings)
    for group in ("train", "held_out"):
        before, now = getattr(alone, group), getattr(paired, group)
        assert [(one.name, one.repeats) for one in before] == [(one.name, one.repeats) for one in now]
    assert {one.repeats for one in paired.train} == {3.0}


def test_a_control_picture_that_changes_meanwhile_is_said(tmp_path):
    write_picture(tmp_path / "a.png")
    path = write_picture(tmp_path / "a.control.png", seed=1)
    listing = read_folder(tmp_path, SETTINGS)
    write_picture(path, seed=2)
    os.utime(path, ns=(1, 1))
    controls = ControlEncoder(tmp_path, find_method("reference latents", ""), _encode_pixels, _text, "vae", None)
    with pytest.raises(ValueError, match=r"a\.control\.png changed while the folder was read; run again"):
        encoding.encode(listing, _encode_pixels, lambda texts: {}, ("vae", "clip"), controls=controls)


def test_latents_in_the_cache_need_no_memory(tmp_path):
    """What is in memory is what the images themselves need; the control pictures are read when a batch has them."""
    folder, count = tmp_path / "data", 40
    for number in range(count):
        write_picture(folder / f"{number}.png", seed=number)
        write_picture(folder / f"{number}.control.png", seed=100 + number)
    in_memory, stored = _read(folder), _read(folder, cache=Cache(tmp_path / "cache"))
    latent = 3 * 64 * 64 * 4 / 2**20
    assert memory(in_memory) == f"{2 * count * latent:.1f} MB of latents and masks in memory"
    assert memory(stored) == f"{count * latent:.1f} MB of latents and masks in memory"
    for number in range(count):
        (one,), (other,) = (_extras(data, number)["reference_latents"] for data in (in_memory, stored))
        assert torch.equal(one, other)
    assert len(stored.images[0].extras) == 1 and "concat_latent_image" not in stored.images[0].extras
