"""What is refused before anything runs, at which inputs, and what to do next."""

import os

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def pictures(host, request):
    """The name of a folder with one picture below the host's input folder."""
    name = f"refusals {request.node.name}"[:60].replace("/", "-")
    os.makedirs(os.path.join(host.input, name))
    Image.fromarray(np.zeros((64, 64, 3), dtype=np.uint8)).save(os.path.join(host.input, name, "a.png"))
    return name


def refused(host, kind, output=0, **given):
    """{input: what the host says of it} when a node of this kind is queued, linked to something that shows it."""
    prompt = {
        "1": {"class_type": "GraftDemo", "inputs": {}},
        "2": {"class_type": kind, "inputs": {**host.defaults(kind), **given}},
        "3": {"class_type": "GraftTestCapture", "inputs": {"value": ["2", output], "name": "shown"}},
    }
    valid, _, _, errors = host.validate(prompt)
    found = errors.get("2", {"errors": []})["errors"]
    assert bool(found) != valid
    return {one["extra_info"]["input_name"]: one["details"] for one in found}


def dataset(host, folder):
    return refused(host, "GraftDataset", folder=folder, vae=["1", 2], clip=["1", 1])


def test_a_folder_that_is_missing_empty_or_outside_is_refused_at_its_widget(host, pictures):
    assert dataset(host, pictures) == {}
    os.makedirs(os.path.join(host.input, pictures, "inner"))
    for folder, words in (
        ("no such folder", "there is no folder 'no such folder' in ComfyUI's input folder"),
        ("../..", "is outside ComfyUI's input folder; give a folder inside it"),
        (f"{pictures}/inner", "has no pictures (expected .png"),
        ("  ", "give the name of a folder inside ComfyUI's input folder"),
    ):
        said = dataset(host, folder)
        assert list(said) == ["folder"] and words in said["folder"]


def test_a_folder_name_that_is_computed_is_left_to_the_run(host):
    prompt = {
        "1": {"class_type": "GraftDemo", "inputs": {}},
        "2": {"class_type": "GraftLoRAStack", "inputs": host.defaults("GraftLoRAStack")},
        "3": {
            "class_type": "GraftDataset",
            "inputs": {**host.defaults("GraftDataset"), "folder": ["2", 1], "vae": ["1", 2], "clip": ["1", 1]},
        },
        "4": {"class_type": "GraftTestCapture", "inputs": {"value": ["3", 2], "name": "shown"}},
    }
    assert host.validate(prompt)[0]


@pytest.mark.parametrize(
    ("kind", "given", "inputs", "words"),
    [
        (
            "GraftOptimizer",
            {"fused_backward": True},
            {"fused_backward", "clip_norm", "accumulation"},
            "needs the norm of all gradients first: set it to 0 (off)",
        ),
        (
            "GraftObjective",
            {"min_timestep": 0.7, "max_timestep": 0.3},
            {"min_timestep", "max_timestep"},
            "expected 0 <= minimum < maximum <= 1",
        ),
        (
            "GraftEMA",
            {"interval": 50, "snapshots": 75},
            {"interval", "snapshots", "switch_every"},
            "must be multiples of update every N steps",
        ),
        (
            "ApplyToDo",
            {"start_percent": 0.8, "end_percent": 0.2, "model": ["1", 0]},
            {"start_percent", "end_percent"},
            "expected 0 <= start <= end <= 1",
        ),
        ("GraftAdapter", {"pattern": "/(/"}, {"pattern"}, "/(/"),
    ],
)
def test_settings_that_exclude_each_other_are_refused_at_their_widgets(host, kind, given, inputs, words):
    said = refused(host, kind, **given)
    assert set(said) == inputs
    assert all(words in text for text in said.values())


@pytest.mark.parametrize("kind", ["GraftOptimizer", "GraftObjective", "GraftEMA", "GraftAdapter"])
def test_the_defaults_are_accepted(host, kind):
    assert refused(host, kind) == {}


def test_a_setting_that_comes_through_a_link_is_left_to_the_run(host):
    """Fused with the norm that a link brings: whether it is 0 only the run knows."""
    given = {"fused_backward": True, "clip_norm": ["5", 0]}
    prompt = {
        "2": {"class_type": "GraftOptimizer", "inputs": {**host.defaults("GraftOptimizer"), **given}},
        "3": {"class_type": "GraftTestCapture", "inputs": {"value": ["2", 0], "name": "shown"}},
        "5": {"class_type": "PrimitiveFloat", "inputs": {"value": 0.0}},
    }
    assert host.validate(prompt)[0]


@pytest.mark.parametrize(("name", "value"), [("clip_norm", 1001.0), ("clip_norm", -1.0), ("accumulation", 5000)])
def test_the_bounds_of_these_inputs_still_hold(host, name, value):
    said = refused(host, "GraftOptimizer", **{name: value})
    assert name in said and "expected from" in said[name]


def test_block_weights_that_cannot_be_read_are_refused_at_the_rows(host):
    rows = '{"version": 1, "rows": [{"file": "a.safetensors", "blocks": "IN=zero"}]}'
    said = refused(host, "GraftLoRAStack", rows=rows)
    assert list(said) == ["rows"] and "row 1 (a.safetensors)" in said["rows"] and "zero" in said["rows"]
