"""An adapter kind that is registered by one file of its own is offered, trained, saved, loaded and applied."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from ..file_as_module import file_as_module

FILE = Path(__file__).resolve().parents[1] / "patches" / "adapters" / "made_up_kind.py"


@pytest.fixture
def gains(host):
    """The kind, in the pack as the host has loaded it, as if its file lay beside the others."""
    registry = host.module("patches.adapters.registry")
    with file_as_module(FILE, registry.__package__) as module, registry.KINDS.registered(module.KIND):
        yield module


@pytest.fixture
def trained(host, gains):
    """(state after three steps of training, report of its start)."""
    folder = os.path.join(host.input, "made_up_adapter")
    os.makedirs(folder, exist_ok=True)
    for i in range(3):
        Image.fromarray(np.full((128, 128, 3), 60 * i, dtype=np.uint8)).save(os.path.join(folder, f"{i}.png"))
    model, clip, vae = host.call("GraftDemo")
    dataset = host.call("GraftDataset", folder="made_up_adapter", vae=vae, clip=clip, resolution=128)[0]
    adapter = host.call("GraftAdapter", kind="gains", max_norm=5.0)[0]
    optimizer = host.call("GraftOptimizer", learning_rate=0.1)[0]
    start, report = host.call(
        "GraftTrainStart", model=model, dataset=dataset, vae=vae, adapter=adapter, optimizer=optimizer, run="gains"
    )
    return host.call("TrainStep", state=start, steps=3)[0], report


def test_the_node_offers_it(host, gains):
    inputs = host.node("GraftAdapter").define_schema().inputs
    kind = next(entry for entry in inputs if entry.id == "kind")
    assert kind.options[-1] == "gains" and "gains: one gain for each input channel" in kind.tooltip
    with pytest.raises(ValueError, match="adapter type gains does not use alpha"):
        host.call("GraftAdapter", kind="gains", alpha=2.0)


def test_it_is_trained_saved_and_applied(host, trained):
    state, report = trained
    assert "gains on attention" in report
    assert all(name.endswith(".column_gains") and tensor.any() for name, tensor in state.trained.items())
    written = host.call("GraftSaveLoRA", state=state, dtype="float32")[0]
    file = load_file(written)
    assert sum(name.endswith(".column_gains") for name in file) == len(state.trained)
    described = host.module("patches.lora_files.metadata").describe(written)
    assert described["kinds"] == {"gains": len(state.trained)}
    save_file(file, os.path.join(host.models, "loras", "gains.safetensors"))
    stack, _ = host.call("GraftLoRAStack", rows=json.dumps({"version": 1, "rows": [{"file": "gains.safetensors"}]}))
    base, wall = state.subject.model, host.module("host.denoiser")
    patched = {m: host.call("LoRAStackPatch", model=base, lora_stack=stack, mode=m) for m in ("merge", "bypass")}
    assert all("gains" in report for _, _, report in patched.values())
    x = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)).to(base.load_device)
    sigma = torch.tensor([0.7], device=base.load_device)
    conditioning = state.subject.dataset.conditionings[""]
    with wall.open_denoiser(base) as denoiser, torch.inference_mode(False), torch.no_grad():
        plain = denoiser.denoise(x, sigma, [conditioning], {})
        attached = host.module("training.trainable.install").attach
        there = {name: tensor.to(denoiser.device) for name, tensor in state.trained.items()}
        with attached(denoiser.module, state.start.adapter, there, lambda: (0, 0, "")):
            expected = denoiser.denoise(x, sigma, [conditioning], {})
    assert not torch.allclose(expected, plain, atol=1e-3)
    for model, _, _ in patched.values():
        with wall.open_denoiser(model) as denoiser, torch.no_grad():
            found = denoiser.denoise(x, sigma, [conditioning], {})
        assert torch.allclose(found, expected, atol=1e-4)


def test_a_training_resumes_with_it(host, trained):
    state, _ = trained
    host.call("GraftSaveState", state=state, name="gains")
    model, clip, vae = host.call("GraftDemo")
    dataset = state.subject.dataset
    loaded = host.call("GraftLoadState", name="gains", model=model, dataset=dataset, clip=clip, vae=vae)[0]
    assert loaded.key == state.key
    assert all(torch.equal(loaded.trained[name], tensor) for name, tensor in state.trained.items())
