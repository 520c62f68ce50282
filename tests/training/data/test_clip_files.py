"""Clips in a dataset's folder: found, listed in parts, encoded beside pictures, cached, and what is said of them."""

import dataclasses

import numpy as np
import pytest
import torch
from graft_nodes.training.data import clip_files, clips, encoding, pictures
from graft_nodes.training.data.batches import draw_items
from graft_nodes.training.data.cache import Cache
from graft_nodes.training.data.changed_files import FileWatcher
from graft_nodes.training.data.dataset import Conditioning
from graft_nodes.training.data.filters import Filters
from graft_nodes.training.data.folder_reader import glance_at_folder, pictures_in, read_folder
from graft_nodes.training.data.folder_report import editor_data, glance_data, report
from graft_nodes.training.data.folder_settings import FolderSettings
from graft_nodes.training.data.stored_latent import read_latent
from PIL import Image

from .making_clips import random_frames, write_clip, write_frames, write_gif

SETTINGS = FolderSettings(
    resolution=64, bucket_step=16, validation=0.0, frames="5", frame_step=4, filters=Filters(size_conditioning=False)
)


def _still(path, size=(64, 64), seed=100):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(random_frames(1, size, seed)[0]).save(path)


def _square(path, count=9, seed=0, **given):
    return write_clip(path, count, (64, 64), seed=seed, **given)


def _encode_pixels(pixels):
    """As a video VAE: pictures (B, H, W, 3) are the frames of one clip; the latents are the frames themselves."""
    return pixels.movedim(-1, 0)[None].clone()


def _read(root, settings=SETTINGS, cache=None, encode_pixels=_encode_pixels):
    listing = read_folder(root, settings, cache)
    return encoding.encode(
        listing,
        encode_pixels,
        lambda texts: {text: Conditioning(torch.ones(1, 1, 1)) for text in texts},
        ("vae", "clip"),
        cache,
    )[0]


def _frames_of(image):
    """The 8 bit frames (T, H, W, 3) that a latent stands for."""
    return (image.latent.movedim(0, -1) * 255).round().to(torch.uint8).numpy()


def _by_name(dataset):
    return {image.name: image for image in dataset.images}


def test_vae_training_names_a_clip_that_it_does_not_take(tmp_path):
    _still(tmp_path / "still.png")
    assert len(pictures.read_pictures(read_folder(tmp_path, SETTINGS)).images) == 1
    _square(tmp_path / "moving.mkv")
    with pytest.raises(ValueError, match=r"and moving\.mkv is a clip.* Set frames of clips of Dataset to 0"):
        pictures.read_pictures(read_folder(tmp_path, SETTINGS))


def test_a_hidden_file_is_no_frame(tmp_path):
    write_frames(tmp_path / "walk.frames", 3)
    found = clip_files.frame_files(tmp_path / "walk.frames")
    (tmp_path / "walk.frames" / f"._{found[0].name}").write_bytes(b"\0\5\x16\7")
    assert clip_files.frame_files(tmp_path / "walk.frames") == found and len(found) == 3


def test_clips_are_found_beside_pictures(tmp_path):
    _still(tmp_path / "b.png")
    _square(tmp_path / "a.mkv")
    write_frames(tmp_path / "walk.frames", 3)
    _still(tmp_path / "walk.frames" / "deeper" / "1.png")
    (tmp_path / "walk.frames" / "sound.mp4").write_bytes(b"")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "c.mp4").write_bytes(b"")
    names = [path.relative_to(tmp_path).as_posix() for path in clip_files.find_pictures_and_clips(tmp_path)]
    assert names == ["a.mkv", "b.png", "walk.frames"]
    assert [path.name for path in clip_files.find_clips(tmp_path)] == ["a.mkv", "walk.frames"]


def test_frames_are_in_the_order_of_the_numbers_in_their_names(tmp_path):
    """`²` is a digit of no number, and a name may begin with one."""
    in_order = [
        "2 b.png",
        "10 a.png",
        "a 2.png",
        "a 10 1.png",
        "a 10 11.png",
        "a 010 12.png",
        "b1.png",
        "²3.png",
        "²20.png",
    ]
    for name in in_order:
        (tmp_path / name).touch()
    assert [path.name for path in clip_files.frame_files(tmp_path)] == in_order


