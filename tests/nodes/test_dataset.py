"""GraftDataset through the host: folders below the input folder only, captions encoded by the host's
CLIP, damage said.
"""

import json
import os
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

SAMPLES = Path(__file__).parents[1] / "training" / "data" / "samples"


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
    assert torch.allclose(dataset.images[0].latent, expected.float().cpu())
    conditioning = dataset.conditionings["a red circle left"]
    assert torch.equal(conditioning.context, tokens[0].float().cpu()) and set(dataset.conditionings) == {
        "a red circle left",
        "",
    }
    assert sheet.shape[0] == 1 and report.startswith("1 pictures: 1 to train on, 0 held out")


def test_a_text_encoder_that_cannot_be_hashed_is_named_and_nothing_is_cached(host, demo, folder):
    _picture(host, folder, "a.png", "a red circle left")
    clip = demo[1].clone()
    clip.patcher.set_injections(
        "somebody's", [SimpleNamespace(inject=lambda patcher: None, eject=lambda patcher: None)]
    )
    dataset, _, report = _call(host, (*demo[:1], clip, *demo[2:]), folder, validation=0.0)
    [line] = [line for line in report.splitlines() if line.startswith("nothing is cached on disk")]
    assert "these cannot be hashed: " in line and all(name in line for name in dataset.unhashed) and dataset.unhashed


def test_buckets_keep_the_shape(host, demo, folder):
    for i, size in enumerate([(256, 256), (512, 256), (100, 300)]):
        _picture(host, folder, f"{i}.png", "a red circle left", size, i)
    dataset, _, report = _call(host, demo, folder, validation=0.0)
    shapes = {p.name: tuple(p.latent.shape) for p in dataset.images}
    assert shapes == {"0.png": (3, 32, 32), "1.png": (3, 24, 40), "2.png": (3, 48, 16)}
    assert "smaller than their bucket" in report
    squares = _call(host, demo, folder, validation=0.0, buckets=False)[0]
    assert {tuple(p.latent.shape) for p in squares.images} == {(3, 32, 32)}


