"""What the report of Start Training says of memory, and that nothing else changes by it."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from graft_nodes.tests.allocated import most_held, recorded
from graft_nodes.tests.model_device import CPU, LOAD
from PIL import Image

RUN = "plan"
WHERE = "free in main memory" if LOAD == CPU else "free on "


@pytest.fixture(scope="module")
def connected(host):
    """Model and dataset of Start Training: three plain pictures with captions."""
    folder = os.path.join(host.input, "planned")
    os.makedirs(folder, exist_ok=True)
    for number in range(3):
        Image.fromarray(np.full((128, 128, 3), 90 * number, np.uint8)).save(os.path.join(folder, f"{number}.png"))
        with open(os.path.join(folder, f"{number}.txt"), "w", encoding="utf-8") as file:
            file.write("a red blorp left")
    model, clip, vae = host.call("GraftDemo")
    dataset = host.call("GraftDataset", folder="planned", vae=vae, clip=clip, resolution=128)[0]
    return {"model": model, "dataset": dataset}


@pytest.fixture
def planning(host, monkeypatch):
    """The pack's own module, without what it has planned before."""
    module = host.module("host.memory_planning")
    monkeypatch.setattr(module, "_plans", type(module._plans)())
    return module


def _report(host, given, **more):
    return host.call("GraftTrainStart", run=RUN, **given, **more)[1]


def _free(planning, monkeypatch, size):
    real = planning.training_device
    monkeypatch.setattr(planning, "training_device", lambda patcher: replace(real(patcher), free=size))


def test_the_report_says_the_peak_by_part_and_that_it_fits(host, planning, connected):
    lines = _report(host, connected).splitlines()
    said = next(line for line in lines if "is planned to take" in line)
    for part in ("weights", "trained", "gradients", "optimizer", "activations", "average"):
        assert f"{part} " in said
    assert "a preview of the size of the largest picture" in said
    assert any(line.startswith("it fits into ") and WHERE in line for line in lines)


def test_what_does_not_fit_comes_with_the_settings_that_save_memory(host, planning, connected, monkeypatch):
    _free(planning, monkeypatch, 8 * 2**20)
    lines = _report(host, connected).splitlines()
    assert any(line.startswith(f"it does not fit into 8.0 MB {WHERE}") for line in lines)
    assert any(line.startswith("- gradient checkpointing on: ") and "slower" in line for line in lines)
    moved = [line for line in lines if "offload" in line or "on host" in line]
    assert bool(moved) == (LOAD != CPU)  # nothing is moved from main memory to main memory


def test_nothing_is_moved_away_where_the_model_computes_in_main_memory(host, planning, connected):
    said = []
    for offload in ("none", "activations"):
        optimizer = host.call("GraftOptimizer", offload=offload)[0]
        state = host.call("GraftTrainStart", run=RUN, **connected, optimizer=optimizer)[0]
        said.append(planning.report_plan(state, 0))
    assert "activations " in said[0] and (said[0] == said[1]) == (LOAD == CPU)


def test_the_same_memory_is_planned_once(host, planning, connected, monkeypatch):
    calls, real = [], planning.plan
    monkeypatch.setattr(planning, "plan", lambda *given: calls.append(given) or real(*given))
    for rate in (1e-4, 2e-4):
        _report(host, connected, optimizer=host.call("GraftOptimizer", learning_rate=rate)[0])
    assert len(calls) == 1
    _report(host, connected, optimizer=host.call("GraftOptimizer", batch_size=2)[0])
    assert len(calls) == 2


@pytest.mark.parametrize("error", [NotImplementedError("no kernel\nmore"), KeyError("a"), AttributeError("b")])
def test_a_plan_that_fails_is_said_and_training_begins(host, planning, connected, monkeypatch, error):
    def failing(*_):
        raise error

    monkeypatch.setattr(planning, "plan", failing)
    state, report = host.call("GraftTrainStart", run=RUN, **connected)
    said = next(line for line in report.splitlines() if line.startswith("memory is not planned"))
    assert said.startswith(f"memory is not planned: {type(error).__name__}: ") and state.step == 0


def test_code_of_others_in_the_model_never_sees_tensors_without_values(host, planning, connected):
    model, called = connected["model"].clone(), []
    model.model_options["model_function_wrapper"] = lambda apply, given: (
        called.append(given) or apply(given["input"], given["timestep"], **given["c"])
    )
    report = _report(host, {**connected, "model": model})
    assert "memory is not planned: code of others runs in the model: option model_function_wrapper" in report
    assert not called