def test_stills_and_clips_in_one_dataset(tmp_path):
    _still(tmp_path / "still.png", seed=7)
    (tmp_path / "clip.txt").write_text("a cat walks")
    (tmp_path / "still.txt").write_text("a cat")
    written = _square(tmp_path / "clip.mkv")
    folder = write_frames(tmp_path / "folder.frames", 6, (64, 64), 3)
    gif = write_gif(tmp_path / "anim.webp", 5, (64, 64), 4)
    images = _by_name(_read(tmp_path))
    assert set(images) == {
        "still.png",
        "clip.mkv (5 frames from 1)",
        "folder.frames (5 frames from 1)",
        "anim.webp (5 frames from 1)",
    }
    assert images["still.png"].latent.shape == (3, 1, 64, 64)
    clip = images["clip.mkv (5 frames from 1)"]
    assert clip.latent.shape == (3, 5, 64, 64) and clip.caption == "a cat walks"
    assert np.array_equal(_frames_of(clip), written[:5])
    assert np.array_equal(_frames_of(images["folder.frames (5 frames from 1)"]), folder[:5])
    assert np.array_equal(_frames_of(images["anim.webp (5 frames from 1)"]), gif)


def test_parts_frame_buckets_and_rate(tmp_path):
    written = _square(tmp_path / "clip.mkv", 16, rate=8)
    settings = dataclasses.replace(SETTINGS, frames="1, 6", clip_part="chunk", frame_rate=4.0)
    listing = read_folder(tmp_path, settings)
    assert [entry.frames for entry in listing.entries] == [
        *[(number,) for number in range(0, 16, 2)],
        (0, 2, 4, 6, 8),
    ]
    text = report(listing)
    assert text.startswith("1 clips: 1 to train on") and "parts of clips: 9 (chunk), at 4 frames a second" in text
    assert "64x64x1 (8), 64x64x5 (1)" in text
    assert "frames of clips 6 is taken as 5: this VAE takes multiples of 4 and 1 more" in text
    images = list(_read(tmp_path, settings).images)
    assert np.array_equal(_frames_of(images[8]), written[[0, 2, 4, 6, 8]])
    assert np.array_equal(_frames_of(images[3]), written[[6]])


def test_uniform_and_slide_take_their_numbers_from_the_filters(tmp_path):
    _square(tmp_path / "clip.mkv", 16)
    for way, filters, starts in (
        ("uniform", Filters(frame_sample=3), [0, 5, 11]),
        ("slide", Filters(frame_stride=4), [0, 4, 8]),
        ("head", Filters(), [0]),
    ):
        listing = read_folder(tmp_path, dataclasses.replace(SETTINGS, clip_part=way, filters=filters))
        assert [entry.frames[0] for entry in listing.entries] == starts
    full = read_folder(tmp_path, dataclasses.replace(SETTINGS, clip_part="full", frames="81"))
    assert [len(entry.frames) for entry in full.entries] == [13]


def test_flips_and_crops_are_those_of_pictures(tmp_path):
    written = write_clip(tmp_path / "clip.mkv", 5, (96, 64))
    settings = dataclasses.replace(SETTINGS, flip=0.5, buckets=False)
    image = _read(tmp_path, settings).images[0]
    assert np.array_equal(_frames_of(image), written[:, :, 16:80])
    assert torch.equal(image.flipped_latent, image.latent.flip(-1))


def test_a_mask_counts_for_all_frames(tmp_path):
    _square(tmp_path / "clip.mkv")
    Image.new("L", (16, 16), 255).save(tmp_path / "clip.mask.png")
    assert _read(tmp_path).images[0].mask.shape == (1, 64, 64)