def test_damage_and_missing_captions_are_said(host, demo, folder):
    _picture(host, folder, "a.png", "a red circle left")
    _picture(host, folder, "b.png", seed=1)
    whole = open(_picture(host, folder, "c.png", seed=2), "rb").read()  # noqa: SIM115
    with open(os.path.join(host.input, folder, "c.png"), "wb") as file:
        file.write(whole[: len(whole) // 3])
    dataset, _, report = _call(host, demo, folder, validation=0.0)
    assert len(dataset.images) == 2
    assert "1 without a caption, the empty caption is used: b.png" in report and "1 left out:\n  c.png: " in report


@pytest.mark.parametrize("name", ["..", "../output", "/etc", "a/../../x", "C:\\x", ""])
def test_a_folder_outside_is_refused(host, demo, name):
    with pytest.raises(ValueError, match=r"is outside ComfyUI's input folder|image folder is empty"):
        _call(host, demo, name)


def test_a_link_out_of_the_input_folder_is_refused(host, demo, tmp_path):
    link = os.path.join(host.input, "way out")
    os.symlink(tmp_path, link)
    try:
        with pytest.raises(ValueError, match="is outside ComfyUI's input folder"):
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
        "2": {
            "class_type": "GraftDataset",
            "inputs": {
                **host.defaults("GraftDataset"),
                "folder": folder,
                "vae": ["1", 2],
                "clip": ["1", 1],
                "resolution": 256,
                "validation": 0.0,
            },
        },
    }
    first = host.run(prompt, capture={"data": ["2", 0]})
    assert "2" not in host.run(prompt, capture={"data": ["2", 0]})["executed"]
    _picture(host, folder, "b.png", "a blue circle right", seed=3)
    second = host.run(prompt, capture={"data": ["2", 0]})
    assert len(first["captured"]["data"].images) == 1 and len(second["captured"]["data"].images) == 2
    assert first["captured"]["data"].digest != second["captured"]["data"].digest


def test_clip_skip_is_part_of_the_digest(host, demo, folder):
    _picture(host, folder, "a.png")
    assert _call(host, demo, folder)[0].digest == _call(host, demo, folder)[0].digest
    assert not _call(host, demo, folder)[0].unhashed


def test_brackets_in_captions_are_text_unless_they_are_to_weigh(host, demo, folder):
    def encoded(prompt):
        with torch.inference_mode():
            return demo[1].encode_from_tokens_scheduled(demo[1].tokenize(prompt))[0][0].float().cpu()

    caption = "a (zorp:3) left"
    _picture(host, folder, "a.png", caption)
    text, heavy = encoded("a zorp 3 left"), encoded(caption)
    assert not torch.allclose(text, heavy, atol=1e-3)
    for _ in range(2):  # the second time from the cache
        plain, _, said = _call(host, demo, folder)
        weighted, _, said_of_weighted = _call(host, demo, folder, weighted_captions=True)
        assert torch.equal(plain.conditionings[caption].context, text)
        assert torch.equal(weighted.conditionings[caption].context, heavy)
    assert plain.digest != weighted.digest and weighted.weighted_captions and not plain.weighted_captions
    assert "brackets in captions are text (weighted captions is off): a.png" in said
    assert "brackets weigh what is in them (weighted captions is on): a.png" in said_of_weighted


def test_a_text_encoder_that_is_trained_reads_brackets_as_the_dataset_does(host, demo, folder):
    caption = "a (zorp:3) left"
    _picture(host, folder, "a.png", caption)
    steps = host.module("nodes.step_call")
    for weighted in (False, True):
        dataset = _call(host, demo, folder, validation=0.0, weighted_captions=weighted)[0]
        adapter = host.call("GraftAdapter", text_encoder=True)[0]
        state = host.call("GraftTrainStart", model=demo[0], dataset=dataset, clip=demo[1], adapter=adapter)[0]
        with torch.inference_mode(False), steps.open_denoiser(state) as denoiser, torch.no_grad():
            (live,) = denoiser.encode([caption], [dataset.conditionings[caption]])
        assert torch.allclose(live.context.float().cpu(), dataset.conditionings[caption].context, atol=1e-5)


def test_weighted_captions_change_nothing_where_no_caption_has_brackets(host, demo, folder):
    _picture(host, folder, "a.png", "a red circle left")
    _picture(host, folder, "b.png", r"a zorp \(left\)", seed=1)
    plain, weighted = _call(host, demo, folder)[0], _call(host, demo, folder, weighted_captions=True)[0]
    assert plain.digest == weighted.digest


def _train(host, folder, steps, run, optimizer=None, **given):
    """A workflow: the demo model trained on a folder, for some steps in each of the TrainSteps "10", "11" …"""

    def node(node_id, **inputs):
        return {"class_type": node_id, "inputs": {**host.defaults(node_id), **inputs}}

    optimizer = {"learning_rate": 2e-3, "batch_size": 2, "total_steps": 12, "warmup": 0, **(optimizer or {})}
    prompt = {
        "1": node("GraftDemo"),
        "2": node(
            "GraftDataset", folder=folder, vae=["1", 2], clip=["1", 1], resolution=64, **{"validation": 0.0, **given}
        ),
        "3": node("GraftAdapter", rank=2),
        "4": node("GraftOptimizer", settings=["3", 0], **optimizer),
        "7": node(
            "GraftTrainStart",
            model=["1", 0],
            clip=["1", 1],
            dataset=["2", 0],
            settings=["4", 0],
            run=run,
        ),
    }
    at = ["7", 0]
    for number, count in enumerate(steps):
        prompt[str(10 + number)] = node("TrainStep", state=at, steps=count, validate_every=0)
        at = [str(10 + number), 0]
    return prompt


def _trained(host, prompt, report=False):
    last = max(prompt, key=int)
    result = host.run(prompt, capture={"lora": [last, 3], "report": [last, 5]})
    assert result["success"], result["errors"]
    found = {name: tensor.numpy().tobytes() for name, tensor in result["captured"]["lora"].items()}
    return (found, result["captured"]["report"]) if report else found


@pytest.fixture
def tagged(host, folder):
    for i in range(4):
        _picture(host, folder, f"{i}.png", f"a red circle left, tag {i}, {{blue|green}} sky, __weather__, more", seed=i)
    os.makedirs(os.path.join(host.input, folder, "wildcards"), exist_ok=True)
    with open(os.path.join(host.input, folder, "wildcards", "weather.txt"), "w", encoding="utf-8") as file:
        file.write("rain\nsnow\nsun")
    return folder


VARYING = {"shuffle_tags": True, "keep_tags": 1, "tag_dropout": 0.3, "filters": "wildcards: true"}


def _forget(host, run):
    import shutil

    shutil.rmtree(os.path.join(host.output, "graft", run), ignore_errors=True)
    host.fresh()


def test_captions_that_vary_train_the_same_however_they_are_cut_and_loaded(host, tagged, request):
    run = "varying"
    _forget(host, run)
    expected, report = _trained(host, _train(host, tagged, [2], run, **VARYING), True)
    assert "wordings of captions encoded for these steps" in report
    for steps, filters in (([1, 1], "\nworkers: 3"), ([2], "\ncache: false")):
        _forget(host, run)
        assert (
            _trained(host, _train(host, tagged, steps, run, **{**VARYING, "filters": VARYING["filters"] + filters}))
            == expected
        )
    _forget(host, run)
    assert _trained(host, _train(host, tagged, [2], run)) != expected


def _tensor(latent):
    return latent if isinstance(latent, torch.Tensor) else latent.read()


def test_everything_comes_from_the_cache_the_second_time(host, demo, tagged, monkeypatch):
    import sys

    wall = sys.modules[host.node("GraftDataset").__module__].host
    first = _call(host, demo, tagged, **VARYING, flip=0.5)

    def refuse(*_):
        raise AssertionError("encoded again")

    monkeypatch.setattr(wall.encoding, "encode_pictures", refuse)
    monkeypatch.setattr(wall.encoding, "encode_captions", refuse)
    again = _call(host, demo, tagged, **VARYING, flip=0.5)
    assert (
        again[0].digest == first[0].digest
        and "encoded; " in again[2]
        and "latents 8 from the cache, 0 encoded" in again[2]
    )
    for left, right in zip(first[0].images + first[0].held_out, again[0].images + again[0].held_out, strict=True):
        assert torch.equal(_tensor(left.latent), _tensor(right.latent))
        assert torch.equal(_tensor(left.flipped_latent), _tensor(right.flipped_latent))
        one, other = (d.conditionings[left.caption] for d in (first[0], again[0]))
        assert torch.equal(one.context, other.context) and one.extras.keys() == other.extras.keys()
        assert all(
            torch.equal(one.extras[k], other.extras[k]) for k in one.extras if isinstance(one.extras[k], torch.Tensor)
        )


def test_a_dataset_that_changes_while_training_is_said_or_stops(host, tagged, monkeypatch):
    import sys

    wall = sys.modules[host.node("TrainStep").__module__].host
    kept = wall.events.send_event

    def changing(name, data):
        if name == "graft.step" and data["step"] == 1:
            _picture(host, tagged, "1.png", seed=99)
        return kept(name, data)

    expected = _trained(host, _train(host, tagged, [4], "calm"))
    monkeypatch.setattr(wall.events, "send_event", changing)
    _forget(host, "changing")
    found, report = _trained(host, _train(host, tagged, [4], "changing"), True)
    assert (
        "the dataset changed: 1.png has changed; training goes on with what was encoded" in report and found == expected
    )
    _picture(host, tagged, "1.png", seed=1)
    _forget(host, "stopping")
    result = host.run(_train(host, tagged, [4], "stopping", filters="changed: stop"), capture={})
    assert (
        not result["success"]
        and "1.png has changed" in str(result["errors"])
        and "The state is kept" in str(result["errors"])
    )
    _picture(host, tagged, "1.png", seed=1)  # put back: the run goes on from where it stopped
    monkeypatch.undo()
    host.fresh()
    found, report = _trained(host, _train(host, tagged, [4], "stopping", filters="changed: stop"), True)
    assert found == expected and "went on from the snapshot at step 2" in report and "2 trained now" in report


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="these systems have no such names")
def test_a_name_that_is_not_utf_8_is_trained_and_in_the_schedule(host, tagged):
    _forget(host, "bytes")
    folder, name = os.fsencode(os.path.join(host.input, tagged)), b"\x83e\x83X.png"
    os.rename(folder + b"/1.png", folder + b"/" + name)
    try:
        _, report = _trained(host, _train(host, tagged, [4], "bytes", filters="write_schedule: true"), True)
        with open(os.path.join(host.output, "graft", "bytes", "schedule-00000001-00000004.txt"), "rb") as file:
            assert "\\udc83e\\udc83X.png" in file.read().decode("utf-8")
        report.encode()
    finally:
        os.rename(folder + b"/" + name, folder + b"/1.png")