def _bytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("words", [False, True], ids=["text encoder", "words"])
def test_a_text_encoder_that_is_trained_or_whose_words_are_is_planned(host, planning, connected, words):
    clip = host.call("GraftDemo")[1]
    if words:
        given = {"words": host.call("GraftWords", words="blorp", initial="ring", count=2)[0]}
    else:
        given = {"adapter": host.call("GraftAdapter", text_encoder=True)[0]}
    encoder = clip.cond_stage_model
    before = {name: (id(p), p.detach().clone()) for name, p in encoder.named_parameters()}
    given |= {"optimizer": host.call("GraftOptimizer", batch_size=3, precision="float32")[0]}
    state, report = host.call("GraftTrainStart", run=RUN, **connected, clip=clip, **given)
    assert "is planned to take" in report
    subject = state.subject
    parts = planning.plan(subject.model, state, subject.dataset).parts
    network = subject.model.model.diffusion_model
    own = [*network.parameters(), *network.buffers(), *encoder.parameters(), *encoder.buffers()]
    assert parts["weights"] == _bytes(own) and parts["trained"] == _bytes(state.trained.values())
    taken = _measured(host, state) + _bytes(own)
    assert sum(parts.values()) == pytest.approx(taken, rel=0.03)
    assert clip.patcher.load_device.type == subject.model.load_device.type
    for name, p in encoder.named_parameters():
        assert id(p) == before[name][0] and torch.equal(p.cpu(), before[name][1].cpu())


def test_a_text_encoder_on_another_device_is_not_planned(host, planning, connected):
    clip = host.call("GraftDemo")[1]
    adapter = host.call("GraftAdapter", text_encoder=True)[0]
    state, _ = host.call("GraftTrainStart", run=RUN, **connected, clip=clip, adapter=adapter)
    elsewhere = clip.clone()
    elsewhere.patcher.load_device = torch.device("meta")
    state = replace(state, subject=state.subject._replace(clip=elsewhere))
    assert planning.report_at_start(state, []) == [
        "memory is not planned: the text encoder is trained on another device than the model"
    ]
    with pytest.raises(ValueError, match="switch train text encoder of Adapter Settings off"):
        planning.plan(state.subject.model, state, state.subject.dataset)


def _measured(host, state):
    """The most that PyTorch's CPU allocator holds at once in two steps, above the models."""
    from graft_nodes.training.run.memory_plan import largest_batch
    from graft_nodes.training.run.step import advance_
    from graft_nodes.training.run.workspace import Workspace

    subject = state.subject
    dataset = largest_batch(subject.dataset, state.settings.optimizer.batch_size)
    opened = host.module("host.denoiser").open_denoiser(subject.model, clip=subject.clip)
    with recorded() as record, torch.inference_mode(False), opened as denoiser:
        work = Workspace(state, denoiser, dataset)
        work.loader.until = 2
        with work.install():
            advance_(work)
            advance_(work)
        work.close()
    return most_held(record)


def test_a_model_with_token_downsampling_is_planned(host, planning, connected):
    model = host.call("ApplyToDo", model=connected["model"])[0]
    assert "is planned to take" in _report(host, {**connected, "model": model})


def test_training_is_the_same_with_a_plan_and_without(host, planning, connected, monkeypatch):
    network = connected["model"].model.diffusion_model
    before = {name: (id(p), p.detach().clone()) for name, p in network.named_parameters()}
    trained = []
    for without in (False, True):
        monkeypatch.setattr(planning, "_for_the_command", without)
        torch.manual_seed(3)
        state, report = host.call("GraftTrainStart", run=RUN, **connected)
        assert ("is planned to take" in report) != without
        drawn = torch.rand(())
        unstored = replace(state, subject=state.subject._replace(unhashed=("nothing is reused",)))
        lora = host.call("TrainStep", state=unstored, steps=2)[3]
        trained.append((state.key, drawn, lora))
    (key, drawn, lora), (other_key, other_drawn, other) = trained
    assert key == other_key and torch.equal(drawn, other_drawn)
    assert lora.keys() == other.keys() and all(torch.equal(lora[name], other[name]) for name in lora)
    for name, p in network.named_parameters():
        assert id(p) == before[name][0] and torch.equal(p.cpu(), before[name][1].cpu())