def test_batches_never_mix_shapes_and_are_drawn_alike(tmp_path):
    for number in range(3):
        _still(tmp_path / f"still {number}.png", seed=number)
        _square(tmp_path / f"clip {number}.mkv", seed=number)
    settings = dataclasses.replace(SETTINGS, flip=0.5, frames="1, 5")
    first, second = _read(tmp_path, settings), _read(tmp_path, settings)
    assert first.digest == second.digest
    shapes = set()
    for step in range(20):
        drawn = [draw_items(one, 2, 0.1, 3, step, step, "") for one in (first, second)]
        names = [[(item.image.name, item.flipped, item.caption) for item in items] for items in drawn]
        assert names[0] == names[1]
        kinds = {item.image.latent.shape for item in drawn[0]}
        assert len(kinds) == 1
        shapes |= kinds
    assert {shape[1] for shape in shapes} == {1, 5}


def test_the_cache_knows_clip_part_frames_rate_and_size(tmp_path):
    root = tmp_path / "pictures"
    _square(root / "clip.mkv", 16)
    encoded = []

    def encode_pixels(pixels):
        encoded.append(tuple(pixels.shape))
        return _encode_pixels(pixels)

    def read(**changed):
        encoded.clear()
        cache = Cache(tmp_path / "cache")
        return _read(root, dataclasses.replace(SETTINGS, **changed), cache, encode_pixels)

    first = read()
    assert len(encoded) == 1
    again = read()
    assert not encoded and torch.equal(first.images[0].latent, read_latent(again.images[0].latent))
    assert again.digest == first.digest
    digests = {first.digest}
    for changed in (
        {"frames": "9"},
        {"frame_rate": 4.0},
        {"resolution": 128},
        {"clip_part": "slide", "filters": Filters(size_conditioning=False, frame_stride=11)},
    ):
        other = read(**changed)
        assert encoded
        digests.add(other.digest)
        again = read(**changed)
        assert not encoded
        for one, two in zip(other.images, again.images, strict=True):
            assert torch.equal(read_latent(one.latent), read_latent(two.latent))
    assert len(digests) == 5
    _square(root / "clip.mkv", 16, seed=9)
    assert read().digest not in digests and encoded


def test_a_clip_that_is_known_is_not_decoded_again(tmp_path, monkeypatch):
    _square(tmp_path / "pictures" / "clip.mkv")
    cache = Cache(tmp_path / "cache")
    first = read_folder(tmp_path / "pictures", SETTINGS, cache)
    monkeypatch.setattr(clips, "scan", None)
    assert read_folder(tmp_path / "pictures", SETTINGS, cache).digest == first.digest


def test_held_out_are_whole_clips(tmp_path):
    for number in range(6):
        _square(tmp_path / f"clip {number}.mkv", 16, seed=number)
    listing = read_folder(tmp_path, dataclasses.replace(SETTINGS, validation=0.4, clip_part="chunk"))
    trained = {entry.name for entry in listing.train}
    measured = {entry.name for entry in listing.held_out}
    assert trained and measured and not trained & measured
    assert len(listing.entries) == 18


def test_repeats_count_for_each_part(tmp_path):
    _square(tmp_path / "3_cat" / "clip.mkv", 16)
    dataset = _read(tmp_path, dataclasses.replace(SETTINGS, clip_part="chunk"))
    assert [image.repeats for image in dataset.images] == [3, 3, 3]


