"""T-LoRA through the nodes: trained, resumed, saved and applied, with the ranks of each noise level in every place."""

import json
import os

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

CONSTANT = ("base_q.weight", "base_p.weight", "base_lambda")


@pytest.fixture(scope="module")
def begun(host):
    """A run that has not begun to step."""
    folder = os.path.join(host.input, "tlora")
    os.makedirs(folder, exist_ok=True)
    for i in range(3):
        Image.fromarray(np.full((128, 128, 3), 60 * i, dtype=np.uint8)).save(os.path.join(folder, f"{i}.png"))
    model, clip, vae = host.call("GraftDemo")
    dataset = host.call("GraftDataset", folder="tlora", vae=vae, clip=clip, resolution=128)[0]
    adapter = host.call("GraftAdapter", kind="tlora", rank=6, min_rank=1)[0]
    optimizer = host.call("GraftOptimizer", learning_rate=0.05, batch_size=2, weight_decay=0.1, checkpointing=True)[0]
    return host.call(
        "GraftTrainStart",
        model=model,
        dataset=dataset,
        vae=vae,
        adapter=adapter,
        optimizer=optimizer,
        ema=host.call("GraftEMA")[0],
        run="tlora",
    )[0]


@pytest.fixture(scope="module")
def trained(host, begun):
    return host.call("TrainStep", state=begun, steps=4)[0]


def test_steps_leave_the_start_as_it_was(begun, trained):
    for name, tensor in trained.trained.items():
        assert torch.equal(tensor, begun.trained[name]) == name.endswith(CONSTANT), name
    assert not any(name.endswith(CONSTANT) for name in trained.optimizer)
    averages = [name for name in trained.average if name.endswith(CONSTANT)]
    assert averages and all(torch.equal(trained.average[name], begun.trained[name]) for name in averages)


def test_a_run_in_two_parts_has_the_same_bytes(host, begun, trained):
    half = host.call("TrainStep", state=begun, steps=2)[0]
    host.call("GraftSaveState", state=half, name="tlora")
    model, clip, vae = host.call("GraftDemo")
    loaded = host.call("GraftLoadState", name="tlora", model=model, dataset=half.subject.dataset, clip=clip, vae=vae)[0]
    whole = host.call("TrainStep", state=loaded, steps=2)[0]
    assert whole.key == trained.key
    for kind in ("trained", "optimizer", "average"):
        one, other = getattr(whole, kind), getattr(trained, kind)
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in other)


def predictions(host, model, sigmas, state=None):
    """Of a MODEL at noise levels, in one batch with trained tensors on it, else one by one."""
    wall, install = host.module("host.denoiser"), host.module("training.trainable.install")
    x = torch.randn(len(sigmas), 3, 32, 32, generator=torch.Generator().manual_seed(0)).to(model.load_device)
    with wall.open_denoiser(model) as denoiser, torch.inference_mode(False), torch.no_grad():
        levels = torch.tensor(sigmas, device=denoiser.device)
        conditioning = [host.conditioning] * len(sigmas)
        if state is None:
            rows = zip(x.split(1), levels.split(1), strict=True)
            return torch.cat([denoiser.denoise(row, level, conditioning[:1], {}) for row, level in rows])
        there = {name: tensor.to(denoiser.device) for name, tensor in state.trained.items()}
        with install.attach(denoiser.module, state.start.adapter, there, lambda: (0, 0, "")):
            return denoiser.denoise(x, levels, conditioning, {})


def test_it_is_saved_and_the_ranks_follow_the_noise(host, trained):
    host.conditioning = trained.subject.dataset.conditionings[""]
    base, sigmas = trained.subject.model, [0.98, 0.5, 0.05]
    expected, plain = predictions(host, base, sigmas, trained), predictions(host, base, sigmas)
    assert not torch.allclose(expected, plain, atol=1e-3)
    path = host.call("GraftSaveLoRA", state=trained)[0]
    file = load_file(path)
    assert all(tensor.dtype == torch.float32 for tensor in file.values())
    save_file(file, os.path.join(host.models, "loras", "tlora.safetensors"))
    assert set(host.module("patches.lora_files.metadata").describe(path)["kinds"]) == {"T-LoRA"}
    stack, _ = host.call("GraftLoRAStack", rows=json.dumps({"version": 1, "rows": [{"file": "tlora.safetensors"}]}))
    for mode in ("auto", "bypass"):
        patched, _, report = host.call("LoRAStackPatch", model=base, lora_stack=stack, mode=mode)
        assert "at the activations because their strength changes while sampling" in report
        assert torch.allclose(predictions(host, patched, sigmas), expected, atol=1e-4)
    (first, *_) = predictions(host, base, [0.0001], trained)
    for mode in ("merge", "host"):
        patched, _, report = host.call("LoRAStackPatch", model=base, lora_stack=stack, mode=mode)
        assert "merged with all of its ranks at every step" in report
        assert not torch.allclose(predictions(host, patched, sigmas)[0], expected[0], atol=1e-4)
        assert torch.allclose(predictions(host, patched, [0.0001])[0], first, atol=1e-3)


def test_previews_know_the_noise_level(host, trained, monkeypatch):
    """The sampler of previews tells adapters that are being trained its noise levels, from the first to the last."""
    seen = []
    mask = host.module("patches.adapters.rank_mask").RankMask
    ranks_at = mask.ranks_at
    monkeypatch.setattr(mask, "ranks_at", lambda self, t: seen.append(float(t[0])) or ranks_at(self, t))
    install, wall = host.module("training.trainable.install"), host.module("host.denoiser")
    model = trained.subject.model
    positive = host.call("CLIPTextEncode", clip=host.call("GraftDemo")[1], text="a")[0]
    latent = {"samples": torch.zeros(1, 3, 32, 32)}
    with wall.open_denoiser(model) as denoiser:
        there = {name: tensor.to(denoiser.device) for name, tensor in trained.trained.items()}
        with install.attach(denoiser.module, trained.start.adapter, there, lambda: (0, 0, "")):
            host.module("host.previews").sample(denoiser.patcher, positive, None, latent, 0)
    levels = list(dict.fromkeys(seen))
    assert len(levels) == 20 and levels == sorted(levels, reverse=True) and levels[0] > 900 > 100 > levels[-1]
