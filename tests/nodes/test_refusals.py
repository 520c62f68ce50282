"""What is refused before anything runs, at which inputs, and what to do next."""

import inspect
import json
import os
import sys
from hashlib import sha256

import numpy as np
import pytest
import torch
from PIL import Image


@pytest.fixture
def pictures(host, request):
    """The name of a folder with one picture below the host's input folder."""
    name = f"refusals {sha256(request.node.name.encode()).hexdigest()[:12]}"
    os.makedirs(os.path.join(host.input, name))
    Image.fromarray(np.zeros((64, 64, 3), dtype=np.uint8)).save(os.path.join(host.input, name, "a.png"))
    return name


DATASET = {
    "folder",
    "resolution",
    "buckets",
    "bucket_step",
    "captions",
    "shuffle_tags",
    "filters",
    "no_upscale",
    "min_side",
    "max_side",
    "validation_folder",
    "frames",
    "frame_rate",
    "clip_part",
}
ADAPTER = {"kind", "rank", "alpha", "pattern", "rank_dropout", "module_dropout", "network_dropout", "max_norm"}
ADAPTER |= {"min_rank", "base_weights"}
OPTIMIZER = {
    "optimizer",
    "learning_rate",
    "text_encoder_rate",
    "schedule",
    "warmup",
    "total_steps",
    "floor",
    "accumulation",
    "clip_norm",
    "weight_decay",
    "lora_plus",
    "precision",
    "scale_lr",
    "block_rates",
    "fused_backward",
    "options",
    "optimizer_class",
}
OBJECTIVE = {
    "prior",
    "loss",
    "weighting",
    "offset_noise",
    "min_timestep",
    "max_timestep",
    "expert",
    "boundary",
    "target",
    "noise_candidates",
}
EMA = {"interval", "snapshots", "widths", "switch_every", "decay", "min_decay"}
TODO = {"depth_factors", "start_percent", "end_percent"}
AVERAGE = {"profile", "weights", "algebra", "rank"}
PREVIEWS = {"prompts", "tensorboard"}


def refused(host, node, output=0, **given):
    """{input: what the host says of it} when a node of this kind is queued, linked to something that shows it."""
    prompt = {
        "1": {"class_type": "GraftDemo", "inputs": {}},
        "2": {"class_type": node, "inputs": {**host.defaults(node), **given}},
        "3": {"class_type": "TestCapture", "inputs": {"value": ["2", output], "name": "shown"}},
    }
    valid, _, _, errors = host.validate(prompt)
    found = errors.get("2", {"errors": []})["errors"]
    assert bool(found) != valid
    marked = {one["extra_info"]["input_name"]: one["details"] for one in found}
    return {name: words for name, words in marked.items() if name not in menus_marked_too(host.node(node))}


def menus_marked_too(node):
    """ComfyUI 0.3.64 checks no choices, so nodes check their menus themselves, and the host marks these too."""
    checked = {name for group in node.checked_together for name in group} | set(node.checked_sockets)
    return inspect.signature(node.validate_inputs).parameters.keys() - checked


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
        assert set(said) == DATASET and words in said["folder"]


def test_a_folder_name_that_is_computed_is_left_to_the_run(host):
    prompt = {
        "1": {"class_type": "GraftDemo", "inputs": {}},
        "2": {"class_type": "GraftLoRAStack", "inputs": host.defaults("GraftLoRAStack")},
        "3": {
            "class_type": "GraftDataset",
            "inputs": {**host.defaults("GraftDataset"), "folder": ["2", 1], "vae": ["1", 2], "clip": ["1", 1]},
        },
        "4": {"class_type": "TestCapture", "inputs": {"value": ["3", 2], "name": "shown"}},
    }
    assert host.validate(prompt)[0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"folder": "nowhere"}, "there is no folder 'nowhere'"),
        ({"validation_folder": "nowhere"}, "validation folder: there is no folder 'nowhere'"),
        ({}, ""),
    ],
)
def test_beside_filters_that_are_computed_folders_are_still_looked_for(host, pictures, given, words):
    inputs = {"folder": pictures, "vae": ["1", 2], "clip": ["1", 1], "filters": ["2", 1], **given}
    prompt = {
        "1": {"class_type": "GraftDemo", "inputs": {}},
        "2": {"class_type": "GraftLoRAStack", "inputs": host.defaults("GraftLoRAStack")},
        "3": {"class_type": "GraftDataset", "inputs": {**host.defaults("GraftDataset"), **inputs}},
        "4": {"class_type": "TestCapture", "inputs": {"value": ["3", 2], "name": "shown"}},
    }
    valid, _, _, errors = host.validate(prompt)
    said = [one["details"] for one in errors.get("3", {"errors": []})["errors"]]
    assert valid == (not said) == (not words) and all(words in text for text in said)