def test_short_and_broken_clips_are_left_out_by_name(tmp_path):
    _square(tmp_path / "good.mkv")
    _square(tmp_path / "short.mkv", 4)
    _square(tmp_path / "broken.mkv", 24)
    data = (tmp_path / "broken.mkv").read_bytes()
    (tmp_path / "broken.mkv").write_bytes(data[: len(data) // 2])
    (tmp_path / "empty.mp4").write_bytes(b"")
    (tmp_path / "text.mp4").write_text("hello")
    (tmp_path / "old.avi").write_bytes(b"RIFF")
    listing = read_folder(tmp_path, SETTINGS)
    assert [entry.name for entry in listing.entries] == ["good.mkv"]
    assert [problem.split(":")[0] for problem in listing.problems] == ["broken.mkv", "empty.mp4", "text.mp4"]
    text = report(listing)
    assert "1 clips left out, shorter than 5 frames: short.mkv (4)" in text
    assert "1 clips of formats that are not read: old.avi; save them as MP4" in text
    (tmp_path / "good.mkv").unlink()
    with pytest.raises(ValueError, match=r"no picture in folder .* can be used(.|\n)*short.mkv \(4\)"):
        read_folder(tmp_path, SETTINGS)


def test_too_many_parts_are_refused(tmp_path):
    write_frames(tmp_path / "a.frames", 1001, (16, 16))
    settings = dataclasses.replace(SETTINGS, frames="1", clip_part="chunk")
    with pytest.raises(ValueError, match="it gives 1,001 parts, expected at most 1,000"):
        read_folder(tmp_path, settings)


def test_without_frames_clips_are_left_out_and_said(tmp_path):
    settings = dataclasses.replace(SETTINGS, frames="0")
    _square(tmp_path / "clip.mkv")
    write_gif(tmp_path / "anim.gif", 3, (64, 64))
    listing = read_folder(tmp_path, settings)
    assert [(entry.name, entry.frames) for entry in listing.entries] == [("anim.gif", ())]
    assert "1 clips are left out, as frames of clips is 0: clip.mkv; set it, to 17 for example" in report(listing)
    (tmp_path / "anim.gif").unlink()
    with pytest.raises(ValueError, match=r"has clips and no pictures, as clip.mkv: set frames of clips"):
        pictures_in(tmp_path)
    (tmp_path / "clip.mkv").unlink()
    _still(tmp_path / "still.png")
    assert "frames of clips does nothing here" in report(read_folder(tmp_path, SETTINGS))


def test_a_folder_without_clips_is_read_as_before(tmp_path):
    _still(tmp_path / "still.png")
    plain = read_folder(tmp_path, dataclasses.replace(SETTINGS, frames="0", frame_step=1))
    assert read_folder(tmp_path, SETTINGS).digest == plain.digest


def test_a_vae_for_pictures_refuses_clips(tmp_path):
    _still(tmp_path / "a.png")
    settings = dataclasses.replace(SETTINGS, frame_step=0)
    read_folder(tmp_path, settings)
    write_gif(tmp_path / "b.gif", 3)
    with pytest.raises(
        clips.NoClipsError, match=r"b.gif is a clip, and this VAE encodes pictures only. Connect the VAE of"
    ):
        read_folder(tmp_path, settings)


def test_missing_pyav_ends_the_reading(tmp_path, monkeypatch):
    _square(tmp_path / "a.mkv")
    _still(tmp_path / "b.png")
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(clips.NoClipsError, match=r"a.mkv"):
        read_folder(tmp_path, SETTINGS)


def test_a_clip_that_changes_meanwhile_is_told(tmp_path):
    _square(tmp_path / "clip.mkv")
    dataset = _read(tmp_path)
    watcher = FileWatcher(dataset.watched)
    assert watcher.check_all() == []
    _square(tmp_path / "clip.mkv", 5, seed=8)
    _square(tmp_path / "new.mp4", codec="libx264", pixels="yuv420p")
    assert sorted(watcher.check_all()) == ["clip.mkv has changed", "new.mp4 is new"]


def test_reading_can_be_interrupted_inside_a_clip(tmp_path):
    _square(tmp_path / "clip.mkv")
    calls = []

    def check():
        calls.append(1)
        if len(calls) == 4:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        clips.scan(tmp_path / "clip.mkv", check)


def test_editor_data_and_glance(tmp_path):
    _square(tmp_path / "clip.mkv", 16)
    _still(tmp_path / "still.png")
    settings = dataclasses.replace(SETTINGS, clip_part="chunk", frames="1, 5", validation=0.0)
    for data in (
        editor_data(read_folder(tmp_path, settings), ""),
        glance_data(glance_at_folder(tmp_path, settings, 100, 60.0)),
    ):
        clip, still = data["pictures"]
        assert (clip["name"], clip["frames"], clip["parts"]) == ("clip.mkv", [1, 5], 19)
        assert still["name"] == "still.png" and "frames" not in still
        assert data["count"] == 2 and data["folder"] == tmp_path.name
        assert [(row.get("frames", 0), row["train"]) for row in data["buckets"]] == [(0, 1), (1, 16), (5, 3)]
