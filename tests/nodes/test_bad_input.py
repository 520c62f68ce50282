"""Bad input through the host's executor: what is wrong is said, in full and before the first step, and what can be
trained is.
"""

import os

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def folder(host, request):
    """An empty folder below the host's input folder."""
    name = f"bad {request.node.name}"[:80].replace("/", "-")
    os.makedirs(os.path.join(host.input, name))
    return name


def _picture(host, folder, name, caption="a red circle left", size=(64, 64), seed=0):
    path = os.path.join(host.input, folder, name)
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    if caption is not None:
        with open(os.path.splitext(path)[0] + ".txt", "wb") as file:
            file.write(caption if isinstance(caption, bytes) else caption.encode())


@pytest.fixture(scope="module")
def some(host):
    """A folder of three pictures that nothing is wrong with."""
    os.makedirs(os.path.join(host.input, "some"))
    for i in range(3):
        _picture(host, "some", f"{i}.png", f"a red circle left, tag {i}", seed=i)
    return "some"


def _workflow(host, folder, run, steps=2, **given):
    """The demo model trained on a folder; inputs by node id."""

    def node(node_id, **inputs):
        return {"class_type": node_id, "inputs": {**host.defaults(node_id), **inputs, **given.get(node_id, {})}}

    settings = {"learning_rate": 2e-3, "batch_size": 2, "total_steps": 12}
    prompt = {
        "1": node("GraftDemo"),
        "2": node("GraftDataset", folder=folder, vae=["1", 2], clip=["1", 1], resolution=64),
        "3": node("GraftAdapter", rank=2),
        "4": node("GraftOptimizer", settings=["3", 0], **settings),
        "5": node("GraftObjective", settings=["4", 0]),
        "7": node(
            "GraftTrainStart",
            model=["1", 0],
            dataset=["2", 0],
            settings=["5", 0],
            run=run,
        ),
        "10": node("TrainStep", state=["7", 0], steps=steps, validate_every=1),
    }
    if "GraftEMA" in given:
        prompt["6"] = node("GraftEMA", settings=["5", 0])
        prompt["7"]["inputs"]["settings"] = ["6", 0]
    return prompt


def _run(host, prompt):
    host.fresh()
    capture = {"dataset": ["2", 0], "read": ["2", 2], "begun": ["7", 1], "report": ["10", 5], "state": ["10", 0]}
    result = host.run(prompt, capture=capture)
    assert result["success"], result["errors"]
    return result["captured"]


def _steps(host):
    return sum(name == "graft.step" for name, _ in host.events)


def test_one_picture_is_trained_and_cannot_be_held_out(host, folder):
    _picture(host, folder, "a.png")
    found = _run(host, _workflow(host, folder, "one picture", GraftOptimizer={"batch_size": 4}))
    assert "one picture alone cannot be held out too, so there is no validation" in found["read"]
    assert "1 images, 0 held out for validation; an epoch is 1 steps" in found["begun"]
    assert "no image is held out, so there is no validation" in found["begun"]
    assert found["state"].step == 2 and not found["state"].history.validation


def test_a_picture_smaller_than_its_bucket_is_enlarged_or_left_out_as_set(host, folder):
    _picture(host, folder, "large.png", size=(80, 80))
    _picture(host, folder, "small.png", size=(20, 20), seed=1)
    found = _run(host, _workflow(host, folder, "small", GraftDataset={"validation": 0.0}))
    assert "1 smaller than their bucket, enlarged: small.png" in found["read"] and len(found["dataset"].images) == 2
    found = _run(host, _workflow(host, folder, "small", GraftDataset={"validation": 0.0, "filters": "small: skip"}))
    assert (
        "1 left out, smaller than their bucket (small: skip): small.png" in found["read"]
        and len(found["dataset"].images) == 1
    )


def test_duplicate_names_and_pictures_are_said(host, folder):
    _picture(host, folder, "a.png")
    _picture(host, folder, "a.jpg", None, seed=1)
    os.makedirs(os.path.join(host.input, folder, "again"))
    _picture(host, folder, "again/a.png")
    found = _run(host, _workflow(host, folder, "duplicates", GraftDataset={"validation": 0.0}))
    assert "one name for 2 pictures, so one caption file too: a.jpg, a.png" in found["read"]
    assert "the same picture 2 times: a.png, again/a.png" in found["read"] and len(found["dataset"].images) == 3


def test_captions_in_another_encoding_are_said_and_read_when_it_is_named(host, folder):
    _picture(host, folder, "a.png", "a red circle left, café".encode("cp1252"))
    _picture(host, folder, "b.png", seed=1)
    found = _run(host, _workflow(host, folder, "encoding", GraftDataset={"validation": 0.0}))
    assert (
        "a.png: a.txt: the caption is not UTF-8 text" in found["read"]
        and "name its encoding in filters" in found["read"]
    )
    assert [picture.name for picture in found["dataset"].images] == ["b.png"]
    found = _run(
        host, _workflow(host, folder, "encoding", GraftDataset={"validation": 0.0, "filters": "encoding: cp1252"})
    )
    assert found["dataset"].images[0].caption == "a red circle left, café"


