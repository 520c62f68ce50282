"""Trains the demo model, with its text encoder on the CPU as ComfyUI keeps it on many machines.

    python -m graft_nodes.tests.second_device.train_text_encoder FOLDER MODEL_DEVICE ADAPTER OPTIMIZER

MODEL_DEVICE is "second" or "cpu". Two steps are trained with an average and a largest norm. FOLDER gets
state.safetensors, and what is printed last says where the trained tensors lay, by prefix.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np
import torch
from graft_nodes.headless import embedded
from graft_nodes.tests.second_device.comfyui import put_models_on
from graft_nodes.tests.second_device.device import CPU, DEVICE
from PIL import Image

embedded.install()

from graft_nodes.tests.host_fixture import Host  # noqa: E402

STEPS = 2


def write_pictures(folder: str) -> None:
    """Four pictures with two captions."""
    os.makedirs(folder)
    for number in range(4):
        pixels = np.full((64, 64, 3), 60 * number, dtype=np.uint8)
        Image.fromarray(pixels).save(os.path.join(folder, f"{number}.png"))
        with open(os.path.join(folder, f"{number}.txt"), "w", encoding="utf-8") as file:
            file.write(("a red square left", "a blue circle right")[number % 2])


def workflow(host: Host, adapter: str, optimizer: str) -> dict[str, Any]:
    """Model, pictures, settings, training."""

    def node(node_id: str, **given: Any) -> dict[str, Any]:
        return {"class_type": node_id, "inputs": {**host.defaults(node_id), **given}}

    dataset = {"folder": "few", "vae": ["1", 2], "clip": ["1", 1], "resolution": 64, "validation": 0.25}
    start = {"model": ["1", 0], "clip": ["1", 1], "dataset": ["2", 0], "settings": ["5", 0]}
    return {
        "1": node("GraftDemo"),
        "2": node("GraftDataset", **dataset),
        "3": node("GraftAdapter", rank=2, text_encoder=True, kind=adapter, max_norm=0.0 if adapter == "full" else 0.01),
        "4": node(
            "GraftOptimizer", settings=["3", 0], optimizer=optimizer, learning_rate=1e-2, batch_size=2, total_steps=8
        ),
        "5": node("GraftEMA", settings=["4", 0]),
        "6": node("GraftTrainStart", **start, run="far"),
        "7": node("TrainStep", state=["6", 0], steps=STEPS, validate_every=1),
    }


def main(folder: str, model_device: str, adapter: str, optimizer: str) -> None:
    """Train, and say what came out."""
    put_models_on({"second": DEVICE, "cpu": CPU}[model_device])
    write_pictures(os.path.join(folder, "input", "few"))
    host = Host(folder)
    stepper = host.module("training.optimizers.stepper").OptimizerStepper
    places: dict[str, set[str]] = {}
    step = stepper.step_

    def watched(self: Any) -> None:
        for name, tensor in self.trained.items():
            if tensor.device.type != "meta":  # Start Training plans a step there
                places.setdefault(name.partition(".")[0], set()).add(tensor.device.type)
        step(self)

    stepper.step_ = watched
    result = host.run(workflow(host, adapter, optimizer), capture={"state": ["7", 0], "clip": ["7", 2]})
    assert result["success"], json.dumps(result["errors"], default=str)[:5000]
    state = result["captured"]["state"]
    tensors = {name: tensor.double() for name, tensor in (*state.trained.items(), *named("average", state.average))}
    host.module("storage.safetensors").write_safetensors(os.path.join(folder, "state.safetensors"), tensors, {})
    in_encoder = places.pop("text_encoders")
    in_model = set().union(*places.values())
    print("PLACES", json.dumps({"text_encoders": sorted(in_encoder), "model": sorted(in_model)}))


def named(prefix: str, tensors: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Tensors under `prefix/`."""
    return [(f"{prefix}/{name}", tensor) for name, tensor in tensors.items()]


if __name__ == "__main__":
    main(*sys.argv[1:])
