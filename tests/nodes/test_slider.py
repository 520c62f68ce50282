"""Slider in a graph: from prompts alone, with pictures and from pairs; its settings, its refusals, and the file."""

import os

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

PROMPTS = {"positive": "a green circle", "negative": "a red circle", "target": "a yellow circle"}
SMALL = {"width": 64, "height": 64, "steps": 2, "cfg": 1.0}


@pytest.fixture(scope="module")
def models(host):
    return host.call("GraftDemo")[:3]


@pytest.fixture(scope="module")
def folder(host):
    """Four pairs of 64 x 64 pixels, and one picture without a partner in a folder of its own."""
    root = os.path.join(host.input, "slider")
    for number, name in enumerate(("one", "two", "three", "four")):
        for ending, color in ((".win", (40, 200, 40)), (".lose", (200, 40, 40))):
            _picture(os.path.join(root, "pairs", f"{name}{ending}.png"), color, number)
        _picture(os.path.join(root, "plain", f"{name}.png"), (200, 200, 40), number)
    return "slider"


def _picture(path, color, number):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    pixels = np.full((64, 64, 3), 255, dtype=np.uint8)
    pixels[16:40, 4 * number : 4 * number + 24] = color
    Image.fromarray(pixels).save(path)


def _dataset(host, models, folder):
    _, clip, vae = models
    return host.call("GraftDataset", folder=folder, vae=vae, clip=clip, resolution=64, bucket_step=64, validation=0.25)[
        0
    ]


def _slider(host, models, **given):
    _, clip, vae = models
    return host.call("GraftSlider", **{**PROMPTS, **SMALL, "clip": clip, "vae": vae, **given})


def _trained(host, models, data, run, steps=2):
    model, clip, vae = models
    (optimizer,) = host.call("GraftOptimizer", learning_rate=1e-3, batch_size=2)
    (adapter,) = host.call("GraftAdapter", rank=2)
    given = {"model": model, "dataset": data, "clip": clip, "vae": vae, "adapter": adapter, "optimizer": optimizer}
    state, report = host.call("GraftTrainStart", **given, run=run)
    return host.call("TrainStep", state=state, steps=steps, validate_every=2), report


def test_prompts_alone_train_a_lora_whose_file_names_them(host, models):
    data, said = _slider(host, models)
    made, report = _trained(host, models, data, "slider prompts")
    assert said in report and "1 sets of prompts on noise, 4 held out for validation" in report
    state = made[0]
    assert state.history.validation[0][0] == 0 and state.history.validation[-1][0] == 2
    (path,) = host.call("GraftSaveLoRA", state=state, prefix="loras/slider")
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata["graft_slider"] == "both directions" and metadata["graft_slider_target"] == "a yellow circle"
    assert metadata["graft_slider_positive"] == "a green circle"
    assert metadata["graft_slider_negative"] == "a red circle"
    again, _ = _trained(host, models, _slider(host, models)[0], "slider prompts")
    assert "nothing was trained" in again[5], "the same input is the stored result"


def test_pictures_and_pairs_are_trained_on(host, models, folder):
    plain = _dataset(host, models, f"{folder}/plain")
    data, _ = _slider(host, models, dataset=plain, vae=None)
    assert len(data.images) == 3 and {image.caption for image in data.images} == {"a yellow circle"}
    assert _trained(host, models, data, "slider pictures")[0][0].step == 2
    pairs = _dataset(host, models, f"{folder}/pairs")
    data, said = host.call("GraftSlider", method="picture pairs", dataset=pairs)
    assert said == "slider from 3 pairs: strength 1 gives the pictures, -1 their partners"
    assert _trained(host, models, data, "slider pairs")[0][0].step == 2


def test_every_setting_changes_the_run(host, models):
    plain = _slider(host, models)[0].digest
    flips = {
        "method": "concept sliders",
        "positive": "a blue circle",
        "negative": "",
        "target": "a red square",
        "neutral": "a circle",
        "keep": "left\nright",
        "guidance": 1.0,
        "width": 128,
        "height": 128,
        "steps": 3,
        "cfg": 2.0,
        "anchor": "a square",
    }
    digests = {name: _slider(host, models, **{name: value})[0].digest for name, value in flips.items()}
    anchored = {"anchor": "a square", "anchor_strength": 2.0}
    digests["anchor_strength"] = _slider(host, models, **anchored)[0].digest
    assert plain not in digests.values() and len(set(digests.values())) == len(digests)
    schema = host.nodes.NODE_CLASS_MAPPINGS["GraftSlider"].define_schema()
    assert {one.id for one in schema.inputs} == {*digests, "clip", "vae", "dataset"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"clip": None}, "slider method both directions needs prompts, and no CLIP is connected"),
        ({"vae": None}, "connect VAE, which tells the shape of the latents, or a dataset of pictures"),
        ({"positive": ""}, "positive prompt is empty"),
        (
            {"negative": "a green circle"},
            r"is the same \('a green circle'\), which is not a direction: write what strength -1 gives",
        ),
        ({"negative": "A  GREEN circle"}, "'a green circle' and 'A  GREEN circle' alike, so there is no direction"),
        ({"method": "picture pairs"}, "slider method picture pairs needs a dataset"),
    ],
)
def test_what_is_missing_is_said(host, models, given, said):
    with pytest.raises(ValueError, match=f"Slider: .*{said}"):
        _slider(host, models, **given)


