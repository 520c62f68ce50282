"""Preference tuning through the nodes: what the demo model draws after it, stored results, resume, and refusals."""

import os

import numpy as np
import pytest
from PIL import Image

SAMPLES = 32
FEWEST = 26  # of them after: 80%
BEFORE = range(13, 20)  # of them before: half, but for three


def _pairs(host, folder, names, width=64):
    """Small pictures of noise in a folder of the input folder."""
    place = os.path.join(host.input, folder)
    os.makedirs(place, exist_ok=True)
    draw = np.random.default_rng(3)
    for name in names:
        Image.fromarray(draw.integers(0, 255, (64, width, 3), dtype=np.uint8)).save(os.path.join(place, name))


def _graph(host, folder, loss="dpo", steps=2, validation=0.0, **objective):
    def node(kind, **given):
        return {"class_type": kind, "inputs": {**host.defaults(kind), **given}}

    return {
        "demo": node("GraftDemo"),
        "data": node(
            "GraftDataset", folder=folder, resolution=64, validation=validation, vae=["demo", 2], clip=["demo", 1]
        ),
        "objective": node("GraftObjective", loss=loss, **objective),
        "optimizer": node(
            "GraftOptimizer", settings=["objective", 0], batch_size=2, total_steps=4, precision="float32"
        ),
        "start": node(
            "GraftTrainStart",
            model=["demo", 0],
            dataset=["data", 0],
            settings=["optimizer", 0],
            run="preferred",
        ),
        "step": node("TrainStep", state=["start", 0], steps=steps, validate_every=1),
    }


def _run(host, graph):
    host.fresh()
    return host.run(graph, {"state": ["step", 0], "report": ["step", 5]})


def test_results_are_stored_and_resumed_with_equal_bytes(host):
    _pairs(host, "liked", [f"{number}.{side}.png" for number in range(4) for side in ("win", "lose")])
    ran = _run(host, _graph(host, "liked", steps=4, validation=0.25))
    first = ran["captured"]
    again = _run(host, _graph(host, "liked", steps=4, validation=0.25))["captured"]
    assert "4 trained now" in first["report"] and "0 trained now" in again["report"]
    part = _run(host, _graph(host, "liked", steps=2, validation=0.25, beta=500.0))["captured"]
    rest = _run(host, _graph(host, "liked", steps=4, validation=0.25, beta=500.0))["captured"]
    assert "2 trained now" in part["report"] and "2 trained now" in rest["report"]
    equal = host.module("training.state").equal
    assert equal(first["state"], again["state"]) and not equal(first["state"], rest["state"])
    assert first["state"].history == again["state"].history
    assert [step for step, _ in first["state"].history.accuracy] == [0, 1, 2, 3, 4]
    assert "implicit accuracy on held-out pairs 50% at step 0" in again["report"]
    told = [data["accuracy"] for event, data in ran["events"] if event == "graft.step"]
    assert told == [share for _, share in first["state"].history.accuracy[1:]]


def test_previews_that_are_marked_are_pairs_for_dataset(host):
    import torch

    previews, preferences = host.module("host.previews"), host.module("host.preference_routes")
    draw = torch.Generator().manual_seed(3)
    files = {}
    for prompt, text in ((0, ""), (1, "a red circle"), (2, "a blue shape")):
        for step in (5, 10):
            name = previews.name_of("0" * 64, step, "weights", prompt)
            picture = torch.rand((1, 64, 64, 3), generator=draw)
            files[prompt, step] = previews.save_pictures(picture, "seen", name, text)[0]["filename"]
    for prompt, better, worse in ((0, 5, 10), (1, 10, 5), (2, 5, 10), (2, 10, 5)):  # the last one the other way round
        body = {"run": "seen", "better": files[prompt, better], "worse": files[prompt, worse]}
        status, answer = preferences.mark(body)
        assert status == 200, answer
    assert (answer["folder"], answer["pairs"]) == ("graft_preferences/seen", 3)
    graph = _graph(host, answer["folder"], steps=1)
    host.fresh()
    result = host.run(graph, {"report": ["data", 2], "dataset": ["data", 0], "state": ["step", 0]})
    assert result["success"], result["errors"]
    report, dataset = result["captured"]["report"], result["captured"]["dataset"]
    assert "preference pairs: 3, as steps-5-10-" in report and "1 without a caption" in report
    assert sorted(image.caption for image in dataset.images) == ["", "a blue shape", "a red circle"]


