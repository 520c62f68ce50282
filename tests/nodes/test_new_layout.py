"""A dataset layout that one file adds goes through the Dataset node, a training and the saved LoRA's metadata, and
nothing else is touched.
"""

import json
import os

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open

from ..training.data.layouts.csv_layout import LAYOUT

ROWS = ["file,caption,repeats", "a.png,a red circle left,2", "b.png,a blue circle right,1", "c.png,zorp,0"]


@pytest.fixture
def registered(host):
    registry = host.module("training.data.layouts.registry")
    with registry.LAYOUTS.registered(LAYOUT):
        yield


@pytest.fixture
def folder(host):
    root = os.path.join(host.input, "csv layout")
    os.makedirs(root, exist_ok=True)
    for seed, name in enumerate(("a", "b", "c", "d")):
        noise = np.random.default_rng(seed).integers(0, 255, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(noise).save(os.path.join(root, f"{name}.png"))
    with open(os.path.join(root, "captions.csv"), "w", encoding="utf-8") as file:
        file.write("\n".join(ROWS))
    return "csv layout"


def _node(host, node_id, **inputs):
    return {"class_type": node_id, "inputs": {**host.defaults(node_id), **inputs}}


def test_it_is_an_option_while_it_is_registered(host, registered):
    options = host.node("GraftDataset").INPUT_TYPES()["optional"]["captions"]
    assert "csv" in (options[0] if isinstance(options[0], list) else options[1]["options"])
    assert "csv: captions.csv with file, caption and repeats." in options[1]["tooltip"]


def test_it_is_gone_afterwards(host):
    options = host.node("GraftDataset").INPUT_TYPES()["optional"]["captions"]
    assert "csv" not in (options[0] if isinstance(options[0], list) else options[1]["options"])


def test_from_the_folder_to_the_saved_lora(host, registered, folder):
    prompt = {
        "1": _node(host, "GraftDemo"),
        "2": _node(
            host,
            "GraftDataset",
            folder=folder,
            vae=["1", 2],
            clip=["1", 1],
            resolution=64,
            validation=0.0,
            captions="csv",
        ),
        "3": _node(host, "GraftAdapter", rank=2),
        "4": _node(
            host, "GraftOptimizer", settings=["3", 0], learning_rate=2e-3, batch_size=1, total_steps=2, warmup=0
        ),
        "5": _node(
            host,
            "GraftTrainStart",
            model=["1", 0],
            clip=["1", 1],
            dataset=["2", 0],
            settings=["4", 0],
            run="csv layout",
        ),
        "6": _node(host, "TrainStep", state=["5", 0], steps=2, validate_every=0),
    }
    result = host.run(prompt, capture={"dataset": ["2", 0], "report": ["2", 2], "lora": ["6", 3]})
    assert result["success"], result["errors"]
    dataset, report = result["captured"]["dataset"], result["captured"]["report"]
    assert {image.name: (image.caption, image.repeats) for image in dataset.images} == {
        "a.png": ("a red circle left", 2),
        "b.png": ("a blue circle right", 1),
    }
    assert "2 pictures: 2 to train on" in report and "captions: 2 found, 2 different" in report
    assert "1 left out that captions.csv does not list" in report and "1 left out with multiply 0" in report
    assert "captions.csv" in dataset.watched[0].files
    saved = host.run({**prompt, "7": _node(host, "GraftSaveLoRA", state=["6", 0])}, capture={"path": ["7", 0]})
    assert saved["success"], saved["errors"]
    with safe_open(saved["captured"]["path"], "pt") as file:
        metadata = file.metadata()
    assert metadata["ss_num_train_images"] == "3" and metadata["ss_steps"] == "2"
    assert json.loads(metadata["ss_dataset_dirs"]) == {"csv layout": {"n_repeats": 1, "img_count": 2}}
    assert json.loads(metadata["ss_tag_frequency"]) == {
        "csv layout": {"a red circle left": 1, "a blue circle right": 1}
    }