def test_the_schedule_is_written(host, tagged):
    _forget(host, "scheduled")
    _, report = _trained(host, _train(host, tagged, [2, 3], "scheduled", filters="write_schedule: true"), True)
    folder = os.path.join(host.output, "graft", "scheduled")
    files = sorted(name for name in os.listdir(folder) if name.startswith("schedule"))
    assert files == ["schedule-00000001-00000002.txt", "schedule-00000003-00000005.txt"] and files[1] in report
    with open(os.path.join(folder, files[1]), encoding="utf-8") as file:
        lines = file.read().splitlines()
    assert [line for line in lines if line.startswith("step")] == ["step 3", "step 4", "step 5"] and len(
        lines
    ) == 3 + 3 * 2


def test_masks_and_weights_reach_the_loss(host, tagged):
    found = {}
    for name, number in (("whole", None), ("dark", 80), ("left", 255)):
        if number is not None:
            mask = np.full((256, 256), 40, np.uint8)
            mask[:, :128] = number
            for i in range(4):
                Image.fromarray(mask).save(os.path.join(host.input, tagged, f"{i}.mask.png"))
        _forget(host, name)
        found[name] = _trained(host, _train(host, tagged, [2], name))
    assert len({str(sorted(one.items())) for one in found.values()}) == 3


