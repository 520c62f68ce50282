"""Runs of the open host with its model's layers in host memory have the bytes of runs with the model on the device."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from graft_nodes.tests.second_device.device import meter
from PIL import Image

TREAD = {"class_type": "ApplyTREAD", "inputs": {"start_layer": 0, "end_layer": -1, "disable_after": 0.5}}
TODO = {"class_type": "ApplyToDo", "inputs": {"phase": "both"}}


@pytest.fixture(scope="module")
def pictures(host):
    """Pictures of two sizes, below the host's input folder."""
    folder = os.path.join(host.input, "layers on host")
    os.makedirs(folder)
    for number in range(4):
        pixels = np.full((64, 64 + 64 * (number % 2), 3), 60 * number, dtype=np.uint8)
        Image.fromarray(pixels).save(os.path.join(folder, f"{number}.png"))
        with open(os.path.join(folder, f"{number}.txt"), "w", encoding="utf-8") as file:
            file.write("a red square left")
    return "layers on host"


@pytest.mark.parametrize("patch", [TREAD, TODO], ids=["TREAD", "ToDo"])
@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        ("lora", "auto"),
        ("dora", "auto"),  # in bf16 it measures the norms of weights that are cast once, if they are on the device
        ("full", "auto"),
        ("lora", "bf16"),
        ("full", "bf16"),
        ("full", "full-bf16"),
    ],
)
def test_the_same_bytes_and_less_memory(host, pictures, patch, kind, precision):
    def node(node_id, **given):
        return {"class_type": node_id, "inputs": {**host.defaults(node_id), **given}}

    def train(**optimizer):
        shared = {"batch_size": 1, "total_steps": 4, "precision": precision, **optimizer}
        if kind == "full":
            shared |= {"fused_backward": True, "clip_norm": 0.0, "learning_rate": 1e-5}
        start = {"model": ["8", 0], "dataset": ["2", 0], "settings": ["4", 0]}
        prompt = {
            "1": node("GraftDemo"),
            "2": node("GraftDataset", folder=pictures, vae=["1", 2], clip=["1", 1], resolution=64, validation=0.25),
            "3": node("GraftAdapter", rank=2, kind=kind),
            "4": node("GraftOptimizer", settings=["3", 0], **shared),
            "6": node(
                "GraftTrainStart", **start, run=f"{patch['class_type']} {kind} {precision} {optimizer.get('offload')}"
            ),
            "7": node("TrainStep", state=["6", 0], steps=4, validate_every=2),
            "8": node(patch["class_type"], model=["1", 0], **patch["inputs"]),
        }
        result = host.run(prompt, capture={"state": ["7", 0]})
        assert result["success"], str(result["errors"])[:4000]
        return result["captured"]["state"]

    here = train(checkpointing=True)
    meter.clear()
    away = train(offload="layers")
    assert meter.uploaded > 0
    assert here.trained.keys() == away.trained.keys()
    assert replace(here.history, norm=()) == replace(away.history, norm=())
    assert here.history.norm == pytest.approx(away.history.norm, rel=1e-12)  # full weights' is added up block by block
    assert all(torch.equal(tensor, away.trained[name]) for name, tensor in here.trained.items())