def test_pictures_without_partner_and_adapters_without_strength_are_refused(host, models, folder):
    plain = _dataset(host, models, f"{folder}/plain")
    with pytest.raises(ValueError, match="4 of 4 pictures have no partner: "):
        host.call("GraftSlider", method="picture pairs", dataset=plain)
    model, clip, _ = models
    (dora,) = host.call("GraftAdapter", kind="dora")
    with pytest.raises(ValueError, match="adapter type dora has no strength below 0"):
        host.call("GraftTrainStart", model=model, clip=clip, dataset=_slider(host, models)[0], adapter=dora, run="no")
    (dpo,) = host.call("GraftObjective", loss="dpo")
    with pytest.raises(ValueError, match="loss function dpo compares the pictures of pairs"):
        host.call("GraftTrainStart", model=model, clip=clip, dataset=_slider(host, models)[0], objective=dpo, run="no")


def test_wrong_lines_are_refused_at_the_widget(host):
    node = host.nodes.NODE_CLASS_MAPPINGS["GraftSlider"]
    given = {"method": "both directions", "neutral": "", "keep": "", "guidance": 3.0, "steps": 20, "cfg": 3.0}
    said = node.validate_inputs(**given, positive="a\nb", negative="c\nd\ne", target="f")
    assert "negative prompt has 3 lines and positive prompt 2" in said
    assert node.validate_inputs(**given, positive="a\nb", negative="c\nd", target="f") is True


def test_previews_show_three_strengths_beside_each_other(host, models):
    """From left to right -1, 0 and 1, each as the sampler draws it with the LoRA at that strength."""
    data, _ = _slider(host, models)
    model, clip, vae = models
    (optimizer,) = host.call("GraftOptimizer", learning_rate=3e-2, batch_size=2)
    (adapter,) = host.call("GraftAdapter", rank=2)
    given = {"model": model, "dataset": data, "clip": clip, "vae": vae, "adapter": adapter, "optimizer": optimizer}
    state = host.call("GraftTrainStart", **given, run="slider previews")[0]
    (positive,) = host.call("CLIPTextEncode", clip=clip, text="a yellow circle")
    (latent,) = host.call("EmptyLatentImage", width=64, height=64, batch_size=1)
    made = host.call("TrainStep", state=state, steps=4, preview_every=4, positive=positive, latent=latent)
    again = host.call("GraftTrainStart", **given, run="slider without previews")[0]
    plain = host.call("TrainStep", state=again, steps=4)
    assert all(torch.equal(tensor, plain[0].trained[name]) for name, tensor in made[0].trained.items())
    folder = os.path.join(host.output, "graft", "slider previews", "previews")
    (name,) = os.listdir(folder)
    shown = np.asarray(Image.open(os.path.join(folder, name)).convert("RGB"), dtype=np.float64)
    assert shown.shape == (64, 192, 3)
    parts = np.split(shown, 3, axis=1)
    lora, entry = host.module("host.lora_stacks"), host.module("patches.lora_files.entry").LoraEntry
    sampler = {"steps": 20, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "noise_seed": 0}
    sampler |= {"positive": positive, "negative": positive, "latent_image": latent, "start_at_step": 0}
    sampler |= {"add_noise": "enable", "end_at_step": 10000, "return_with_leftover_noise": "disable"}
    wanted = []
    for strength in (-1.0, 0.0, 1.0):
        patched = lora.apply_lora_stack(model, None, [entry("slider", made[0].lora_model(), strength)]).model
        (drawn,) = host.call("KSamplerAdvanced", model=patched, **sampler)
        wanted.append(vae.decode(drawn["samples"])[0].numpy() * 255)
    for own, part in enumerate(parts):
        errors = [float(np.abs(part - one).mean()) for one in wanted]  # its own is JPEG's
        others = errors[:own] + errors[own + 1 :]
        assert errors[own] < 0.5 * min(others), errors