def test_every_problem_is_said_in_one_message(host, demo, folder):
    with pytest.raises(ValueError) as caught:
        _call(host, demo, folder, filters="crop: x\nmin_scor: 1", repeats=0, vae=None)
    for part in ("repeats is 0", "crop is 'x'", "did you mean min_score"):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match=r"VAE is empty.*; CLIP is empty"):
        _call(host, demo, folder, vae=None, clip=None)


def test_the_editor_gets_its_data(host, tagged):
    prompt = {key: node for key, node in _train(host, tagged, [], "none").items() if key in "12"}
    result = host.run({**prompt, "9": {"class_type": "PreviewImage", "inputs": {"images": ["2", 1]}}}, capture={})
    assert result["success"], result["errors"]
    outputs = [data["output"] or {} for name, data in host.events if name == "executed"]
    data = [output for output in outputs if "graft_dataset" in output][-1]["graft_dataset"][0]
    assert data["folder"] == tagged and data["count"] == 4 and data["buckets"][0]["train"] == 4
    assert data["pictures"][0]["caption"].startswith("a red circle left, tag 0")


def test_a_run_may_not_be_named_like_the_cache(host, tagged):
    result = host.run(_train(host, tagged, [1], "cache"), capture={})
    assert not result["success"] and "give the run another name" in str(result["errors"])


def _two_folders(host, folder):
    """A folder of small pictures and one of large ones below it."""
    for name, count, size in (("low", 4, (64, 64)), ("high", 3, (128, 128))):
        os.makedirs(os.path.join(host.input, folder, name))
        for i in range(count):
            _picture(host, f"{folder}/{name}", f"{i}.png", f"a red circle, {name} {i}", size, 10 * len(name) + i)
    return f"{folder}/low", f"{folder}/high"