def test_a_folder_without_pairs_is_refused_with_the_names_of_its_pictures(host):
    _pairs(host, "unpaired", ["a.png", "b.png"])
    result = _run(host, _graph(host, "unpaired"))
    assert not result["success"]
    assert "dpo learns from pairs, and 2 of 2 images have no worse picture: a.png, b.png" in str(result["errors"])


def test_a_missing_partner_is_named(host):
    _pairs(host, "halved", ["a.win.png", "a.lose.png", "b.win.png"])
    result = _run(host, _graph(host, "halved"))
    assert not result["success"] and "b.win.png: there is no b.lose.png beside it" in str(result["errors"])


@pytest.mark.parametrize(("side", "other"), [("win", "lose"), ("lose", "win")])
def test_pictures_that_all_lack_their_partner_are_refused_with_its_name(host, side, other):
    """Without any pair in the folder its names may mean anything, until dpo is to learn from it."""
    _pairs(host, f"all {side}", [f"a.{side}.png", f"b.{side}.png"])
    result = _run(host, _graph(host, f"all {side}"))
    assert not result["success"]
    said = f"2 of 2 images have no worse picture: a.{side}.png, b.{side}.png. Beside a.{side}.png there is no a.{other}"
    assert said in str(result["errors"]), result["errors"]


def test_a_pair_of_two_shapes_is_left_out_and_said_or_refused_where_it_is_the_only_one(host):
    said = "a.win.png: it is 64x64 and a.lose.png 96x64: the pictures of a pair need one shape, as they are cropped"
    said += " alike; crop one of them to that of the other"
    _pairs(host, "two shapes", ["a.win.png"])
    _pairs(host, "two shapes", ["a.lose.png"], width=96)
    alone = _run(host, _graph(host, "two shapes"))
    assert not alone["success"] and "no picture in folder 'two shapes' can be used" in str(alone["errors"])
    assert said in str(alone["errors"]), alone["errors"]
    _pairs(host, "two shapes", ["b.win.png"])
    draw = np.random.default_rng(4).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(draw).save(os.path.join(host.input, "two shapes", "b.lose.png"))
    host.fresh()
    both = host.run(_graph(host, "two shapes", steps=1), {"read": ["data", 2], "state": ["step", 0]})
    assert both["success"], both["errors"]
    read = both["captured"]["read"]
    assert said in read and "preference pairs: 1, as b.win.png better than b.lose.png" in read
    assert both["captured"]["state"].step == 1


def test_prior_preservation_is_refused_before_anything_runs(host):
    _pairs(host, "liked", ["0.win.png", "0.lose.png"])
    graph = _graph(host, "liked", prior="output-preservation")
    valid, _, _, errors = host.validate(graph)
    assert not valid and "set prior preservation to none" in str(errors)


@pytest.mark.long
def test_the_demo_draws_what_is_preferred(host):
    """The template as it is, by what it draws itself: round shapes are half of it before, and four fifths after."""
    rule, graph = host.module("demo.rule"), host.template("Teach the demo model what you prefer")
    ids = {node["class_type"]: node_id for node_id, node in graph.items()}
    capture = {"state": [ids["TrainStep"], 0], **_drawn(graph)}
    host.fresh()
    result = host.run(graph, capture)
    assert result["success"], result["errors"]
    found = result["captured"]
    history = found["state"].history
    assert history.accuracy[0] == (0, 0.5) and history.accuracy[-1][1] >= 0.75
    assert history.validation[-1][1] < 0.8 * history.validation[0][1]
    counts = {}
    for name in ("before", "after"):
        pictures = found[name].numpy()
        assert pictures.shape == (SAMPLES, 256, 256, 3)
        counts[name] = sum(rule.detect(picture).shape == "circle" for picture in pictures)
    assert counts["before"] in BEFORE and counts["after"] >= FEWEST, counts


def _drawn(graph):
    """The links to the template's pictures, before and after."""
    links = {}
    for node_id, node in graph.items():
        if node["class_type"] == "VAEDecode":
            sampler = graph[node["inputs"]["samples"][0]]
            trained = graph[sampler["inputs"]["model"][0]]["class_type"] == "TrainStep"
            links["after" if trained else "before"] = [node_id, 0]
    return links