def test_a_rate_that_explodes_is_said_before_the_first_step_and_stops_at_the_last_good_state(host, some):
    for optimizer in ("adamw", "sgd"):
        prompt = _workflow(
            host,
            some,
            f"exploding {optimizer}",
            40,
            GraftOptimizer={
                "optimizer": optimizer,
                "learning_rate": 10.0,
                "clip_norm": 0.0,
                "precision": "float32",
            },
            GraftAdapter={"kind": "full", "targets": "all"},
            TrainStep={"validate_every": 0},
        )
        begun = _run(
            host,
            {key: node for key, node in prompt.items() if key != "10"}
            | {"10": {**prompt["10"], "inputs": {**prompt["10"]["inputs"], "steps": 0}}},
        )["begun"]
        if optimizer == "adamw":
            assert "learning rate 10 is so large for adamw that training will probably diverge" in begun
            continue
        before = _steps(host)
        result = host.run(prompt, capture={})
        made = _steps(host) - before
        message = result["errors"]["10"][0]["exception_message"]
        assert not result["success"] and 0 < made < 40
        assert f"Step {made + 1} has loss " in message and "training has diverged" in message
        assert (
            f"The state after step {made} is kept; use a lower learning rate or more warmup steps. It is stored in "
            in message
        )
        # What is kept can be had: so many steps are there already.
        fewer = {**prompt, "10": {**prompt["10"], "inputs": {**prompt["10"]["inputs"], "steps": made}}}
        assert _run(host, fewer)["state"].step == made


EXCLUDING = [
    ({"GraftOptimizer": {"floor": 0.5}}, "schedule constant never falls"),
    ({"GraftOptimizer": {"warmup": 20}}, "warmup steps is 20 and total steps \\(schedule\\) only 12"),
    (
        {"GraftOptimizer": {"optimizer": "schedulefree", "schedule": "cosine"}},
        "takes the place of learning rate schedule cosine",
    ),
    (
        {"GraftOptimizer": {"optimizer": "adacoor", "warmup": 1, "scale_lr": True}},
        "scale rate with batch size True.*warmup steps 1",
    ),
    (
        {"GraftOptimizer": {"optimizer": "prodigy", "lora_plus": 2.0}},
        "one step size for all tensors, so LoRA\\+ ratio 2.0",
    ),
    (
        {"GraftOptimizer": {"fused_backward": True, "accumulation": 2}},
        "maximum gradient norm 1 needs.*gradient accumulation 2 sums",
    ),
    (
        {"GraftOptimizer": {"options": "beta = 1, eps = 0", "floor": 0.5}},
        "did you mean betas.*eps is.*schedule constant never falls",
    ),
    ({"GraftOptimizer": {"text_encoder_rate": 1e-4}}, "the text encoder is not trained"),
    ({"GraftOptimizer": {"block_rates": "nothing* = 2"}}, "matches no trained tensor"),
    (
        {"GraftOptimizer": {"offload": "layers"}, "GraftAdapter": {"kind": "full"}},
        "switch fused backward pass on, or set offload to CPU memory to optimizer",
    ),
    ({"GraftOptimizer": {"lora_plus": 4.0}, "GraftAdapter": {"kind": "loha"}}, "adapter type loha trains none"),
    ({"GraftOptimizer": {"optimizer": "schedulefree"}, "GraftEMA": {}}, "is an average of the weights itself"),
    (
        {"GraftAdapter": {"kind": "full", "alpha": 1.0, "rank_dropout": 0.1}},
        "rank dropout needs an adapter.*alpha needs an adapter",
    ),
    (
        {"GraftAdapter": {"kind": "oft", "alpha": 2.0, "network_dropout": 0.5}},
        "adapter type oft does not use alpha.*network dropout drops the activations",
    ),
    ({"GraftAdapter": {"text_encoder": True}}, "no CLIP is connected"),
    ({"GraftAdapter": {"pattern": "nothing"}}, "choose no module"),
    ({"GraftObjective": {"weighting": "min-snr"}}, "signal-to-noise ratio, which flow models lack"),
    ({"GraftObjective": {"zero_terminal_snr": True}}, "zero terminal SNR is for v models"),
    ({"GraftObjective": {"prior": "regularization"}}, "needs a regularization dataset"),
    ({"GraftObjective": {"pyramid_noise": 1.5, "gamma": 0.0}}, "(?=.*Value 0.0 smaller)(?=.*Value 1.5 bigger)"),
    ({"GraftEMA": {"snapshots": 5, "interval": 2}}, "multiples of update every N steps"),
    (
        {"GraftDataset": {"shuffle_tags": True, "filters": "shuffle_tag_p: 0.5"}},
        "shuffle tags shuffles always and shuffle_tag_p",
    ),
    ({"GraftDataset": {"keep_tags": 1}}, "keep first tags has no effect"),
    ({"GraftDataset": {"filters": "masks: alpha"}}, "no picture is transparent or has a mask file"),
    ({"GraftDataset": {"filters": "min_score: 5", "captions": "txt"}}, "need scores from JSON files"),
    (
        {"GraftDataset": {"filters": "crops: 3\ncache: false\ncache_gb: 2"}},
        "crops has no effect.*cache_gb has no effect",
    ),
    ({"GraftDataset": {"resolution": 64, "bucket_step": 128}}, "expected at least bucket step"),
    ({"TrainStep": {"preview_every": 1}}, "positive prompt is not connected; latent is not connected; VAE"),
]


@pytest.mark.parametrize(("given", "message"), EXCLUDING, ids=[message[:40] for _, message in EXCLUDING])
def test_settings_that_exclude_each_other_are_said_before_the_first_step(host, some, given, message):
    import re

    before = _steps(host)
    result = host.run(_workflow(host, some, "excluding", **given), capture={})
    assert not result["success"] and _steps(host) == before
    assert re.search(message, str(result["errors"]), re.DOTALL), str(result["errors"])[:1500]