def test_several_folders_train_with_their_own_settings(host, folder):
    low, high = _two_folders(host, folder)
    prompt = _train(host, low, [2], "several", {"accumulation": 2}, repeats=2, batch_size=3, filters="workers: 2")
    prompt["3000"] = {
        "class_type": "GraftDataset",
        "inputs": {
            **prompt["2"]["inputs"],
            **{"folder": high, "resolution": 128, "batch_size": 0, "repeats": 1, "validation": 0.4, "filters": ""},
            **{"shuffle_tags": True, "keep_tags": 1, "validation_folder": ""},
        },
    }
    prompt["2"]["inputs"]["more_images"] = ["3000", 0]
    last = {"lora": ["10", 3], "report": ["10", 5], "data": ["2", 0], "said": ["2", 2], "start": ["7", 1]}
    result = host.run(prompt, capture=last)
    assert result["success"], result["errors"]
    got = result["captured"]
    shapes = {image.name: tuple(image.latent.shape[-2:]) for image in got["data"].images}
    assert len(shapes) == 6 and {name.split("/")[0]: shape for name, shape in shapes.items()} == {
        "low": (8, 8),
        "high": (16, 16),
    }
    assert len(got["data"].held_out) == 1 and got["data"].held_out[0].name.startswith("high/")
    assert "together 6 images to train on, 1 held out, of 2 datasets" in got["said"]
    assert "batch 2 and 3 x 2" in got["start"] and "own batch size of Dataset: 3, in place of" in got["start"]
    # 8 pictures in threes and 2 in twos are 4 batches, two to a step
    assert "6 images, 1 held out for validation; an epoch is 2 steps" in got["start"]
    lora = {name: tensor.numpy().tobytes() for name, tensor in got["lora"].items()}
    _forget(host, "several")
    prompt["2"]["inputs"]["filters"] = ""
    prompt["10"]["inputs"]["steps"] = 1
    prompt["11"] = {"class_type": "TrainStep", "inputs": {**prompt["10"]["inputs"], "state": ["10", 0], "steps": 1}}
    again = host.run(prompt, capture={"lora": ["11", 3]})
    assert again["success"], again["errors"]
    assert {name: tensor.numpy().tobytes() for name, tensor in again["captured"]["lora"].items()} == lora