# Wrong settings, all inputs that the host names with them, and words of the error. The run says the same (below).
WRONG = [
    (
        "GraftOptimizer",
        {"fused_backward": True},
        OPTIMIZER,
        "needs the norm of all gradients first: set it to 0 (off)",
    ),
    (
        "GraftOptimizer",
        {"options": "beta = 0.9"},
        OPTIMIZER,
        "optimizer options: adamw has no 'beta', did you mean betas?",
    ),
    ("GraftOptimizer", {"options": "eps = small"}, OPTIMIZER, "eps is 'small', expected"),
    ("GraftOptimizer", {"block_rates": "input_blocks.* = half"}, OPTIMIZER, "block learning rates"),
    ("GraftOptimizer", {"learning_rate": 0.0}, OPTIMIZER, "learning rate is 0, expected a number above 0"),
    ("GraftOptimizer", {"warmup": 2000}, OPTIMIZER, "warmup steps is 2000 and total steps (schedule) only 1000"),
    ("GraftOptimizer", {"floor": 0.1}, OPTIMIZER, "learning rate schedule constant never falls"),
    (
        "GraftOptimizer",
        {"optimizer": "schedulefree", "schedule": "cosine"},
        OPTIMIZER,
        "optimizer schedulefree takes the place of learning rate schedule cosine",
    ),
    ("GraftOptimizer", {"optimizer": "prodigy", "lora_plus": 4.0}, OPTIMIZER, "LoRA+ ratio"),
    ("GraftOptimizer", {"optimizer": "adagard"}, OPTIMIZER, "optimizer is 'adagard', expected one of adamw"),
    (
        "GraftObjective",
        {"min_timestep": 0.7, "max_timestep": 0.3},
        OBJECTIVE,
        "expected a minimum below the maximum",
    ),
    (
        "GraftObjective",
        {"loss": "x0-mse", "weighting": "min-snr"},
        OBJECTIVE,
        "loss weighting min-snr is defined on the model's own objective; with loss function x0-mse use none",
    ),
    (
        "GraftObjective",
        {"offset_noise": -1.0},
        OBJECTIVE,
        "noise offset is -1, expected from 0 to 1. EveryDream2's zero_frequency_noise_ratio -1 is zero terminal SNR",
    ),
    (
        "GraftObjective",
        {"expert": "high noise", "min_timestep": 0.875},
        OBJECTIVE,
        "expert high noise chooses the noise levels itself: set minimum timestep to 0",
    ),
    (
        "GraftObjective",
        {"boundary": 0.9},
        OBJECTIVE,
        "expert boundary is 0.9 and expert is none: choose the expert that is trained",
    ),
    ("GraftEMA", {"interval": 50, "snapshots": 75}, EMA, "must be multiples of update every N steps"),
    ("GraftEMA", {"widths": "0.05 wide"}, EMA, "snapshot widths: 'wide' is not a number, expected numbers such as"),
    ("GraftEMA", {"widths": "0.05", "snapshots": 10}, EMA, "two or more different snapshot widths"),
    (
        "ApplyToDo",
        {"start_percent": 0.8, "end_percent": 0.2, "model": ["1", 0]},
        TODO,
        "expected start <= end",
    ),
    ("ApplyToDo", {"depth_factors": "4 two", "model": ["1", 0]}, TODO, "factors by depth"),
    (
        "ApplyTREAD",
        {"start_layer": 5, "end_layer": 4, "model": ["1", 0]},
        {"start_layer", "end_layer"},
        "start layer 5 comes after end layer 4",
    ),
    ("GraftAdapter", {"pattern": "/(/"}, ADAPTER, "/(/"),
    ("GraftAdapter", {"kind": "full", "rank_dropout": 0.1}, ADAPTER, "rank dropout needs an adapter"),
    ("GraftAdapter", {"kind": "oft", "alpha": 8.0}, ADAPTER, "adapter type oft does not use alpha: set it to 0"),
    ("GraftSnapshots", {"source": " \n"}, {"source"}, "run or files is empty"),
    ("GraftSnapshots", {"source": "no.safetensors"}, {"source"}, "no.safetensors"),
    ("GraftSaveLoRA", {"prefix": "../out"}, {"prefix"}, "expected a name inside ComfyUI's output folder"),
    ("GraftSaveLoRA", {}, {"prefix"}, "connect exactly one of trained LoRA and training state, none is connected"),
]


