"""A training step waits for the device once, whatever is trained, and no layer waits."""

import os

import numpy as np
import pytest
from graft_nodes.tests.second_device.device import meter
from graft_nodes.training.optimizers.registry import OPTIMIZERS
from PIL import Image

STEPS = 4
SKIPPED = 2  # steps that meet captions and sizes for the first time


@pytest.fixture(scope="module")
def pictures(host):
    """Four pictures of one size with two captions, below the host's input folder."""
    folder = os.path.join(host.input, "counted")
    os.makedirs(folder)
    for number in range(4):
        pixels = np.full((64, 64, 3), 60 * number, dtype=np.uint8)
        Image.fromarray(pixels).save(os.path.join(folder, f"{number}.png"))
        with open(os.path.join(folder, f"{number}.txt"), "w", encoding="utf-8") as file:
            file.write("a red square left")
    return "counted"


@pytest.fixture
def steps(host, pictures, monkeypatch, request):
    """A function that trains with these settings and returns what each step after the first ones has waited for."""
    loop = host.module("training.run.loop")
    advance = loop.advance_
    waits, uploads = [], []

    def counted(work):
        meter.clear()
        result = advance(work)
        waits.append(list(meter.synchronizations))
        uploads.append(list(meter.blocking_uploads))
        return result

    monkeypatch.setattr(loop, "advance_", counted)

    def node(node_id, **given):
        return {"class_type": node_id, "inputs": {**host.defaults(node_id), **given}}

    def train(adapter=None, optimizer=None, objective=None, ema=None, todo=False, has_average=True):
        start = {"model": ["1", 0], "dataset": ["2", 0], "settings": ["9", 0]}
        prompt = {
            "1": node("GraftDemo"),
            "2": node("GraftDataset", folder=pictures, vae=["1", 2], clip=["1", 1], resolution=64),
            "3": node("GraftAdapter", **{"rank": 2, **(adapter or {})}),
            "4": node(
                "GraftOptimizer", settings=["3", 0], **{"batch_size": 2, "total_steps": STEPS, **(optimizer or {})}
            ),
            "5": node("GraftEMA", settings=["4", 0], **(ema or {})),
            "6": node("GraftTrainStart", **start, run=f"counted {hash(request.node.name)}"),
            "7": node("TrainStep", state=["6", 0], steps=STEPS),
            "9": node("GraftObjective", settings=["5", 0], **(objective or {})),
        }
        if not has_average:
            del prompt["5"]
            prompt["9"]["inputs"]["settings"] = ["4", 0]
        if todo:
            prompt["8"] = node("ApplyToDo", model=["1", 0], phase="both")
            prompt["6"]["inputs"]["model"] = ["8", 0]
        result = host.run(prompt, capture={"state": ["7", 0]})
        assert result["success"], str(result["errors"])[:4000]
        assert len(waits) == STEPS
        return waits[SKIPPED:], uploads[SKIPPED:]

    return train


KINDS = ("lora", "loha", "lokr", "dora", "oft", "full")


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_waits_once(steps, kind):
    waits, uploads = steps(adapter={"kind": kind})
    assert [len(found) for found in waits] == [1] * len(waits), waits
    assert not any(uploads), uploads


@pytest.mark.parametrize(
    "settings",
    [
        {"adapter": {"max_norm": 0.01}},
        {"adapter": {"rank_dropout": 0.3, "module_dropout": 0.3, "network_dropout": 0.3}},
        {"adapter": {"rank_dropout": 0.3, "module_dropout": 0.3, "kind": "loha"}},
        {"adapter": {"rank_dropout": 0.3, "module_dropout": 0.3, "kind": "oft"}},
        {"adapter": {"base_weights": "int8"}},
        {"adapter": {"base_weights": "int8", "kind": "dora"}},
        {"adapter": {"base_weights": "nf4", "kind": "dora"}},
        {"adapter": {"base_weights": "nf4"}, "optimizer": {"offload": "layers"}},
        {"optimizer": {"precision": "bf16"}},
        {"optimizer": {"precision": "full-bf16"}},
        {"optimizer": {"accumulation": 3}},
        {"optimizer": {"checkpointing": True}},
        {"optimizer": {"offload": "optimizer"}},
        {"optimizer": {"offload": "layers"}},
        {"objective": {"offset_noise": 0.1, "ip_noise": 0.1, "pyramid_noise": 0.3}},
        {"ema": {"device": "host"}},
        {"todo": True},
    ],
    ids=str,
)
def test_settings_add_no_wait(steps, settings):
    waits, uploads = steps(**settings)
    assert [len(found) for found in waits] == [1] * len(waits), waits
    assert not any(uploads), uploads


ADAFACTORS = ("", "scale_parameter = false", "relative_step = true")


@pytest.mark.parametrize(
    ("optimizer", "options", "most"),
    [
        *((name, "", 1) for name in OPTIMIZERS.names() if name not in ("adafactor", "prodigy", "adamw8bit")),
        *(("adafactor", options, 1) for options in ADAFACTORS),
        ("prodigy", "", 2),  # every tensor moves by a step size that all gradients together give
    ],
)
def test_no_optimizer_adds_a_wait(steps, optimizer, options, most):
    """adamw8bit is bitsandbytes', which has no kernels for this device."""
    rate = {"prodigy": 1.0, "prodigyplus": 1.0, "automagic": 1e-6}.get(optimizer, 1e-2)
    if options == "relative_step = true":
        rate = 1e-4
    chosen = {"optimizer": optimizer, "options": options, "learning_rate": rate}
    waits, uploads = steps(optimizer=chosen, has_average=optimizer not in ("prodigyplus", "schedulefree"))
    assert [len(found) for found in waits] == [most] * len(waits), waits
    assert not any(uploads), uploads


def test_a_fused_backward_pass_waits_twice(steps):
    """The loss must be finite before the first weight changes."""
    waits, _ = steps(optimizer={"fused_backward": True, "clip_norm": 0.0})
    assert max(len(found) for found in waits) <= 2, waits


def test_a_step_in_fp16_waits_for_its_loss_scale_too(steps):
    """The loss must be finite, and whether the gradients are decides about the scale."""
    waits, uploads = steps(optimizer={"precision": "fp16"})
    assert max(len(found) for found in waits) <= 3, waits
    assert not any(uploads), uploads