def test_a_validation_folder_is_measured_and_not_trained(host, demo, folder):
    low, high = _two_folders(host, folder)
    plain = _call(host, demo, low, resolution=64, validation=0.0)[0]
    whole, sheet, said = _call(host, demo, low, resolution=64, validation_folder=high)
    assert len(whole.images) == 4 and [image.name for image in whole.held_out] == [f"high/{i}.png" for i in range(3)]
    assert {tuple(image.latent.shape[-2:]) for image in whole.held_out} == {(8, 8)} and sheet.shape[0] == 1
    assert f"{high} (resolution 64, validation):" in said and "3 pictures: 0 to train on, 3 held out" in said
    assert whole.digest != plain.digest and [image.repeats for image in plain.images] == [1] * 4
    _picture(host, high, "copy.png", "copy", (64, 64), 30)  # as low/0.png
    assert "1 images of the validation folder are trained on too" in _call(host, demo, low, validation_folder=high)[2]
    for name, message in (
        ("nowhere", "validation folder: there is no folder"),
        ("..", "validation folder: .* outside"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            _call(host, demo, low, validation_folder=name)


def test_a_validation_folder_has_filters_of_its_own(host, demo, folder):
    low, high = _two_folders(host, folder)
    text = "consider_every_nth: 2\ncaption_prefix: a\nvalidation: {consider_every_nth: 3, caption_suffix: z}"
    whole = _call(host, demo, low, resolution=64, validation_folder=high, filters=text)[0]
    assert [image.name for image in whole.images] == ["0.png", "2.png"]
    assert [image.name for image in whole.held_out] == ["high/0.png"]
    [caption] = {image.caption for image in whole.held_out}
    assert caption.startswith("a ") and caption.endswith(" z")


def test_without_a_validation_folder_its_filters_choose_images_of_the_same(host, demo, folder):
    """LunNova's configuration as it is printed: what validation chooses is measured, and not trained on."""
    for i in range(8):
        _picture(host, folder, f"{i}.png", None, (64, 64), i)
        tags = ["solo", "princess luna", "high res", f"tag {i}"]
        with open(os.path.join(host.input, folder, f"{i}.json"), "w", encoding="utf-8") as file:
            json.dump({"tags": tags, "score": 300, "path": f"{i}.png"}, file)
    printed = (SAMPLES / "lunnova.yaml").read_text(encoding="utf-8")
    given = {"resolution": 256, "captions": "json", "filters": printed}
    whole, _, said = _call(host, demo, folder, **given)
    assert sorted(image.name for image in whole.images) == [f"{i}.png" for i in (1, 2, 3, 5, 6, 7)]
    assert sorted(image.name for image in whole.held_out) == [f"{folder}/{i}.png" for i in (0, 4)]
    assert {tuple(image.latent.shape[-2:]) for image in (*whole.images, *whole.held_out)} == {(8, 8)}
    assert {image.flip or whole.flip for image in whole.images} == {0.333}
    assert all("high res" not in text and "solo" in text and "scr300" in text for text in whole.conditionings if text)
    assert "2 pictures: 0 to train on, 2 held out" in said and "6 pictures: 6 to train on, 0 held out" in said
    with pytest.raises(ValueError, match=r"validation of filters chooses every image of .*, so none is left to train"):
        _call(host, demo, folder, filters="validation: {}")


def test_a_changed_file_of_the_validation_folder_runs_the_node_again(host, folder):
    low, high = _two_folders(host, folder)
    node = host.node("GraftDataset")
    before = node.fingerprint_inputs(folder=low, validation_folder=high)
    assert node.fingerprint_inputs(folder=low, validation_folder=high) == before
    assert node.fingerprint_inputs(folder=low) != before
    _picture(host, high, "new.png", seed=5)
    assert node.fingerprint_inputs(folder=low, validation_folder=high) != before


CONFIG = """
[general]
bucket_reso_steps = 64
[[datasets]]
resolution = 64
batch_size = 2
  [[datasets.subsets]]
  image_dir = 'low'
  num_repeats = 2
[[datasets]]
resolution = 128
batch_size = 1
  [[datasets.subsets]]
  image_dir = 'low'
  class_tokens = 'sks'
  [[datasets.subsets]]
  image_dir = 'high'
  is_reg = true
"""


def test_kohyas_dataset_config_is_read_in_place_of_a_folder(host, demo, folder):
    _two_folders(host, folder)
    name = f"{folder}/dataset_config.toml"
    path = os.path.join(host.input, name)
    with open(path, "w", encoding="utf-8") as file:
        file.write(CONFIG)
    whole, sheet, said = _call(host, demo, name, validation=0.0, resolution=512, regularization_share=0.5)
    shown = {(image.name, tuple(image.latent.shape[-2:]), image.batch_size, image.repeats) for image in whole.images}
    assert shown == {
        (f"low/{i}.png", side, size, n) for i in range(4) for side, size, n in (((8, 8), 2, 2), ((16, 16), 1, 1))
    }
    assert len(whole.regularization.images) == 3 and whole.regularization_share == 0.5 and sheet.shape[0] == 1
    assert (
        f"{folder}/low (resolution 64, batch size 2):" in said
        and f"{folder}/high (resolution 128, regularization):" in said
    )
    assert "is_reg: regularization share of the node says how many" in said
    node = host.node("GraftDataset")
    assert node.validate_inputs(folder=name) is True
    before = node.fingerprint_inputs(folder=name)
    _picture(host, f"{folder}/high", "new.png", seed=77)
    assert node.fingerprint_inputs(folder=name) != before
    with pytest.raises(ValueError, match="has regularization images"):
        _call(host, demo, name, regularization=whole.regularization)
    with pytest.raises(
        ValueError, match=r"validation of filters needs a validation folder beside dataset_config\.toml"
    ):
        _call(host, demo, name, filters="validation: {consider_every_nth: 2}")
    with open(path, "w", encoding="utf-8") as file:
        file.write(CONFIG.replace("resolution = 64\n", "resolution = [64, 128]\n"))
    wide, _, said = _call(host, demo, name, validation=0.0, resolution=512, regularization_share=0.5)
    assert f"{folder}/low (resolution 64 x 128, batch size 2):" in said
    assert {image.resolution for image in wide.images} == {90, 128}  # the side of a square of 64 x 128 pixels
    with open(path, "a", encoding="utf-8") as file:
        file.write("  color_aug = true\n")
    with pytest.raises(ValueError, match=r"\[\[datasets\]\] 2 subset 2: color_aug is True, expected false"):
        _call(host, demo, name)
    assert "there is no file" in node.validate_inputs(folder=f"{folder}/no.toml")
    assert "outside ComfyUI's input folder" in node.validate_inputs(folder="../x.toml")


def test_the_editor_gets_the_pictures_of_all_folders(host, folder):
    low, high = _two_folders(host, folder)
    prompt = {key: node for key, node in _train(host, low, [], "none", validation_folder=high).items() if key in "12"}
    result = host.run({**prompt, "9": {"class_type": "PreviewImage", "inputs": {"images": ["2", 1]}}}, capture={})
    assert result["success"], result["errors"]
    outputs = [data["output"] or {} for name, data in host.events if name == "executed"]
    data = [output for output in outputs if "graft_dataset" in output][-1]["graft_dataset"][0]
    assert (data["count"], data["train"], data["held_out"], data["folder"]) == (7, 4, 3, ".")
    assert [row["name"] for row in data["pictures"]][3:5] == [f"{low}/3.png", f"{high}/0.png"]
    assert all(os.path.isfile(os.path.join(host.input, row["name"])) for row in data["pictures"])
    assert data["buckets"] == [{"width": 64, "height": 64, "batch_id": "", "train": 4, "held_out": 3}]


@pytest.fixture
def pairs(host, folder):
    """A folder of two images with a control picture each."""
    for number in range(2):
        _picture(host, folder, f"{number}.png", "a red circle left", seed=number)
        _picture(host, folder, f"{number}.control.png", seed=10 + number)
    return folder


def test_control_pictures_are_reference_latents(host, demo, pairs):
    dataset, _, report = _call(host, demo, pairs, validation=0.0, control_pictures="reference latents")
    assert len(dataset.images) == 2 and "control pictures: 2, 1 for each image" in report
    assert "control pictures are encoded as ReferenceLatent does" in report
    for number, image in enumerate(dataset.images):
        with open(os.path.join(host.input, pairs, f"{number}.control.png"), "rb") as file:
            pixels = torch.from_numpy(np.asarray(Image.open(file), dtype=np.float32) / 255)[None]
        with torch.inference_mode():
            expected = demo[2].encode(pixels)
        assert torch.allclose(image.extras["reference_latents"][0], expected.float().cpu())


def test_a_clip_that_tells_nothing_of_control_pictures_asks_for_the_setting(host, demo, pairs):
    with pytest.raises(ValueError, match="this CLIP does not tell how the model takes them"):
        _call(host, demo, pairs)
    plain, _, report = _call(host, demo, pairs, validation=0.0, control_pictures="off")
    assert len(plain.images) == 4 and "control pictures" not in report
    with pytest.raises(ValueError, match="control pictures is 'on', expected one of auto, reference latents"):
        _call(host, demo, pairs, control_pictures="on")


def test_a_changed_control_picture_runs_the_node_again(host, pairs):
    node = host.node("GraftDataset")
    before = node.fingerprint_inputs(folder=pairs)
    assert node.fingerprint_inputs(folder=pairs) == before
    _picture(host, pairs, "0.control.png", size=(128, 128), seed=99)
    assert node.fingerprint_inputs(folder=pairs) != before


def test_a_huge_dataset_config_is_not_read_whole_to_see_whether_it_changed(host, folder):
    path = os.path.join(host.input, folder, "dataset_config.toml")
    with open(path, "wb") as file:
        file.truncate(200 << 20)
    node = host.node("GraftDataset")
    tracemalloc.start()
    try:
        before = node.fingerprint_inputs(folder=f"{folder}/dataset_config.toml")
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 40 << 20
    with open(path, "ab") as file:
        file.write(b"#")
    assert node.fingerprint_inputs(folder=f"{folder}/dataset_config.toml") != before