@pytest.mark.parametrize(("kind", "given", "inputs", "words"), WRONG)
def test_settings_that_are_wrong_are_refused_at_their_widgets_in_the_words_of_the_run(host, kind, given, inputs, words):
    said = refused(host, kind, **given)
    assert set(said) == inputs
    assert all(words in text for text in said.values())
    plain = {name: value for name, value in given.items() if not isinstance(value, list)}
    linked = {"model": host.call("GraftDemo")[0]} if "model" in given else {}
    with pytest.raises((ValueError, FileNotFoundError)) as raised:
        host.call(kind, **{**{n: v for n, v in host.defaults(kind).items() if n not in linked}, **plain, **linked})
    name = next(iter(said))
    assert said[name] == f"{name} - {raised.value}"


@pytest.mark.parametrize(
    ("kind", "given", "inputs", "words"),
    [
        ("GraftTrainStart", {"run": "a/b"}, {"run"}, "run name is 'a/b': expected a plain folder name"),
        ("GraftTrainStart", {"run": "Cache"}, {"run"}, "give the run another name"),
        (
            "TrainStep",
            {"prompts": "\n".join(map(str, range(17)))},
            PREVIEWS,
            "more preview prompts has 17 prompts, at most 16 are allowed",
        ),
        ("GraftSaveState", {"name": ".."}, {"name"}, "expected a plain folder name"),
        (
            "EMAMerge",
            {"snapshots": None},
            AVERAGE,
            "connect exactly one of training state, snapshots and LoRA stack; none",
        ),
        (
            "EMAMerge",
            {"state": ["5", 0]},
            {*AVERAGE, "state"},
            "exactly one of training state, snapshots and LoRA stack; training state and snapshots are connected",
        ),
        ("EMAMerge", {"profile": "search"}, AVERAGE, "averaging profile search needs a run's held-out images"),
        (
            "EMAMerge",
            {"profile": "search", "state": ["5", 0], "snapshots": None, "rank": 4},
            {*AVERAGE, "state"},
            "the averages of a training state keep their rank and their factors: set maximum rank to 0",
        ),
        (
            "EMAMerge",
            {"profile": "search", "state": ["5", 0], "snapshots": None, "weights": "0.05 0.3"},
            {*AVERAGE, "state"},
            "averaging profiles best and search expected widths such as '0.05 0.1', above 0 and at most 0.28; one",
        ),
        (
            "EMAMerge",
            {"profile": "search", "state": ["5", 0], "snapshots": None, "search_tries": 20, "search_seed": 3},
            set(),
            "",
        ),
        ("EMAMerge", {"weights": "1 2"}, AVERAGE, "weights or widths are given and averaging profile is latest"),
        ("EMAMerge", {"profile": "weights", "weights": "1 two"}, AVERAGE, "expected numbers separated by spaces"),
        ("EMAMerge", {"profile": "best", "weights": "thin"}, AVERAGE, "expected widths such as '0.05 0.1'"),
        ("EMAMerge", {"rank": 4, "algebra": "factors"}, AVERAGE, "maximum rank only works with"),
        ("EMAMerge", {"profile": "newest"}, AVERAGE, "averaging profile is 'newest', expected one of latest"),
    ],
)
def test_what_is_wrong_without_a_look_at_what_is_connected_is_refused_too(host, kind, given, inputs, words):
    sockets = {"model": ["1", 0], "dataset": ["4", 0], "state": ["5", 0], "snapshots": ["6", 0]}
    found = {one.id for one in host.node(kind).define_schema().inputs}
    sockets = {name: link for name, link in sockets.items() if name in found}
    if kind == "EMAMerge":
        del sockets["state"]
        inputs = {*inputs, *(name for name in ("snapshots",) if inputs and "snapshots" not in given)}
    settings = {name: value for name, value in {**sockets, **given}.items() if value is not None}
    prompt = {
        "1": {"class_type": "GraftDemo", "inputs": {}},
        "2": {"class_type": kind, "inputs": {**host.defaults(kind), **settings}},
        "3": {"class_type": "TestCapture", "inputs": {"value": ["2", 0], "name": "shown"}},
        "4": {
            "class_type": "GraftDataset",
            "inputs": {
                **host.defaults("GraftDataset"),
                "folder": "graft_demo/concept",
                "vae": ["1", 2],
                "clip": ["1", 1],
            },
        },
        "5": {
            "class_type": "GraftTrainStart",
            "inputs": {**host.defaults("GraftTrainStart"), "model": ["1", 0], "dataset": ["4", 0]},
        },
        "6": {"class_type": "GraftSnapshots", "inputs": host.defaults("GraftSnapshots")},
        "7": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
    }
    errors = host.validate(prompt)[3].get("2", {"errors": []})["errors"]
    said = {one["extra_info"]["input_name"]: one["details"] for one in errors}
    assert set(said) - menus_marked_too(host.node(kind)) == inputs
    assert all(words in text for text in said.values())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"filters": "blaklist_tags: [one]"}, "filters (YAML): "),
        ({"filters": "a: [1"}, "filters"),
        ({"no_upscale": True, "buckets": False}, "no upscale has no effect without aspect ratio buckets"),
        ({"no_upscale": True, "filters": "small: skip"}, "small: skip of filters has no effect with no upscale"),
        ({"min_side": 512, "max_side": 256}, "minimum bucket side is 512, larger than maximum bucket side (256)"),
        ({"validation_folder": "nowhere"}, "validation folder: there is no folder 'nowhere'"),
        ({"resolution": 100, "buckets": False}, "resolution is 100, expected a multiple of 8"),
        ({"frames": "17, many"}, "frames of clips is '17, many', expected numbers from 1 to 1,000, as 17 or 1, 17, 33"),
        (
            {"frames": "5", "filters": "frame_sample: 2"},
            "frame_sample of filters has no effect with part of clips head",
        ),
        ({"clip_part": "chunk"}, "frame rate and part of clips have no effect with frames of clips 0"),
        ({"frame_rate": 24.0}, "frame rate and part of clips have no effect with frames of clips 0"),
    ],
)
def test_settings_of_a_dataset_are_refused_in_the_words_of_the_run(host, pictures, given, words):
    said = refused(host, "GraftDataset", folder=pictures, vae=["1", 2], clip=["1", 1], **given)
    assert set(said) == DATASET and all(words in text for text in said.values())
    _, clip, vae = host.call("GraftDemo")
    with pytest.raises((ValueError, FileNotFoundError)) as raised:
        host.call("GraftDataset", folder=pictures, vae=vae, clip=clip, **given)
    assert said["folder"] == f"folder - {raised.value}"


