"""Previews by the user's own nodes: what lies between Preview Begin and Preview End runs at each preview, by node
expansion, and the training is the same to the byte.
"""

import io
import os
import wave
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from . import test_training
from .test_training import _bytes, _clear, _inputs, _run, _workflow

pictures, run, wall = test_training.pictures, test_training.run, test_training.wall


def _graphed(host, pictures, run, *steps, every=2, **more):
    """A run whose previews are KSampler's and VAE Decode's."""
    prompt = _workflow(host, pictures, run, *steps, preview_every=every, validate_every=0, **more)
    prompt["30"] = _inputs(host, "CLIPTextEncode", clip=["1", 1], text="a red square left")
    prompt["31"] = _inputs(host, "CLIPTextEncode", clip=["1", 1], text="")
    prompt["32"] = _inputs(host, "EmptyLatentImage", width=128, height=192, batch_size=1)
    prompt["40"] = {"class_type": "GraftPreviewBegin", "inputs": {}}
    prompt["41"] = _inputs(
        host,
        "KSampler",
        model=["40", 0],
        positive=["30", 0],
        negative=["31", 0],
        latent_image=["32", 0],
        seed=7,
        steps=3,
        cfg=5.0,
        sampler_name="dpmpp_2m",
        scheduler="karras",
        denoise=1.0,
    )
    prompt["42"] = _inputs(host, "VAEDecode", samples=["41", 0], vae=["40", 2])
    prompt["43"] = {"class_type": "GraftPreviewEnd", "inputs": {"images": ["42", 0]}}
    for number in range(len(steps)):
        prompt[str(10 + number)]["inputs"]["previews"] = ["43", 0]
    return prompt


def _sent(result, name="graft.preview"):
    return [data for event, data in result["events"] if event == name]


def _pixels(host, picture):
    path = os.path.join(host.output, picture["subfolder"], picture["filename"])
    with Image.open(path) as file:
        return np.asarray(file).astype(int)


@pytest.mark.parametrize("total", [12, 0], ids=["a closed schedule", "an open schedule"])
def test_the_training_is_the_same_to_the_byte_and_each_preview_is_what_the_nodes_make_of_that_step(
    host, pictures, run, wall, total
):
    optimizer = {"total_steps": total, "schedule": "cosine"}
    plain = _run(host, _workflow(host, pictures, run, 5, validate_every=0, optimizer=optimizer), state=["10", 0])
    _clear(host, run)
    prompt = _graphed(host, pictures, run, 5, optimizer=optimizer)
    result = host.run(prompt, capture={"state": ["10", 0], "report": ["10", 5], "lora": ["10", 3]})
    assert result["success"], result["errors"]
    state, report = result["captured"]["state"], result["captured"]["report"]
    for group in ("trained", "optimizer", "average"):
        assert _bytes(getattr(state, group)) == _bytes(getattr(plain["state"], group)), group
    assert state.key == plain["state"].key and state.history == plain["state"].history
    sent = _sent(result)
    assert [(data["step"], data["pictures"][0]["label"]) for data in sent] == [
        (2, "weights"),
        (2, "average"),
        (4, "weights"),
        (4, "average"),
    ]
    assert (
        {data["node"] for data in sent} == {"10"}
        and "step 0 to 5, 5 trained now" in report
        and "4 previews, from " in report
    )
    (ended,) = _sent(result, "graft.end")
    assert ended["ended"] == "done" and ended["result"] == state.key, "a pause is not an end"
    assert [data["step"] for data in _sent(result, "graft.step")] == [1, 2, 3, 4, 5]
    first, third = (_pixels(host, sent[number]["pictures"][0]) for number in (0, 2))
    # By hand: the same sampler on the MODEL of a Train Step that ends there, with the same schedule.
    _clear(host, run)
    alone = _workflow(host, pictures, run, 4, validate_every=0, optimizer={**optimizer, "total_steps": total or 5})
    for key in ("30", "31", "32", "41", "42"):
        alone[key] = {**prompt[key], "inputs": dict(prompt[key]["inputs"])}
    alone["41"]["inputs"]["model"] = ["10", 1]
    alone["42"]["inputs"]["vae"] = ["1", 2]
    alone["50"] = {"class_type": "PreviewImage", "inputs": {"images": ["42", 0]}}
    expected = _run(host, alone, image=["42", 0])["image"]
    assert expected.shape[1:3] == (192, 128)
    as_jpeg = io.BytesIO()
    Image.fromarray((expected[0].clamp(0, 1) * 255).round().to(torch.uint8).numpy()).save(
        as_jpeg, format="JPEG", quality=92
    )
    assert np.abs(third - np.asarray(Image.open(as_jpeg)).astype(int)).max() <= 2
    assert np.abs(first - third).max() > 2


