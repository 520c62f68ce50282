"""GraftDataset through the host: folders below the input folder only, captions encoded by the host's CLIP, damage said."""

import os

import numpy as np
import pytest
import torch
from PIL import Image


@pytest.fixture(scope="module")
def demo(host):
    return host.call("GraftDemo")


@pytest.fixture
def folder(host, request):
    name = f"data {request.node.name}"[:60]
    os.makedirs(os.path.join(host.input, name))
    return name


def _picture(host, folder, name, caption=None, size=(256, 256), seed=0):
    path = os.path.join(host.input, folder, name)
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)).save(path)
    if caption is not None:
        with open(os.path.splitext(path)[0] + ".txt", "w", encoding="utf-8") as file:
            file.write(caption)
    return path


def _call(host, demo, folder, **given):
    return host.call("GraftDataset", **{"folder": folder, "vae": demo[2], "clip": demo[1], "resolution": 256, **given})


def test_latents_and_captions_are_the_hosts(host, demo, folder):
    path = _picture(host, folder, "a.png", "a red circle left")
    dataset, sheet, report = _call(host, demo, folder, validation=0.0)
    pixels = torch.from_numpy(np.asarray(Image.open(path), dtype=np.float32) / 255)[None]
    with torch.inference_mode():
        expected = demo[2].encode(pixels)[0]
        tokens = demo[1].encode_from_tokens_scheduled(demo[1].tokenize("a red circle left"))[0]
    assert torch.allclose(dataset.pictures[0].latent, expected.float().cpu())
    conditioning = dataset.conditionings["a red circle left"]
    assert torch.equal(conditioning.context, tokens[0].float().cpu()) and set(dataset.conditionings) == {"a red circle left", ""}
    assert sheet.shape[0] == 1 and report.startswith("1 pictures: 1 to train on, 0 held out")


def test_buckets_keep_the_shape(host, demo, folder):
    for i, size in enumerate([(256, 256), (512, 256), (100, 300)]):
        _picture(host, folder, f"{i}.png", "a red circle left", size, i)
    dataset, _, report = _call(host, demo, folder, validation=0.0)
    shapes = {p.name: tuple(p.latent.shape) for p in dataset.pictures}
    assert shapes == {"0.png": (3, 32, 32), "1.png": (3, 24, 40), "2.png": (3, 48, 16)}
    assert "smaller than their bucket" in report
    squares = _call(host, demo, folder, validation=0.0, buckets=False)[0]
    assert {tuple(p.latent.shape) for p in squares.pictures} == {(3, 32, 32)}


def test_damage_and_missing_captions_are_said(host, demo, folder):
    _picture(host, folder, "a.png", "a red circle left")
    _picture(host, folder, "b.png", seed=1)
    whole = open(_picture(host, folder, "c.png", seed=2), "rb").read()  # noqa: SIM115
    with open(os.path.join(host.input, folder, "c.png"), "wb") as file:
        file.write(whole[: len(whole) // 3])
    dataset, _, report = _call(host, demo, folder, validation=0.0)
    assert len(dataset.pictures) == 2
    assert "1 without a caption, the empty caption is used: b.png" in report and "1 left out:\n  c.png: " in report


@pytest.mark.parametrize("name", ["..", "../output", "/etc", "a/../../x", "C:\\x", ""])
def test_a_folder_outside_is_refused(host, demo, name):
    with pytest.raises(ValueError, match=r"leaves ComfyUI's input folder|folder is empty"):
        _call(host, demo, name)


def test_a_link_out_of_the_input_folder_is_refused(host, demo, tmp_path):
    link = os.path.join(host.input, "way out")
    os.symlink(tmp_path, link)
    try:
        with pytest.raises(ValueError, match="leaves ComfyUI's input folder"):
            _call(host, demo, "way out")
    finally:
        os.remove(link)


def test_missing_and_empty_folders(host, demo, folder):
    with pytest.raises(FileNotFoundError, match="there is no folder 'nowhere'"):
        _call(host, demo, "nowhere")
    with pytest.raises(ValueError, match="has no pictures"):
        _call(host, demo, folder)


def test_a_changed_file_runs_the_node_again(host, folder):
    _picture(host, folder, "a.png", "a red circle left")
    prompt = {
        "1": {"class_type": "GraftDemo", "inputs": {}},
        "2": {"class_type": "GraftDataset", "inputs": {**host.defaults("GraftDataset"), "folder": folder, "vae": ["1", 2], "clip": ["1", 1],
                                                       "resolution": 256, "validation": 0.0}},
    }  # fmt: skip
    first = host.run(prompt, capture={"data": ["2", 0]})
    assert "2" not in host.run(prompt, capture={"data": ["2", 0]})["executed"]
    _picture(host, folder, "b.png", "a blue circle right", seed=3)
    second = host.run(prompt, capture={"data": ["2", 0]})
    assert len(first["captured"]["data"].pictures) == 1 and len(second["captured"]["data"].pictures) == 2
    assert first["captured"]["data"].digest != second["captured"]["data"].digest


def test_clip_skip_is_part_of_the_digest(host, demo, folder):
    _picture(host, folder, "a.png")
    assert _call(host, demo, folder)[0].digest == _call(host, demo, folder)[0].digest
    assert not _call(host, demo, folder)[0].unhashed