def test_a_dataset_config_is_read_before_the_run(host, pictures):
    config = os.path.join(host.input, pictures, "dataset_config.toml")
    subset = f'[[datasets]]\n[[datasets.subsets]]\nimage_dir = "{os.path.join(host.input, pictures)}"\n'
    for text, words in (
        (subset, ""),
        ("[[datasets\n", "dataset_config.toml"),
        (subset + "num_repeets = 2\n", "num_repe"),
    ):
        with open(config, "w", encoding="utf-8") as file:
            file.write(text)
        said = dataset(host, f"{pictures}/dataset_config.toml")
        assert bool(said) == bool(words) and all(words in one for one in said.values()), text


def test_a_rate_at_which_nothing_is_learned_is_refused_at_its_widget(host):
    said = refused(host, "GraftOptimizer", optimizer="prodigy", learning_rate=1e-4)
    assert "set learning rate to 1, which is usual" in said["learning_rate"]
    assert refused(host, "GraftOptimizer", optimizer="prodigy", learning_rate=1.0) == {}


def test_an_optimizer_that_is_not_installed_is_refused(host, monkeypatch):
    build = host.module("training.optimizers.build")
    monkeypatch.setattr(build, "_is_installed", lambda module: module != "prodigyopt")
    said = refused(host, "GraftOptimizer", optimizer="prodigy")
    assert f"needs the package prodigyopt: {sys.executable} -m pip install prodigyopt" in said["optimizer"]


