"""GraftPictureLosses on the demo's model: losses computed again in float64 from its own network, a wrong caption found,
and what the panel of Dataset gets.
"""

import copy
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from graft_nodes.demo import draw
from graft_nodes.training.data.dataset import read_conditioning
from graft_nodes.training.data.stored_latent import read_latent
from graft_nodes.training.random_draws import generator as seeded_generator
from PIL import Image

RUN = "test picture losses"


@pytest.fixture(scope="module")
def folder(host):
    """Nine pictures of shapes with their captions; the last has that of another."""
    name = "graft_test_picture_losses"
    place = Path(host.input) / name
    place.mkdir(parents=True)
    shapes = [("circle", "red"), ("square", "green"), ("triangle", "blue"), ("cross", "yellow"), ("circle", "green")]
    shapes += [("square", "red"), ("triangle", "yellow"), ("cross", "blue"), ("square", "blue")]
    for number, (shape, color) in enumerate(shapes):
        picture = draw.draw_image(shape, color, "left", np.random.default_rng(number))
        Image.fromarray(picture).save(place / f"p{number}.png")
        caption = f"a {color} {shape} left" if number < 8 else "a yellow circle right"
        (place / f"p{number}.txt").write_text(caption)
    yield name
    shutil.rmtree(place)


def _prompt(host, folder, **more):
    def node(kind, **given):
        return {"class_type": kind, "inputs": {**host.defaults(kind), **given}}

    return {
        "1": node("GraftDemo"),
        "2": node("GraftDataset", folder=folder, vae=["1", 2], clip=["1", 1], resolution=256, validation=0.2, **more),
        "3": node("GraftAdapter", targets="attention+ff", rank=4),
        "4": node("GraftOptimizer", settings=["3", 0], learning_rate=1e-2, batch_size=2),
        "5": node("GraftTrainStart", model=["1", 0], clip=["1", 1], dataset=["2", 0], settings=["4", 0], run=RUN),
        "6": node("TrainStep", state=["5", 0], steps=2, validate_every=0),
        "7": node("GraftPictureLosses", state=["6", 0]),
    }


def test_pictures_are_measured_and_the_panel_hears_of_it(host, folder):
    shutil.rmtree(os.path.join(host.output, "graft", RUN), ignore_errors=True)
    captured = {"report": ["7", 0], "state": ["6", 0], "dataset": ["2", 0]}
    result = host.run(_prompt(host, folder), capture=captured)
    assert result["success"], result["errors"]
    report, state, dataset = (result["captured"][name] for name in captured)
    assert "9 pictures at step 2, all at the same noise levels" in report
    (said,) = [line for line in report.splitlines() if line.startswith("p8.png: ")]
    assert "its caption helps far less than the others' do: it may be wrong" in said
    assert [data for name, data in result["events"] if name == "graft.picture_losses"] == [{"folders": [folder]}]
    (path,) = (Path(host.output) / "graft" / "cache" / "picture_losses").glob("*.json")
    kept = json.loads(path.read_text())
    assert (kept["folder"], kept["run"], kept["step"]) == (folder, RUN, 2) and len(kept["pictures"]) == 9
    module = copy.deepcopy(state.subject.model.model.diffusion_model).double().eval()
    trained = copy.deepcopy(module)
    for name, down in state.trained.items():
        if name.endswith(".lora_down.weight"):
            layer = name.removesuffix(".lora_down.weight")
            up, weight = state.trained[f"{layer}.lora_up.weight"], trained.get_parameter(f"{layer}.weight")
            scale = state.start.adapter.alpha / state.start.adapter.rank
            with torch.no_grad():
                weight += scale * (up.flatten(1).double() @ down.flatten(1).double()).view(weight.shape)
    for image in dataset.images + dataset.held_out:
        row = kept["pictures"][image.name]
        assert row["caption"] == image.caption and (row["reasons"] != []) == (image.name == "p8.png")
        losses = [_by_hand(state, network, dataset, image) for network in (module, trained)]
        assert [row["before"], row["after"]] == pytest.approx(losses, rel=2e-4)
    path.unlink()


def _by_hand(state, network, dataset, image):
    """The mean squared error of the velocity in float64, at the four levels of validation's first picture."""
    draws = seeded_generator(state.start.seed, 0, "validation")
    clean = read_latent(image.latent)
    levels = ((torch.arange(4) + torch.rand((), generator=draws)) / 4).double()
    noise = torch.randn((4, *clean.shape), generator=draws).double()
    at = levels.view(4, 1, 1, 1)
    context = read_conditioning(dataset.conditionings[image.caption]).context.double().expand(4, -1, -1)
    with torch.no_grad():
        velocity = network((1 - at) * clean.double() + at * noise, 1000 * levels, context)
    return float((velocity - (noise - clean)).square().mean())