def test_nodes_outside_run_once_and_the_same_queue_again_runs_nothing(host, pictures, run, wall):
    prompt = _graphed(host, pictures, run, 4)
    host.fresh()
    result = host.run(prompt)
    assert result["success"], result["errors"]
    executed = [data["node"] for event, data in result["events"] if event == "executing" and data["node"]]
    assert executed.count("30") == 1 and executed.count("31") == 1 and executed.count("32") == 1
    assert not {"40", "41", "42", "43"} & set(executed), "what lies between runs only at previews"
    shown = [data["display_node"] for event, data in result["events"] if event == "executing" and data["node"]]
    assert shown.count("41") == 4, "and the editor shows the nodes that the user placed"
    again = host.run(prompt)
    assert again["success"] and not _sent(again) and not _sent(again, "graft.step")


def test_an_error_of_a_preview_costs_no_step(host, pictures, run, wall, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("this node fails")

    with monkeypatch.context() as patched:
        patched.setattr(host.node("VAEDecode"), "decode", fail)
        result = host.run(_graphed(host, pictures, run, 5, every=3))
    assert not result["success"]
    mended = host.run(_graphed(host, pictures, run, 5, every=3), capture={"report": ["10", 5]})
    assert [data["ended"] for data in _sent(mended, "graft.end")] == ["interrupted", "done"]
    assert mended["success"] and "went on from the snapshot at step 3" in mended["captured"]["report"]


def test_stopped_in_a_preview_the_step_ends_with_the_state_so_far(host, pictures, run, wall, monkeypatch):
    real = wall.events.send_event

    def press(name, data):
        real(name, data)
        if name == "graft.preview":
            assert wall.events.stop_run(run), "it runs while its previews are sampled"

    monkeypatch.setattr(wall.events, "send_event", press)
    stopped = _run(host, _graphed(host, pictures, run, 5), state=["10", 0], report=["10", 5])
    assert stopped["state"].step == 3 and "stopped at step 3 as asked, 2 steps early" in stopped["report"]


def test_previews_and_the_state_can_be_asked_for_while_it_trains(host, pictures, run, wall, monkeypatch):
    real = wall.events.send_event

    def press(name, data):
        real(name, data)
        if name == "graft.step" and data["step"] in (1, 3):
            assert wall.events.ask_run(run, "sample" if data["step"] == 1 else "save")

    plain = _run(host, _workflow(host, pictures, run, 5, validate_every=0), lora=["10", 3])
    _clear(host, run)
    monkeypatch.setattr(wall.events, "send_event", press)
    result = host.run(_graphed(host, pictures, run, 5, every=0, ema=True), capture={"lora": ["10", 3]})
    assert result["success"] and _bytes(result["captured"]["lora"]) == _bytes(plain["lora"])
    assert [(data["step"], data["pictures"][0]["label"]) for data in _sent(result)] == [(2, "weights"), (2, "average")]
    assert [data["step"] for data in _sent(result, "graft.saved")] == [4]
    assert _sent(result, "graft.step")[0]["can"] == ["sample", "save"]


def test_loras_of_earlier_previews_are_let_go(host, pictures, run, wall, monkeypatch):
    handed = []
    real = wall.lora_stacks.apply_lora_stack

    def apply(model, clip, entries, *more, **named):
        patched = real(model, clip, entries, *more, **named)
        handed.append(patched.model)
        return patched

    monkeypatch.setattr(wall.lora_stacks, "apply_lora_stack", apply)
    _run(host, _graphed(host, pictures, run, 4, ema=False))
    carried = [wall.lora_injection.carried_stacks(model) for model in handed]
    assert [[bool(stack.patches) for stack in stacks] for stacks in carried] == [[False], [True], [True]]


def test_a_preview_of_a_slider_shows_its_strengths_beside_each_other(host, pictures, run, wall):
    prompt = _graphed(host, pictures, run, 2, ema=False)
    prompt["8"] = _inputs(
        host,
        "GraftSlider",
        dataset=["2", 0],
        clip=["1", 1],
        target="a circle",
        positive="a circle",
        negative="a square",
    )
    prompt["7"]["inputs"]["dataset"] = ["8", 0]
    result = host.run(prompt)
    assert result["success"], result["errors"]
    ((picture,),) = [data["pictures"] for data in _sent(result)]
    assert _pixels(host, picture).shape[:2] == (192, 3 * 128)


def test_video_and_sound_are_kept_beside_pictures(host, wall, run):
    class Video:
        def save_to(self, path):
            with open(path, "wb") as file:
                file.write(b"mp4")

    tone = torch.sin(torch.linspace(0, 50, 800)).repeat(1, 2, 1)
    name = wall.previews.name_of("a" * 64, 20, "weights")
    files = wall.previews.save_media(Video(), {"waveform": tone, "sample_rate": 8000}, run, name)
    assert [file["filename"] for file in files] == [f"{name}-0.mp4", f"{name}-0.wav"]
    folder = os.path.join(host.output, files[0]["subfolder"])
    assert sorted(os.listdir(folder)) == sorted(file["filename"] for file in files)
    with wave.open(os.path.join(folder, files[1]["filename"])) as sound:
        assert (sound.getnchannels(), sound.getframerate(), sound.getnframes()) == (2, 8000, 800)
        read = np.frombuffer(sound.readframes(800), "<i2").reshape(800, 2)
    assert np.abs(read / 32767 - tone[0].T.numpy()).max() < 1e-4
    listed = wall.previews.list_kept(run, "a" * 64, 20)
    assert [one["filename"] for one in listed] == [file["filename"] for file in files]
    assert wall.previews.list_kept(run, "a" * 64, 19) == []


def test_what_previews_lack_is_said_before_the_first_step(host, pictures, run, wall):
    def error(change):
        prompt = _graphed(host, pictures, run, 2)
        change(prompt)
        result = host.run(prompt)
        assert not result["success"] and not _sent(result, "graft.step")
        return str(result["errors"])

    assert "no Preview Begin leads to its Preview End" in error(
        lambda prompt: (
            prompt["41"]["inputs"].update(model=["1", 0]),
            prompt["42"]["inputs"].update(vae=["1", 2]),
        )
    )
    assert "VAE of Preview Begin is connected" in error(lambda prompt: prompt["7"]["inputs"].pop("vae"))
    assert "Preview End: nothing is connected" in str(_end_alone(host))


def _end_alone(host):
    with pytest.raises(ValueError) as caught:
        host.node("GraftPreviewEnd").execute()
    return caught.value


def test_preview_begin_outside_of_a_preview_says_where_it_belongs(host):
    given = host.node("GraftPreviewBegin").execute().args
    assert len(given) == 4 and all("only while Train Step makes a preview" in value.message for value in given)


def test_a_graph_that_takes_the_models_of_the_step_itself_is_refused(wall):
    from graft_nodes.host.preview_graph import find_preview_graph

    nodes = {
        "1": {"class_type": "TrainStep", "inputs": {"previews": ["3", 0]}},
        "2": {"class_type": "KSampler", "inputs": {"model": ["1", 1]}},
        "3": {"class_type": "GraftPreviewEnd", "inputs": {"images": ["2", 0]}},
    }
    with pytest.raises(ValueError, match="output of this very Train Step"):
        find_preview_graph(SimpleNamespace(get_node=nodes.__getitem__), "1", 6)