def test_what_is_known_is_judged_beside_what_a_link_brings(host):
    given = {"options": "beta = 0.9", "clip_norm": ["5", 0]}
    prompt = {
        "2": {"class_type": "GraftOptimizer", "inputs": {**host.defaults("GraftOptimizer"), **given}},
        "3": {"class_type": "TestCapture", "inputs": {"value": ["2", 0], "name": "shown"}},
        "5": {"class_type": "PrimitiveFloat", "inputs": {"value": 0.0}},
    }
    valid, _, _, errors = host.validate(prompt)
    assert not valid and "did you mean betas" in str(errors)
    prompt["2"]["inputs"].update(options="", precision="fp17")
    assert "training precision is 'fp17'" in str(host.validate(prompt)[3])


def test_one_known_setting_is_judged_where_all_others_come_through_links(host):
    """ComfyUI hands a setting that comes through a link over as None."""
    node = host.module("nodes.training").TrainStep
    assert "more preview prompts has 17 prompts" in node.validate_inputs(prompts="a\n" * 17, tensorboard=None)
    assert node.validate_inputs(prompts="a\n" * 16, tensorboard=None) is True
    assert node.validate_inputs(prompts=None, tensorboard=None) is True


@pytest.mark.parametrize("kind", ["GraftOptimizer", "GraftObjective", "GraftEMA", "GraftAdapter", "GraftSnapshots"])
def test_the_defaults_are_accepted(host, kind):
    assert refused(host, kind) == {}


def test_a_setting_that_comes_through_a_link_is_left_to_the_run(host):
    """Fused with the norm that a link brings: whether it is 0 only the run knows."""
    given = {"fused_backward": True, "clip_norm": ["5", 0]}
    prompt = {
        "2": {"class_type": "GraftOptimizer", "inputs": {**host.defaults("GraftOptimizer"), **given}},
        "3": {"class_type": "TestCapture", "inputs": {"value": ["2", 0], "name": "shown"}},
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


def loras(host, folder):
    """The name of a LoRA file, and of a missing one near it."""
    from graft_nodes.storage.safetensors import write_safetensors

    where = os.path.join(host.models, "loras", folder)
    os.makedirs(where, exist_ok=True)
    whole = {"lora_unet_x.lora_up.weight": torch.zeros(4, 2), "lora_unet_x.lora_down.weight": torch.zeros(2, 4)}
    write_safetensors(os.path.join(where, "forest style.safetensors"), whole, {})
    return f"{folder}/forest style.safetensors", f"{folder}/forest_stlye.safetensors"


@pytest.mark.parametrize(
    "reader", ["GraftLoRAEffect", "GraftLoRAConflicts", "GraftTrainingOnlyLoRA", "GraftLoadState", "EMAMerge"]
)
def test_rows_that_any_node_reads_are_refused_at_the_stack(host, reader):
    """Whatever reads the stack, it is not run: a missing file with near names, block weights, schedules, strengths."""
    whole, missing = loras(host, "refusals")
    socket = "training_only" if reader == "GraftLoadState" else "lora_stack"
    for row, words in (
        ({"file": whole}, ""),
        ({"file": missing}, f"no LoRA file {missing!r}; did you mean {whole}"),
        ({"file": missing, "on": False}, ""),
        ({"file": whole, "blocks": "OUT05=high"}, "row 1"),
        ({"file": whole, "blocks": "1,0,1"}, "row 1"),
        ({"file": whole, "schedule": "0.8-0.2"}, "expected a start before an end"),
        ({"file": whole, "model": 1000}, "expected a strength from -100 to 100"),
        ({"file": whole, "modle": 1.0}, "unknown field 'modle'"),
    ):
        rows = json.dumps({"version": 1, "rows": [row]})
        prompt = {
            "2": {"class_type": "GraftLoRAStack", "inputs": {"rows": rows}},
            "3": {"class_type": reader, "inputs": {**host.defaults(reader), socket: ["2", 0]}},
            "4": {"class_type": "TestCapture", "inputs": {"value": ["3", 0], "name": "shown"}},
        }
        errors = host.validate(prompt)[3].get("2", {"errors": []})["errors"]
        said = {one["extra_info"]["input_name"]: one["details"] for one in errors}
        assert set(said) == ({"rows"} if words else set()), row
        assert words in said.get("rows", "")
