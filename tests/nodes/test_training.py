"""The training nodes through the host's own executor: a function of its inputs, stored, interruptible, and the base
left as it was.
"""

import dataclasses
import glob
import hashlib
import json
import math
import os
import shutil
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from graft_nodes.storage.digest import sha256_of_tensors
from graft_nodes.training.lora_metadata import lora_metadata
from graft_nodes.training.optimizers.settings import OptimizerSettings
from graft_nodes.training.settings import TrainingSettings
from graft_nodes.training.store import listing
from graft_nodes.training.trainable import install
from graft_nodes.training.trainable.settings import AdapterSettings
from PIL import Image

from ..model_device import CPU, LOAD

COLORS = [(200, 30, 30), (30, 30, 200), (30, 160, 30), (220, 200, 30), (120, 30, 160), (20, 20, 20)]


@pytest.fixture(scope="module")
def pictures(host):
    """Six plain pictures with captions, below the host's input folder."""
    folder = os.path.join(host.input, "plain")
    os.makedirs(folder, exist_ok=True)
    for i, color in enumerate(COLORS):
        pixels = np.full((256, 256, 3), 255, dtype=np.uint8)
        pixels[64:192, 40 + 8 * i : 160 + 8 * i] = color
        Image.fromarray(pixels).save(os.path.join(folder, f"{i}.png"))
        with open(os.path.join(folder, f"{i}.txt"), "w", encoding="utf-8") as file:
            file.write("a red square left" if i % 2 else "a blue circle right")
    return "plain"


@pytest.fixture
def wall(host):
    """The pack's own host module: the pack is a second import, under the name that the host loaded it by."""
    return host.module("host")


@pytest.fixture
def run(request):
    """A folder name of its own for each test."""
    return "test " + hashlib.sha256(request.node.name.encode()).hexdigest()[:12]


def _inputs(host, node_id, **given):
    return {"class_type": node_id, "inputs": {**host.defaults(node_id), **given}}


def _workflow(host, pictures, run, *steps, adapter=None, optimizer=None, ema=True, start=None, **step):
    """Model, data, settings, and TrainSteps in a row as nodes "10", "11" …"""
    prompt = {
        "1": _inputs(host, "GraftDemo"),
        "2": _inputs(host, "GraftDataset", folder=pictures, vae=["1", 2], clip=["1", 1], resolution=256),
        "3": _inputs(host, "GraftAdapter", **{"targets": "attention+ff", "rank": 4, **(adapter or {})}),
        "4": _inputs(
            host,
            "GraftOptimizer",
            settings=["3", 0],
            **{"learning_rate": 2e-3, "batch_size": 2, "total_steps": 12, "warmup": 2, **(optimizer or {})},
        ),
        "5": _inputs(host, "GraftObjective", settings=["4", 0]),
        "6": _inputs(host, "GraftEMA", settings=["5", 0], schedule="ramp"),
        "7": _inputs(
            host,
            "GraftTrainStart",
            model=["1", 0],
            clip=["1", 1],
            vae=["1", 2],
            dataset=["2", 0],
            settings=["5", 0],
            run=run,
            **(start or {}),
        ),
    }
    if ema:
        prompt["7"]["inputs"]["settings"] = ["6", 0]
    else:
        del prompt["6"]
    at = ["7", 0]
    for number, count in enumerate(steps):
        prompt[str(10 + number)] = _inputs(host, "TrainStep", state=at, steps=count, **step)
        at = [str(10 + number), 0]
    return prompt


def _run(host, prompt, **capture):
    result = host.run(prompt, capture=capture)
    assert result["success"], result["errors"]
    return result["captured"]


def _bytes(tensors):
    return sha256_of_tensors(tensors)


def _clear(host, run):
    shutil.rmtree(os.path.join(host.output, "graft", run), ignore_errors=True)
    host.fresh()


def test_one_call_is_two_calls_and_equal_input_gives_equal_bytes(host, pictures, run):
    found = []
    for steps in ((6,), (2, 4), (6,)):
        _clear(host, run)
        prompt = _workflow(host, pictures, run, *steps, validate_every=2)
        captured = _run(
            host, prompt, lora=[str(9 + len(steps)), 3], state=[str(9 + len(steps)), 0], loss=[str(9 + len(steps)), 4]
        )
        state = captured["state"]
        found.append(
            (
                _bytes(captured["lora"]),
                _bytes(state.average),
                _bytes(state.optimizer),
                captured["loss"],
                state.history,
                state.key,
            )
        )
        assert len(captured["loss"]["loss"]) == 6 and [s for s, _ in state.history.validation] == [0, 2, 4, 6]
        assert len(captured["lora"]) == 3 * 84
    assert found[0] == found[1] == found[2]


def _parts(module):
    """Class, mode, attributes and hooks of every part."""
    return {
        name: (type(m), m.training, sorted(m.__dict__), len(m._forward_hooks)) for name, m in module.named_modules()
    }


@pytest.mark.parametrize("kind", ["lora", "locon", "full"])
def test_the_base_the_generator_and_gradients_are_as_before(host, pictures, run, wall, kind):
    targets = {"lora": "attention", "locon": "all", "full": "all"}[kind]
    prompt = _workflow(host, pictures, run, 2, adapter={"kind": kind, "targets": targets})
    with torch.inference_mode():  # weights as a loader node inside the executor makes them
        model = host.call("GraftDemo")[0]
    module = model.model.diffusion_model
    before = {name: (id(p), p.requires_grad, p.clone()) for name, p in module.named_parameters()}
    with wall.denoiser.open_denoiser(model):  # the host's loader leaves marks of its own
        pass
    parts = _parts(module)
    rng = torch.random.get_rng_state()
    captured = _run(host, prompt, state=["10", 0], model=["1", 0], patched=["10", 1])
    assert torch.equal(rng, torch.random.get_rng_state()) and torch.is_grad_enabled()
    trained = captured["model"].model.diffusion_model
    for name, p in trained.named_parameters():
        assert torch.equal(p.cpu(), before[name][2]), name
        assert p.requires_grad == before[name][1] and p.grad is None
    assert _parts(trained) == parts
    moments = {name.split("/", 1)[1] for name in captured["state"].optimizer}
    assert moments == set(captured["state"].trained)  # at step 1 every trained tensor had a gradient


def test_the_same_step_is_not_trained_twice_after_a_restart(host, pictures, run, wall, monkeypatch):
    prompt = _workflow(host, pictures, run, 2, 2)
    first = _run(host, prompt, lora=["11", 3], report=["11", 5])
    assert "2 trained now" in first["report"] and "stored in" in first["report"]
    host.fresh()
    monkeypatch.setattr(wall.denoiser, "open_denoiser", lambda patcher: pytest.fail("it was trained again"))
    second = _run(host, prompt, lora=["11", 3], report=["11", 5])
    assert "stored result of step 4: nothing was trained" in second["report"] and "0 trained now" in second["report"]
    assert _bytes(first["lora"]) == _bytes(second["lora"])


def test_a_new_queue_in_one_session_runs_no_node_again(host, pictures, run):
    prompt = _workflow(host, pictures, run, 2)
    assert "10" in host.run(prompt)["executed"]
    assert "10" not in host.run(prompt)["executed"]


def test_more_steps_go_on_from_the_stored_ones(host, pictures, run):
    _run(host, _workflow(host, pictures, run, 3), lora=["10", 3])
    more = _run(host, _workflow(host, pictures, run, 5), lora=["10", 3], report=["10", 5])
    assert "stored result of step 3: went on from there" in more["report"] and "2 trained now" in more["report"]
    _clear(host, run)
    assert _bytes(more["lora"]) == _bytes(_run(host, _workflow(host, pictures, run, 5), lora=["10", 3])["lora"])


def test_an_interrupted_run_goes_on_and_the_model_is_whole(host, pictures, run, wall, monkeypatch):
    prompt = _workflow(host, pictures, run, 5)
    real, seen = wall.events.send_event, []

    def interrupt(name, data):
        real(name, data)
        if name != "graft.step":
            return
        seen.append(data["step"])
        if len(seen) == 3:
            import comfy.model_management

            comfy.model_management.interrupt_current_processing()

    monkeypatch.setattr(wall.events, "send_event", interrupt)
    broken = host.run(prompt, capture={"model": ["1", 0]})
    assert not broken["success"] and seen == [1, 2, 3]
    monkeypatch.setattr(wall.events, "send_event", real)
    again = _run(host, prompt, lora=["10", 3], report=["10", 5], model=["1", 0])
    assert "went on from the snapshot at step 3" in again["report"]
    fresh = host.call("GraftDemo")[0].model.diffusion_model.state_dict()
    assert all(torch.equal(fresh[k], v.cpu()) for k, v in again["model"].model.diffusion_model.state_dict().items())
    _clear(host, run)
    assert _bytes(again["lora"]) == _bytes(_run(host, prompt, lora=["10", 3])["lora"])


def test_an_error_in_the_middle_leaves_the_model_as_it_was(host, pictures, run, wall, monkeypatch):
    model, clip, vae = host.call("GraftDemo")
    dataset = host.call("GraftDataset", folder=pictures, vae=vae, clip=clip, resolution=256)[0]
    before = _bytes(model.model.state_dict())
    monkeypatch.setattr(wall.events, "send_event", lambda name, data: 1 / 0)
    for kind in ("lora", "full"):
        adapter = host.call("GraftAdapter", kind=kind, targets="all")[0]
        state = host.call("GraftTrainStart", model=model, dataset=dataset, adapter=adapter, run=run)[0]
        with pytest.raises(ZeroDivisionError):
            host.call("TrainStep", state=state, steps=2)
        assert _bytes(model.model.state_dict()) == before
        assert not [m for m in model.model.modules() if m._forward_hooks or "forward" in m.__dict__]


def test_progress_and_events_are_sent(host, pictures, run):
    result = host.run(_workflow(host, pictures, run, 3, validate_every=2), capture={"state": ["10", 0]})
    steps = [data for event, data in result["events"] if event == "graft.step"]
    assert [data["step"] for data in steps] == [1, 2, 3] and {data["node"] for data in steps} == {"10"}
    assert all(data["until"] == 3 and np.isfinite(data["loss"]) for data in steps)
    history = result["captured"]["state"].history
    assert [data["validation"] for data in steps] == [None, history.validation[1][1], None]
    assert [data["average"] for data in steps] == [None, history.average_validation[1][1], None]
    assert result["history"]["10"]["text"][0].startswith(f"run '{run}': step 0 to 3")


def test_the_model_output_has_the_lora_and_the_average_is_emamerges(host, pictures, run, wall):
    prompt = _workflow(host, pictures, run, 3, optimizer={"learning_rate": 5e-2})
    prompt["20"] = _inputs(host, "EMAMerge", model=["1", 0], clip=["1", 1], state=["10", 0])
    captured = _run(host, prompt, state=["10", 0], model=["10", 1], averaged=["20", 0], picture=["20", 3])
    state = captured["state"]
    assert captured["picture"].shape == (1, 540, 960, 3)
    with wall.denoiser.open_denoiser(captured["model"]) as denoiser:
        x = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)).to(denoiser.device)
        sigma = torch.tensor([0.7], device=denoiser.device)
        conditioning = state.subject.dataset.conditionings[""]
        with torch.no_grad():
            patched = denoiser.denoise(x, sigma, [conditioning], {})
    with wall.denoiser.open_denoiser(captured["averaged"]) as denoiser, torch.no_grad():
        averaged = denoiser.denoise(x, sigma, [conditioning], {})
    with wall.denoiser.open_denoiser(state.subject.model) as denoiser, torch.inference_mode(False), torch.no_grad():
        base = denoiser.denoise(x, sigma, [conditioning], {})
        trained, average = (
            {name: t.to(denoiser.device) for name, t in of.items()} for of in (state.trained, state.average)
        )
        with install.attach(denoiser.module, state.start.adapter, trained, lambda: (0, 0, "")):
            expected = denoiser.denoise(x, sigma, [conditioning], {})
        with install.attach(denoiser.module, state.start.adapter, average, lambda: (0, 0, "")):
            expected_average = denoiser.denoise(x, sigma, [conditioning], {})
    assert torch.allclose(patched, expected, atol=1e-4) and torch.allclose(averaged, expected_average, atol=1e-4)
    assert not torch.allclose(patched, base, atol=1e-3) and not torch.allclose(patched, averaged, atol=1e-4)


def test_full_weights_come_out_as_differences_that_the_model_takes(host, pictures, run, wall):
    prompt = _workflow(host, pictures, run, 2, adapter={"kind": "full", "targets": "all"})
    captured = _run(host, prompt, state=["10", 0], lora=["10", 3], model=["10", 1], base=["1", 0])
    base = {name: t.cpu().clone() for name, t in captured["base"].model.diffusion_model.state_dict().items()}
    weights = captured["state"].weights()
    assert weights.keys() == {name for name, _ in captured["base"].model.diffusion_model.named_parameters()}
    assert len(captured["lora"]) == len(weights)
    with wall.denoiser.open_denoiser(captured["model"]) as denoiser:
        live = {name: p.detach().cpu().clone() for name, p in denoiser.module.named_parameters()}
    assert all(torch.allclose(live[name], weights[name], atol=1e-6) for name in weights)
    assert any(not torch.equal(live[name], base[name]) for name in weights)


def test_kind_full_refuses_a_patched_model(host, pictures, run):
    prompt = _workflow(host, pictures, run, 2)
    captured = _run(host, prompt, model=["10", 1], dataset=["2", 0])
    adapter = host.call("GraftAdapter", kind="full", targets="all")[0]
    with pytest.raises(
        ValueError, match="adapter type full needs an unpatched model, and this one has 1 LoRA stacks on it"
    ):
        host.call("GraftTrainStart", model=captured["model"], dataset=captured["dataset"], adapter=adapter, run=run)


def test_a_run_on_a_grafted_model_is_another_run(host, pictures, run):
    captured = _run(host, _workflow(host, pictures, run, 2), model=["10", 1], dataset=["2", 0], state=["10", 0])
    again = host.call("GraftTrainStart", model=captured["model"], dataset=captured["dataset"], run=run)[0]
    plain = host.call("GraftTrainStart", model=captured["state"].subject.model, dataset=captured["dataset"], run=run)[0]
    assert again.start.model != plain.start.model and not again.subject.unhashed
    assert host.call("TrainStep", state=again, steps=1)[0].step == 1


def test_the_fingerprint_is_that_of_the_base_whoever_is_loaded(host, pictures, run, wall):
    captured = _run(
        host, _workflow(host, pictures, run, 2, optimizer={"learning_rate": 1e-1}), model=["10", 1], base=["1", 0]
    )
    plain = wall.fingerprint.fingerprint_patcher(captured["base"])
    with wall.denoiser.open_denoiser(captured["model"]):  # merged weights are live now
        wall.fingerprint._BASES.pop(captured["base"].model)
        assert wall.fingerprint.fingerprint_patcher(captured["base"]) == plain
    assert wall.fingerprint.fingerprint_patcher(host.call("GraftDemo")[0]) == plain and not plain.unhashed


def test_todo_is_used_in_training_and_noted(host, pictures, run):
    plain = _workflow(host, pictures, run, 2)
    thinned = _workflow(host, pictures, run, 2)
    thinned["8"] = _inputs(host, "ApplyToDo", model=["1", 0], factor=2.0, max_depth=2)
    thinned["7"]["inputs"]["model"] = ["8", 0]
    one, two = (_run(host, prompt, lora=["10", 3], state=["10", 0]) for prompt in (plain, thinned))
    assert _bytes(one["lora"]) != _bytes(two["lora"])
    assert one["state"].start.model != two["state"].start.model and not two["state"].subject.unhashed
    assert lora_metadata(two["state"])["ss_todo_factor"] == "2" and "ss_todo_factor" not in lora_metadata(one["state"])
    sampling = _workflow(host, pictures, run, 2)
    sampling["8"] = _inputs(host, "ApplyToDo", model=["1", 0], factor=2.0, phase="sampling")
    sampling["7"]["inputs"]["model"] = ["8", 0]
    assert _bytes(_run(host, sampling, lora=["10", 3])["lora"]) == _bytes(one["lora"])


def test_settings_from_a_step_on(host, pictures, run):
    prompt = _workflow(host, pictures, run, 2, 2)
    other = _workflow(host, pictures, run, 2, 2)
    other["8"] = _inputs(host, "GraftOptimizer", learning_rate=1e-5, batch_size=1)
    other["11"]["inputs"]["settings"] = ["8", 0]
    one, two = (_run(host, p, lora=["11", 3], state=["11", 0]) for p in (prompt, other))
    assert _bytes(one["lora"]) != _bytes(two["lora"]) and len(two["state"].position) == 2
    assert two["state"].history.loss[:2] == one["state"].history.loss[:2]


def test_epochs_replace_steps(host, pictures, run):
    captured = _run(host, _workflow(host, pictures, run, 100, epochs=1.0), state=["10", 0])
    assert captured["state"].step == 3  # five pictures of six, two a batch


def test_no_dates_and_no_random_ids_in_the_metadata(host, pictures, run):
    states = []
    for _ in range(2):
        _clear(host, run)
        states.append(_run(host, _workflow(host, pictures, run, 1), state=["10", 0])["state"])
    assert lora_metadata(states[0]) == lora_metadata(states[1])
    found = lora_metadata(states[0])
    assert all(isinstance(k, str) and isinstance(v, str) for k, v in found.items())
    assert (found["ss_network_dim"], found["ss_network_alpha"], found["ss_network_module"]) == (
        "4",
        "4.0",
        "networks.lora",
    )
    assert found["ss_learning_rate"] == "0.002" and found["ss_seed"] == "0"
    assert found["ss_optimizer"] == "torch.optim.adamw.AdamW(weight_decay=0.01)" and found["ss_total_batch_size"] == "2"
    assert (found["ss_num_train_images"], found["ss_num_batches_per_epoch"], found["ss_num_epochs"]) == ("5", "3", "4")
    assert (found["ss_steps"], found["ss_epoch"], found["ss_max_train_steps"]) == ("1", "1", "12")


def test_a_saved_file_says_what_it_was_trained_on_and_a_reader_finds_it(host, pictures, run):
    """Through Save LoRA, also after a state was saved, loaded and trained on with another batch size."""
    from graft_nodes.patches.lora_files import metadata
    from safetensors import safe_open

    prompt = _workflow(host, pictures, run, 2)
    prompt["20"] = _inputs(host, "GraftSaveLoRA", state=["10", 0], prefix=f"loras/{run}")
    prompt["21"] = _inputs(host, "GraftSaveState", state=["10", 0], name=run)
    prompt["2"]["inputs"]["resolution"] = 512
    captured = _run(host, prompt, path=["20", 0], dataset=["2", 0], model=["1", 0], state=["10", 0])
    with safe_open(captured["path"], framework="pt") as file:
        said = file.metadata()
    assert json.loads(said["ss_dataset_dirs"]) == {pictures: {"n_repeats": 1, "img_count": 5}}
    assert sum(row["count"] for row in json.loads(said["ss_bucket_info"])["buckets"].values()) == 5
    shown = metadata.describe(captured["path"])  # as the editor's LoRA picker shows it
    assert sum(dict(shown["tags"]).values()) == 5 and shown["steps"] == "2" and shown["resolution"] == "(512, 512)"
    loaded = host.call("GraftLoadState", name=run, model=captured["model"])[0]
    assert lora_metadata(loaded) == lora_metadata(captured["state"])
    loaded = host.call("GraftLoadState", name=run, model=captured["model"], dataset=captured["dataset"])[0]
    further = host.call(
        "TrainStep", state=loaded, steps=1, optimizer=host.call("GraftOptimizer", batch_size=1, total_steps=10)[0]
    )[0]
    found = lora_metadata(further)
    assert (found["ss_num_batches_per_epoch"], found["ss_num_epochs"], found["ss_epoch"]) == ("5", "2", "1")


def test_what_is_wrong_is_said_before_the_first_step(host, pictures, run):
    model, clip, vae = host.call("GraftDemo")
    dataset = host.call("GraftDataset", folder=pictures, vae=vae, clip=clip, resolution=256)[0]
    with pytest.raises(ValueError, match="needs a signal-to-noise ratio, which flow models lack"):
        host.call(
            "GraftTrainStart",
            model=model,
            dataset=dataset,
            objective=host.call("GraftObjective", weighting="min-snr")[0],
        )
    with pytest.raises(ValueError, match="plain folder name"):
        host.call("GraftTrainStart", model=model, dataset=dataset, run="../x")
    with pytest.raises(ValueError, match="choose no module"):
        host.call(
            "GraftTrainStart", model=model, dataset=dataset, adapter=host.call("GraftAdapter", pattern="nothing")[0]
        )
    state = host.call("GraftTrainStart", model=model, dataset=dataset, run=run)[0]
    other = host.call("GraftObjective", prior="regularization")[0]
    with pytest.raises(ValueError, match="needs a regularization dataset"):
        host.call("TrainStep", state=state, objective=other, steps=1)


def test_regularization_is_mixed_in(host, pictures, run):
    model, clip, vae = host.call("GraftDemo")
    given = {"folder": pictures, "vae": vae, "clip": clip, "resolution": 256}
    regular = host.call("GraftDataset", **given, validation=0.0)[0]
    dataset, _, report = host.call("GraftDataset", **given, regularization=regular, regularization_share=0.5)
    assert "regularization dataset: 6 pictures, 50% of each batch" in report
    optimizer = host.call("GraftOptimizer", batch_size=4)[0]
    heavy = host.call("GraftObjective", settings=optimizer, prior="regularization", prior_weight=3.0)[0]
    found = []
    for data, settings in ((dataset, optimizer), (dataset, heavy), (host.call("GraftDataset", **given)[0], optimizer)):
        state = host.call("GraftTrainStart", model=model, dataset=data, settings=settings, run=run)[0]
        found.append(_bytes(host.call("TrainStep", state=state, steps=2)[3]))
    assert len(set(found)) == 3


def _previewed(host, pictures, run, steps=4, **step):
    prompt = _workflow(host, pictures, run, steps, **{"preview_every": 2, "validate_every": 0, **step})
    prompt["30"] = _inputs(host, "CLIPTextEncode", clip=["1", 1], text="a red square left")
    prompt["31"] = _inputs(host, "CLIPTextEncode", clip=["1", 1], text="")
    prompt["32"] = _inputs(host, "EmptyLatentImage", width=128, height=128, batch_size=1)
    prompt["10"]["inputs"].update(positive=["30", 0], negative=["31", 0], latent=["32", 0])
    return prompt


def test_previews_are_sent_as_pictures_and_disturb_nothing(host, pictures, run, wall):
    plain = _run(host, _workflow(host, pictures, run, 4, validate_every=0), lora=["10", 3])
    _clear(host, run)
    rng = torch.random.get_rng_state()
    result = host.run(_previewed(host, pictures, run), capture={"lora": ["10", 3], "report": ["10", 5]})
    assert result["success"], result["errors"]
    assert torch.equal(rng, torch.random.get_rng_state())
    assert _bytes(result["captured"]["lora"]) == _bytes(plain["lora"])
    sent = [data for event, data in result["events"] if event == "graft.preview"]
    assert [(data["step"], data["pictures"][0]["label"]) for data in sent] == [
        (2, "weights"),
        (2, "average"),
        (4, "weights"),
        (4, "average"),
    ]
    assert {data["node"] for data in sent} == {"10"}
    seen = []
    for data in sent:
        (picture,) = data["pictures"]
        path = os.path.join(host.output, picture["subfolder"], picture["filename"])
        with Image.open(path) as file:
            assert picture["type"] == "output" and file.format == "JPEG" and file.size == (128, 128)
            seen.append(np.asarray(file).astype(int))
    assert not np.array_equal(seen[0], seen[2])
    assert "4 previews, from " in result["captured"]["report"]
    (kept,) = result["history"]["10"]["graft_run"]
    stored = listing.describe_state(os.path.join(host.output, "graft"), run, kept["key"])
    told = [{**data["pictures"][0], "step": data["step"]} for data in sent]
    assert wall.previews.list_kept(run, stored["start"], 4) == told, "a page that is opened later finds them"
    assert (
        wall.previews.list_kept(run, stored["start"], 3) == told[:2] and wall.previews.list_kept(run, "0" * 64, 4) == []
    )


@pytest.mark.parametrize("base_weights", ["as loaded", "int8", "nf4"])
def test_a_preview_is_what_the_sampler_node_makes_of_the_state(host, pictures, run, wall, monkeypatch, base_weights):
    kept = []
    real = wall.previews.decode
    monkeypatch.setattr(
        wall.previews, "decode", lambda vae, latents, training: kept.append(latents) or real(vae, latents, training)
    )
    adapter, optimizer = {"base_weights": base_weights}, {"learning_rate": 2e-2}
    prompt = _previewed(host, pictures, run, 2, adapter=adapter, optimizer=optimizer, start={"seed": 7})
    prompt["20"] = _inputs(host, "EMAMerge", model=["1", 0], clip=["1", 1], state=["10", 0])
    for node, model in (("40", ["10", 1]), ("41", ["20", 0])):
        prompt[node] = _inputs(
            host,
            "KSampler",
            model=model,
            positive=["30", 0],
            negative=["31", 0],
            latent_image=["32", 0],
            seed=7,
            steps=20,
            cfg=4.0,
            sampler_name="euler",
            scheduler="simple",
            denoise=1.0,
        )
    found = _run(host, prompt, weights=["40", 0], average=["41", 0], report=["10", 5])
    assert len(kept) == 2 and ("base weights: " in found["report"]) == (base_weights != "as loaded")
    assert base_weights == "as loaded" or f"base weights: {base_weights} in " in found["report"]
    for latents, name in zip(kept, ("weights", "average"), strict=True):
        expected = found[name]["samples"]
        assert torch.allclose(latents.cpu(), expected.cpu(), atol=2e-3 * float(expected.abs().max())), name
    assert not torch.allclose(*kept, atol=1e-3)


@pytest.mark.skipif(LOAD != CPU, reason="a graphics card quantizes faster than it is read")
def test_nf4_weights_are_read_from_disk_by_the_next_step_and_only_for_the_same_weights(host, pictures, run):
    folder = os.path.join(host.output, "graft", "cache", "quantized")
    shutil.rmtree(folder, ignore_errors=True)
    adapter, optimizer = {"base_weights": "nf4"}, {"learning_rate": 1e-1}
    prompt = _workflow(host, pictures, run, 2, 1, adapter=adapter, optimizer=optimizer)
    found = _run(host, prompt, first=["10", 5], second=["11", 5], state=["11", 0], model=["10", 1], dataset=["2", 0])
    said = f"base weights: read from {folder}, not quantized again"
    assert said not in found["first"] and said in found["second"] and len(_files(folder)) == 1

    def patched():
        """A step with the model that the first step patched."""
        begun = host.call(
            "GraftTrainStart",
            model=found["model"],
            dataset=found["dataset"],
            settings=TrainingSettings(adapter=found["state"].start.adapter),
            run=run,
        )[0]
        return host.call("TrainStep", state=begun, steps=1)[5]

    report = patched()
    assert "base weights: nf4 in " in report and said not in report
    assert len(_files(folder)) == 2, "the patched weights are others"
    shutil.rmtree(folder)
    state = found["state"]
    _clear(host, run)
    assert _bytes(_run(host, prompt, state=["11", 0])["state"].trained) == _bytes(state.trained)


def _files(folder):
    return [name for _, _, names in os.walk(folder) for name in names]


PROMPTS = "a blue circle right\n\n# a green square\n  a red square left  "


def test_more_prompts_are_sampled_at_every_preview_and_disturb_nothing(host, pictures, run, wall):
    plain = _run(host, _previewed(host, pictures, run), lora=["10", 3], state=["10", 0])
    folder = Path(host.output, "graft", run, "previews")
    one = {path.name: path.read_bytes() for path in folder.iterdir()}
    _clear(host, run)
    prompt = _previewed(host, pictures, run, prompts=PROMPTS)
    result = host.run(prompt, capture={"lora": ["10", 3], "state": ["10", 0], "report": ["10", 5]})
    assert result["success"], result["errors"]
    captured = result["captured"]
    assert _bytes(captured["lora"]) == _bytes(plain["lora"]) and captured["state"].key == plain["state"].key
    assert _bytes(captured["state"].average) == _bytes(plain["state"].average)
    sent = [data for event, data in result["events"] if event == "graft.preview"]
    told = [{**picture, "step": data["step"]} for data in sent for picture in data["pictures"]]
    first, second = {"prompt": 1, "text": "a blue circle right"}, {"prompt": 2, "text": "a red square left"}
    said = [{name: one[name] for name in ("step", "label", "prompt", "text") if name in one} for one in told]
    assert said == [
        {"step": step, "label": label, **prompt}
        for step in (2, 4)
        for label in ("weights", "average")
        for prompt in ({}, first, second)
    ]
    start = captured["state"].start.digest
    names = [f"{start[:12]}-{step:08}-{label}" for step in (2, 4) for label in ("weights", "average")]
    assert sorted(os.listdir(folder)) == sorted(f"{name}{part}-0.jpg" for name in names for part in ("", "-p1", "-p2"))
    for name, content in one.items():
        assert (folder / name).read_bytes() == content, "the positive's previews stay as they were"
    assert wall.previews.list_kept(run, start, 4) == told, "a page that is opened later finds them, with their prompts"
    assert "12 previews, from " in captured["report"]
    for name in names:  # the positive says the same as prompt 2, and the seed is the same
        pixels = [np.asarray(Image.open(folder / f"{name}{part}")) for part in ("-0.jpg", "-p2-0.jpg")]
        assert np.array_equal(*pixels)
    (folder / f"{names[0]}-p1-0.jpg").write_bytes(b"no picture")
    assert wall.previews.list_kept(run, start, 2)[1] == {**told[1], "text": ""}


@pytest.mark.parametrize("clip_skip", [0, 2])
def test_a_prompt_s_preview_is_what_the_sampler_node_makes_of_it(host, pictures, run, wall, monkeypatch, clip_skip):
    kept = []
    real = wall.previews.decode
    monkeypatch.setattr(
        wall.previews, "decode", lambda vae, latents, training: kept.append(latents) or real(vae, latents, training)
    )
    prompts = "a blue circle right\na (red:1.5) square left"
    prompt = _previewed(host, pictures, run, 2, optimizer={"learning_rate": 2e-2}, start={"seed": 7}, prompts=prompts)
    del prompt["10"]["inputs"]["positive"]  # the prompts alone
    prompt["2"]["inputs"]["clip_skip"] = clip_skip
    prompt["20"] = _inputs(host, "EMAMerge", model=["1", 0], clip=["1", 1], state=["10", 0])
    clip = ["1", 1]
    if clip_skip:
        prompt["21"] = _inputs(host, "CLIPSetLastLayer", clip=clip, stop_at_clip_layer=-clip_skip)
        clip = ["21", 0]
    capture = {}
    for number, text in enumerate(prompts.splitlines()):
        prompt[f"5{number}"] = _inputs(host, "CLIPTextEncode", clip=clip, text=text)
        for label, model in (("weights", ["10", 1]), ("average", ["20", 0])):
            prompt[f"{label}{number}"] = _inputs(
                host,
                "KSampler",
                model=model,
                positive=[f"5{number}", 0],
                negative=["31", 0],
                latent_image=["32", 0],
                seed=7,
                steps=20,
                cfg=4.0,
                sampler_name="euler",
                scheduler="simple",
                denoise=1.0,
            )
            capture[f"{label}{number}"] = [f"{label}{number}", 0]
    found = _run(host, prompt, **capture)
    assert len(kept) == 4
    for latents, name in zip(kept, ("weights0", "weights1", "average0", "average1"), strict=True):
        expected = found[name]["samples"]
        assert torch.allclose(latents.cpu(), expected.cpu(), atol=2e-3 * float(expected.abs().max())), name
    assert not torch.allclose(kept[0], kept[1], atol=1e-2) and not torch.allclose(kept[0], kept[2], atol=1e-3)


@pytest.mark.parametrize("shown", ["weights", "average"])
def test_previews_of_the_weights_or_of_their_average_alone(host, pictures, run, shown):
    both = host.run(_previewed(host, pictures, run, 2))
    names = [one["filename"] for one in _shown(both) if one["label"] == shown]
    files = {name: Path(host.output, "graft", run, "previews", name).read_bytes() for name in names}
    _clear(host, run)
    host.fresh()
    alone = host.run(_previewed(host, pictures, run, 2, preview_of=shown))
    assert [one["label"] for one in _shown(alone)] == [shown] and names
    assert files == {path.name: path.read_bytes() for path in Path(host.output, "graft", run, "previews").iterdir()}


def _shown(result):
    assert result["success"], result["errors"]
    sent = [data for event, data in result["events"] if event == "graft.preview"]
    return [picture for data in sent for picture in data["pictures"]]


def test_previews_of_an_average_need_one(host, pictures, run):
    result = host.run(_previewed(host, pictures, run, 2, ema=False, preview_of="average"))
    assert not result["success"] and "previews show is average, and this run has none" in str(result["errors"])


def test_flags_and_trigger_of_a_prompt_s_preview_are_what_the_sampler_node_makes_of_them(
    host, pictures, run, wall, monkeypatch
):
    kept = []
    real = wall.previews.decode
    monkeypatch.setattr(
        wall.previews, "decode", lambda vae, latents, training: kept.append(latents) or real(vae, latents, training)
    )
    lines = (
        "a [trigger] circle --n a red square --d 42 --s 3 --l 2.5 --ss dpmpp_2m --sc karras --w 192 --h 256 --f 5",
        "a blue circle --l 3 --h 256",
        "a blue circle",
    )
    prompt = _previewed(host, pictures, run, 2, ema=False, start={"seed": 7}, prompts="\n".join(lines))
    del prompt["10"]["inputs"]["positive"], prompt["10"]["inputs"]["negative"]
    prompt["2"]["inputs"]["filters"] = "trigger: zorp"
    capture = {"report": ["10", 5]}
    usual = "euler", "simple"
    texts = (
        ("a zorp circle", "a red square", 42, 3, 2.5, "dpmpp_2m", "karras", 192, 256),
        ("a blue circle", "", 7, 20, 3.0, *usual, 128, 256),
        (lines[2], "", 7, 20, 1.0, *usual, 128, 128),
    )
    for number, (positive, negative, seed, steps, cfg, sampler, scheduler, width, height) in enumerate(texts):
        prompt[f"8{number}"] = _inputs(host, "EmptyLatentImage", width=width, height=height, batch_size=1)
        prompt[f"5{number}"] = _inputs(host, "CLIPTextEncode", clip=["1", 1], text=positive)
        prompt[f"6{number}"] = _inputs(host, "CLIPTextEncode", clip=["1", 1], text=negative)
        prompt[f"7{number}"] = _inputs(
            host,
            "KSampler",
            model=["10", 1],
            positive=[f"5{number}", 0],
            negative=[f"6{number}", 0],
            latent_image=[f"8{number}", 0],
            seed=seed,
            steps=steps,
            cfg=cfg,
            sampler_name=sampler,
            scheduler=scheduler,
            denoise=1.0,
        )
        capture[str(number)] = [f"7{number}", 0]
    found = _run(host, prompt, **capture)
    assert len(kept) == 3
    for number, latents in enumerate(kept):
        expected = found[str(number)]["samples"]
        assert torch.allclose(latents.cpu(), expected.cpu(), atol=2e-3 * float(expected.abs().max())), number
    assert "preview prompt 1: --f 5 is not used" in found["report"]
    shown = sorted(Path(host.output, "graft", run, "previews").iterdir())
    assert {wall.previews.read_comment(str(file)) for file in shown} == {"a zorp circle", "a blue circle"}


def test_prompts_that_cannot_be_sampled_are_refused_before_the_first_step(host, pictures, run):
    prompt = _previewed(host, pictures, run, prompts=PROMPTS)
    del prompt["7"]["inputs"]["clip"]
    refused = {"CLIP (on Start Training, or on Load State)": prompt}
    many = "\n".join(f"prompt {number}" for number in range(17))
    refused["has 17 prompts, at most 16 are allowed"] = _previewed(host, pictures, run, prompts=many)
    for flag in ("--ss none_such", "--sc none_such"):
        refused[f"prompt 1: {flag[:4]} is 'none_such', expected one of "] = _previewed(
            host, pictures, run, prompts=f"a cat {flag}"
        )
    refused["a prompt has --w or --h, and latent holds a picture"] = drawn = _previewed(
        host, pictures, run, prompts="a cat --w 256"
    )
    drawn["33"] = _inputs(host, "EmptyImage", width=128, height=128, batch_size=1, color=0xFF0000)
    drawn["32"] = _inputs(host, "VAEEncode", pixels=["33", 0], vae=["1", 2])
    for words, graph in refused.items():
        result = host.run(graph)
        assert not result["success"] and words in str(result["errors"])
        assert not [data for event, data in result["events"] if event == "graft.step"]


def test_an_interruption_ends_the_previews_between_two_prompts(host, pictures, run, wall, monkeypatch):
    real, seen = wall.previews.sample, []

    def press(*given):
        import comfy.model_management

        seen.append(given)
        comfy.model_management.interrupt_current_processing()
        return real(*given)

    monkeypatch.setattr(wall.previews, "sample", press)
    result = host.run(_previewed(host, pictures, run, prompts=PROMPTS))
    assert not result["success"] and len(seen) == 1
    monkeypatch.setattr(wall.previews, "sample", real)
    again = _run(host, _previewed(host, pictures, run, prompts=PROMPTS), state=["10", 0], report=["10", 5])
    assert again["state"].step == 4 and "went on from the snapshot at step 2" in again["report"]


def test_what_previews_lack_is_said_before_the_first_step(host, pictures, run):
    prompt = _workflow(host, pictures, run, 2, preview_every=1)
    del prompt["7"]["inputs"]["vae"]
    result = host.run(prompt)
    assert not result["success"]
    said = str(result["errors"])
    assert (
        "positive prompt is not connected; latent is not connected; VAE" in said
        and "set preview every N steps to 0" in said
    )
    assert not [data for event, data in result["events"] if event == "graft.step"]


def test_the_stop_button_ends_a_step_with_the_state_so_far_and_queued_again_it_goes_on(
    host, pictures, run, wall, monkeypatch
):
    real = wall.events.send_event

    def press(name, data):
        real(name, data)
        if name == "graft.step" and data["step"] == 2:
            assert wall.events.stop_run(run)

    monkeypatch.setattr(wall.events, "send_event", press)
    prompt = _workflow(host, pictures, run, 5, validate_every=0)
    stopped = _run(host, prompt, state=["10", 0], report=["10", 5], lora=["10", 3])
    assert stopped["state"].step in (2, 3)
    assert f"stopped at step {stopped['state'].step} as asked" in stopped["report"]
    monkeypatch.setattr(wall.events, "send_event", real)
    again = _run(host, prompt, state=["10", 0], lora=["10", 3])
    assert again["state"].step == 5
    _clear(host, run)
    assert _bytes(again["lora"]) == _bytes(_run(host, prompt, lora=["10", 3])["lora"])


def test_an_address_of_the_owner_s_hears_of_each_end_and_a_silent_one_fails_nothing(
    host, pictures, run, wall, monkeypatch
):
    prompt, posted = _workflow(host, pictures, run, 2, 3, validate_every=2), []
    plain = _run(host, prompt, lora=["11", 3])
    _clear(host, run)
    monkeypatch.setattr(wall.webhook, "_send", lambda to, body: posted.append((to, json.loads(body))) or "it is away")
    monkeypatch.setenv("GRAFT_WEBHOOK", "http://127.0.0.1:9/hook")
    told = _run(host, prompt, lora=["11", 3], report=["11", 5], state=["11", 0])
    assert _bytes(told["lora"]) == _bytes(plain["lora"])
    assert told["report"].endswith("the webhook (GRAFT_WEBHOOK) was not reached: it is away")
    assert [to for to, _ in posted] == ["http://127.0.0.1:9/hook"] * 2
    losses = told["state"].history.loss
    for (_, said), (step, steps) in zip(posted, ((2, 2), (5, 3)), strict=True):
        assert (said["run"], said["ended"], said["step"], said["until"]) == (run, "done", step, step)
        assert said["steps"] == steps and said["loss"] == losses[step - 1] and said["seconds"] > 0
    posted.clear()
    host.fresh()
    _run(host, prompt, lora=["11", 3])
    assert posted == [], "what was stored is not trained, and no news"
    monkeypatch.setenv("GRAFT_WEBHOOK", "ftp://127.0.0.1/hook")
    result = host.run(_workflow(host, pictures, f"{run} refused", 1))
    assert "GRAFT_WEBHOOK is not an address" in str(result["errors"]) and not result["success"]


def test_previews_and_the_state_can_be_asked_for_while_it_trains(host, pictures, run, wall, monkeypatch):
    real = wall.events.send_event

    def press(name, data):
        real(name, data)
        if name == "graft.step" and data["step"] == 2:
            assert wall.events.ask_run(run, "sample") and wall.events.ask_run(run, "save")

    plain = _run(host, _workflow(host, pictures, run, 5, validate_every=0), lora=["10", 3])
    _clear(host, run)
    monkeypatch.setattr(wall.events, "send_event", press)
    prompt = _previewed(host, pictures, run, 0)
    prompt["10"]["inputs"].update(steps=5, preview_every=0)
    result = host.run(prompt, capture={"lora": ["10", 3], "report": ["10", 5]})
    assert result["success"] and _bytes(result["captured"]["lora"]) == _bytes(plain["lora"])
    previews = [data for event, data in result["events"] if event == "graft.preview"]
    assert [(data["step"], data["pictures"][0]["label"]) for data in previews] == [(3, "weights"), (3, "average")]
    assert [data["step"] for event, data in result["events"] if event == "graft.saved"] == [3]
    assert "saved at step 3 as asked" in result["captured"]["report"]
    monkeypatch.setattr(wall.events, "send_event", real)
    host.fresh()
    prompt["10"]["inputs"]["steps"] = 3
    assert "stored result of step 3: nothing was trained" in _run(host, prompt, report=["10", 5])["report"]


def test_without_what_previews_need_a_step_can_only_be_asked_to_save(host, pictures, run, wall, monkeypatch):
    real = wall.events.send_event

    def press(name, data):
        real(name, data)
        if name == "graft.step":
            assert data["can"] == ["save"] and not wall.events.ask_run(run, "sample")

    monkeypatch.setattr(wall.events, "send_event", press)
    _run(host, _workflow(host, pictures, run, 2, validate_every=0), lora=["10", 3])


def test_tensorboard_files_hold_what_was_measured(host, pictures, run):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    captured = _run(host, _workflow(host, pictures, run, 4, validate_every=2, tensorboard=True), state=["10", 0])
    state = captured["state"]
    found = reader.EventAccumulator(os.path.join(host.output, "graft", run, "tensorboard", state.start.digest[:16]))
    found.Reload()
    assert [(e.step, pytest.approx(e.value, rel=1e-6)) for e in found.Scalars("loss")] == list(
        enumerate(state.history.loss, 1)
    )
    for name, rows in (
        ("held-out loss", state.history.validation),
        ("held-out loss of the average", state.history.average_validation),
    ):
        values = {e.step: pytest.approx(e.value, rel=1e-6) for e in found.Scalars(name)}
        assert values == dict(rows[1:]) and list(values) == [2, 4]
    assert {"learning rate", "gradient norm", "steps a second"} <= set(found.Tags()["scalars"])


def test_tensorboard_gets_a_point_every_few_steps(host, pictures, run):
    """The mean of the losses since the last point, and what is measured in between at its own step."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    given = {"validate_every": 2, "tensorboard": True, "log_every": 3}
    captured = _run(host, _workflow(host, pictures, run, 7, **given), state=["10", 0])
    state = captured["state"]
    found = reader.EventAccumulator(os.path.join(host.output, "graft", run, "tensorboard", state.start.digest[:16]))
    found.Reload()
    losses = state.history.loss
    means = [(3, sum(losses[:3]) / 3), (6, sum(losses[3:6]) / 3)]
    assert [(e.step, e.value) for e in found.Scalars("loss")] == [
        (step, pytest.approx(m, rel=1e-6)) for step, m in means
    ]
    assert [e.step for e in found.Scalars("learning rate")] == [3, 6]
    assert [e.step for e in found.Scalars("held-out loss")] == [2, 4, 6]


def test_states_stay_by_epochs_too(host, pictures, run):
    captured = _run(host, _workflow(host, pictures, run, 10, keep_epochs=1, keep_from=2), state=["10", 0])
    folder = os.path.join(host.output, "graft", run)
    kept = {}
    for path in glob.glob(os.path.join(folder, "*", "state.json")):
        with open(path, encoding="utf-8") as file:
            record = json.load(file)
        kept[record["step"]] = record["kind"]
    epoch = math.ceil(len(captured["state"].subject.dataset.images) / 2)  # images in a batch
    assert kept == {**{step: "snapshot" for step in range(2 * epoch, 10, epoch)}, 10: "result"} and len(kept) > 2


def test_tensorboard_shows_the_previews(host, pictures, run):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    prompt = _previewed(host, pictures, run, prompts="a blue circle right", tensorboard=True)
    state = _run(host, prompt, state=["10", 0])["state"]
    found = reader.EventAccumulator(os.path.join(host.output, "graft", run, "tensorboard", state.start.digest[:16]))
    found.Reload()
    names = {f"{text} ({label})/0" for text in ("preview", "a blue circle right") for label in ("weights", "average")}
    assert set(found.Tags()["images"]) == names
    folder = Path(host.output, "graft", run, "previews")
    [one] = [event for event in found.Images("preview (average)/0") if event.step == 4]
    shown = np.asarray(Image.open(BytesIO(one.encoded_image_string)).convert("RGB"), dtype=float)
    saved = np.asarray(Image.open(folder / f"{state.start.digest[:12]}-{4:08}-average-0.jpg"), dtype=float)
    assert shown.shape == saved.shape and np.abs(shown - saved).mean() < 4  # that one is a JPEG


def test_tensorboard_without_its_package_says_what_to_install(host, pictures, run, monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "tensorboard" else real(name, *a))
    result = host.run(_workflow(host, pictures, run, 2, tensorboard=True))
    assert not result["success"] and "pip install tensorboard" in str(result["errors"])


def test_the_best_step_is_named_in_the_report(host, pictures, run):
    prompt = _workflow(host, pictures, run, 6, validate_every=1, optimizer={"learning_rate": 0.5, "clip_norm": 0.0})
    captured = _run(host, prompt, report=["10", 5], state=["10", 0])
    best = captured["state"].history.best
    assert f"best {best[1]:.4g} at {best[0]}" in captured["report"]
    if 0 < best[0] < 6:
        assert "the state of the best step is kept in " in captured["report"]
    assert "the run's folder holds " in captured["report"]


def test_zero_terminal_snr_trains_on_the_rescaled_levels_and_says_how_to_sample(host, small, pictures, run, wall):
    model = small.unet()
    import comfy.model_sampling

    class Sampling(comfy.model_sampling.ModelSamplingDiscrete, comfy.model_sampling.V_PREDICTION):
        pass

    dataset = host.call(
        "GraftDataset", folder=pictures, vae=host.call("GraftDemo")[2], clip=host.call("GraftDemo")[1], resolution=256
    )[0]
    objective = host.call("GraftObjective", zero_terminal_snr=True)[0]
    with pytest.raises(ValueError, match="predicts eps"):
        host.call("GraftTrainStart", model=model, dataset=dataset, objective=objective, run=run)
    velocity = model.clone()
    velocity.add_object_patch("model_sampling", Sampling(model.model.model_config))
    with wall.denoiser.open_denoiser(velocity, True) as denoiser:
        own, found = model.model.model_sampling, denoiser.sampling.sigmas
        zsnr = Sampling(model.model.model_config, zsnr=True).sigmas
        assert torch.allclose(found.cpu(), zsnr, rtol=1e-4) and found[-1] > 4000
        assert own.timestep(found[-3:].to(own.sigmas.device)).tolist() == [
            997,
            998,
            999,
        ]  # the model is asked at the same levels
    with wall.denoiser.open_denoiser(velocity) as denoiser:
        assert denoiser.sampling.sigmas[-1] < 20


class _Continuous(torch.nn.Module):
    """The host's ModelSamplingContinuousEDM, which the embedded host has not."""

    def __init__(self):
        super().__init__()
        self.register_buffer("sigmas", torch.linspace(np.log(0.002), np.log(120.0), 1000).exp())
        self.register_buffer("log_sigmas", self.sigmas.log())

    sigma_min = property(lambda self: self.sigmas[0])
    sigma_max = property(lambda self: self.sigmas[-1])

    def timestep(self, sigma):
        return 0.25 * sigma.log()

    def sigma(self, timestep):
        return (timestep / 0.25).exp()


@pytest.mark.parametrize("kind", ["EPS", "V_PREDICTION"])
def test_continuous_schedules_are_trained_at_the_levels_they_are_sampled_at(host, small, pictures, run, wall, kind):
    import comfy.model_sampling

    theirs = getattr(comfy.model_sampling, "ModelSamplingContinuousEDM", _Continuous)
    model = small.unet()
    model.add_object_patch("model_sampling", type("Sampling", (theirs, getattr(comfy.model_sampling, kind)), {})())
    with wall.denoiser.open_denoiser(model) as denoiser:
        found = denoiser.sigma(torch.tensor([0.0, 0.5, 1 - 2**-24], device=denoiser.device))
        assert torch.allclose(found.cpu(), torch.tensor([0.002, 0.49, 120.0]), rtol=1e-2)
    _, clip, vae = host.call("GraftDemo")
    dataset = host.call("GraftDataset", folder=pictures, vae=vae, clip=clip, resolution=256)[0]
    objective = host.call("GraftObjective", zero_terminal_snr=True)[0]
    with pytest.raises(
        ValueError, match="predicts eps" if kind == "EPS" else "continuous, up to sigma 120 .*Switch it off"
    ):
        host.call("GraftTrainStart", model=model, dataset=dataset, objective=objective, run=run)


def test_the_model_that_comes_out_samples_at_the_levels_it_was_trained_at(host, pictures, run, wall):
    import comfy.model_sampling

    class Sampling(comfy.model_sampling.ModelSamplingDiscrete, comfy.model_sampling.V_PREDICTION):
        pass

    model, clip, vae = host.call("GraftDemo")
    model.add_object_patch("model_sampling", Sampling(None))
    dataset = host.call("GraftDataset", folder=pictures, vae=vae, clip=clip, resolution=256)[0]
    given = {"model": model, "dataset": dataset, "ema": host.call("GraftEMA")[0], "run": run}

    def last(patcher):
        return float(patcher.get_model_object("model_sampling").sigmas[-1])

    for zero, level in (
        (False, pytest.approx(last(model))),
        (True, pytest.approx(float(Sampling(None, zsnr=True).sigmas[-1]), rel=1e-3)),
    ):
        state = host.call("GraftTrainStart", objective=host.call("GraftObjective", zero_terminal_snr=zero)[0], **given)[
            0
        ]
        made = host.call("TrainStep", state=state, steps=1)
        assert last(made[1]) == level and last(host.call("EMAMerge", model=model, state=made[0])[0]) == level
        assert ("MODEL samples with the same noise levels" in made[5]) == zero
        # A run on what came out is another run, and one that can be found again.
        again = host.call("GraftTrainStart", **{**given, "model": made[1]})[0]
        assert not again.subject.unhashed and again.start.model != state.start.model
    assert last(model) < 20


def test_stored_runs_stay_within_the_limit_of_the_environment(host, pictures, run, monkeypatch):
    old = _run(host, _workflow(host, pictures, f"{run} old", 1), report=["10", 5])["report"]
    folder = old.partition("stored in ")[2].splitlines()[0]
    assert os.path.isdir(folder) and " of at most 100 GB (GRAFT_STORE_GB)" in old
    monkeypatch.setenv("GRAFT_STORE_GB", "0.000001")
    said = _run(host, _workflow(host, pictures, run, 2), report=["10", 5])["report"]
    assert not os.path.exists(folder) and "were removed" in said and "stay within 1e-06 GB (GRAFT_STORE_GB)" in said
    monkeypatch.setenv("GRAFT_STORE_GB", "plenty")
    host.fresh()
    result = host.run(_workflow(host, pictures, run, 3))
    assert not result["success"] and "GRAFT_STORE_GB is 'plenty', expected a number of GB" in str(result["errors"])


@pytest.mark.parametrize("names", ["kohya", "peft", "comfyui"])
def test_a_run_begins_with_what_a_saved_file_holds(host, pictures, run, names):
    """Save LoRA, LoRA Stack, Merge LoRAs, Adapter Settings: the first step stands where the file was made, under any
    names.
    """
    prompt = _workflow(host, pictures, run, 3, ema=False)
    prompt["20"] = _inputs(host, "GraftSaveLoRA", state=["10", 0], names=names, dtype="float32", prefix=f"loras/{run}")
    captured = _run(host, prompt, state=["10", 0], path=["20", 0])
    rows = {
        "version": 1,
        "rows": [
            {
                "file": f"output/loras/{os.path.basename(captured['path'])}",
                "on": True,
                "model": 1.0,
                "clip": 1.0,
                "blocks": "",
                "schedule": "",
                "partial": False,
            }
        ],
    }
    prompt = _workflow(host, pictures, f"{run} on", 1, ema=False, optimizer={"learning_rate": 1e-9})
    prompt["30"] = _inputs(host, "GraftLoRAStack", rows=json.dumps(rows))
    prompt["31"] = _inputs(host, "GraftMergeLoRAs", lora_stack=["30", 0], model=["1", 0])
    prompt["3"]["inputs"]["initial"] = ["31", 0]
    begun = _run(host, prompt, state=["7", 0])["state"]
    kept, found = (install.make_lora(dict(one.trained), one.start.adapter, None) for one in (captured["state"], begun))

    def delta(lora, path):
        return lora[f"{path}.lora_up.weight"].flatten(1) @ lora[f"{path}.lora_down.weight"].flatten(1)

    paths = {name.removesuffix(".lora_up.weight") for name in kept if name.endswith(".lora_up.weight")}
    assert paths == {name.removesuffix(".lora_up.weight") for name in found if name.endswith(".lora_up.weight")}
    assert all(torch.allclose(delta(kept, path), delta(found, path), atol=1e-6) for path in paths)


def test_images_without_a_picture_for_a_model_that_takes_one_are_said(host, wall, monkeypatch):
    model, clip, _ = host.call("GraftDemo")
    with torch.inference_mode():  # as nodes run
        conditionings = wall.encoding.encode_captions(clip, ["", "a red circle left"])
    data = host.module("training.data.dataset")
    latent, picture = torch.zeros(3, 8, 8), {"concat_latent_image": torch.ones(1, 3, 8, 8)}
    images = [data.DatasetImage(f"{number}", "", latent) for number in range(2)]
    images.append(data.DatasetImage("with", "", latent, extras=picture))
    given = {"model": model, "dataset": data.Dataset(tuple(images), conditionings, "said"), "run": "without pictures"}
    says = "2 of 3 images have no control picture: this model takes one beside the noise, and trains on an empty one"
    assert says not in host.call("GraftTrainStart", **given)[1]
    monkeypatch.setattr(model.model, "concat_keys", ("mask", "masked_image"))  # as ComfyUI marks inpainting models
    monkeypatch.setattr(model.model, "blank_inpaint_image_like", torch.zeros_like, raising=False)
    assert says in host.call("GraftTrainStart", **given)[1]
    given["dataset"] = data.Dataset((images[2],), conditionings, "with pictures")
    assert "no control picture" not in host.call("GraftTrainStart", **given)[1]


@pytest.mark.parametrize(
    ("offload", "base_weights", "waits"),
    [("none", "as loaded", False), ("layers", "as loaded", True), ("activations", "int8", True)],
)
def test_weights_that_are_moved_or_made_smaller_wait_in_host_memory(host, monkeypatch, offload, base_weights, waits):
    """They would not fit into the device's memory otherwise."""
    call = host.module("nodes.step_call")
    monkeypatch.setattr(call, "open_denoiser", lambda state, layers: layers)
    settings = SimpleNamespace(optimizer=OptimizerSettings(offload=offload))
    on_host = offload == "layers"
    state = SimpleNamespace(
        settings=settings, start=SimpleNamespace(adapter=AdapterSettings(base_weights=base_weights))
    )
    assert call.StepCall.open_denoiser(SimpleNamespace(state=state, has_layers_on_host=on_host)) is waits


def _settings_file(host, run, content):
    path = Path(host.output, "graft", run, "train.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.parametrize("text_encoder", [False, True])
def test_settings_of_a_file_count_from_the_next_epoch_on_with_clip_skip(
    host, pictures, run, wall, monkeypatch, text_encoder
):
    """An epoch is 3 steps. By hand: 3 steps, then the dataset with that CLIP skip and the other settings."""
    real, said = wall.events.send_event, []

    def edit(name, data):
        real(name, data)
        if name == "graft.step":
            said.append(data.get("settings"))
        if name == "graft.step" and data["step"] == 2:
            _settings_file(host, run, {"clip_skip": 2, "zero_frequency_noise_ratio": 0.2, "lr": 1e-3})

    monkeypatch.setattr(wall.events, "send_event", edit)
    given = {"adapter": {"text_encoder": text_encoder}, "ema": False}
    prompt = _workflow(host, pictures, run, 5, validate_every=2, load_settings=True, **given)
    live = _run(host, prompt, state=["10", 0], report=["10", 5])
    state = live["state"]
    monkeypatch.setattr(wall.events, "send_event", real)
    assert said[0] == said[1] and "train.json is not there" in said[0] and said[2] == ""
    assert said[3] == said[4] == "lr 0.001, zero_frequency_noise_ratio 0.2, clip_skip 2"
    assert "from step 4 on, by train.json: learning rate 0.001, noise offset 0.2, CLIP skip 2" in live["report"]

    hand = _workflow(host, pictures, f"{run} hand", 3, validate_every=2, **given)
    hand["40"] = {**hand["2"], "inputs": {**hand["2"]["inputs"], "clip_skip": 2}}
    hand["41"] = _inputs(host, "GraftOptimizer", learning_rate=1e-3, batch_size=2, total_steps=12, warmup=2)
    hand["42"] = _inputs(host, "GraftObjective", settings=["41", 0], offset_noise=0.2)
    parts = _run(host, hand, state=["10", 0], dataset=["40", 0], settings=["42", 0])
    assert len(parts["state"].subject.dataset.images) == 5
    moved = parts["state"].subject._replace(dataset=parts["dataset"])
    there = host.call(
        "TrainStep",
        state=dataclasses.replace(parts["state"], subject=moved),
        steps=2,
        validate_every=2,
        settings=parts["settings"],
    )[0]
    assert _bytes(state.trained) == _bytes(there.trained) and _bytes(state.optimizer) == _bytes(there.optimizer)
    assert state.history.loss == there.history.loss and state.history.validation == there.history.validation
    plain = _run(host, _workflow(host, pictures, f"{run} plain", 5, validate_every=2, **given), state=["10", 0])[
        "state"
    ]
    assert _bytes(state.trained) != _bytes(plain.trained) and state.history.loss[:3] == plain.history.loss[:3]
    assert (lora_metadata(state)["ss_clip_skip"], lora_metadata(plain)["ss_clip_skip"]) == ("2", "None")

    # the next Train Step keeps what was taken, and a loaded state does
    host.call("GraftSaveState", state=state, name=run)
    loaded = host.call(
        "GraftLoadState", name=run, model=state.subject.model, dataset=plain.subject.dataset, clip=state.subject.clip
    )[0]
    on = [host.call("TrainStep", state=one, steps=1, validate_every=0)[0] for one in (state, loaded, there)]
    assert len({_bytes(one.trained) for one in on}) == 1


def test_a_file_of_settings_that_is_wrong_stops_nothing(host, pictures, run):
    expected = _run(host, _workflow(host, pictures, f"{run} plain", 4), lora=["10", 3])["lora"]
    for content, said in (
        ("{", "is not JSON"),
        ({"cond_dropout": 0.5, "lr": -1}, "learning rate is -1"),
        ({"min_snr_gamma": 5}, "loss weighting min-snr needs a signal-to-noise ratio, which flow models lack"),
        ({"clip_skip": 9}, "clip layer -9"),
        (None, "train.json is not there"),
    ):
        _clear(host, run)
        if content is not None:
            _settings_file(host, run, content)
        found = _run(host, _workflow(host, pictures, run, 4, load_settings=True), lora=["10", 3], report=["10", 5])
        assert said in found["report"] and _bytes(found["lora"]) == _bytes(expected)


def test_states_of_epochs_stay_as_the_file_says(host, pictures, run):
    _settings_file(host, run, {"save_every_n_epochs": 1})
    _run(host, _workflow(host, pictures, run, 7, validate_every=0, snapshot_every=0, load_settings=True), at=["10", 0])
    kept = [json.loads(path.read_text()) for path in Path(host.output, "graft", run).glob("*/state.json")]
    assert sorted((one["step"], one["kind"]) for one in kept) == [(3, "snapshot"), (6, "snapshot"), (7, "result")]


def test_queued_again_a_run_has_the_settings_that_it_took(host, pictures, run):
    _settings_file(host, run, {"cond_dropout": 0.6})
    prompt = _workflow(host, pictures, run, 4, load_settings=True)
    first = _run(host, prompt, state=["10", 0], lora=["10", 3])
    _settings_file(host, run, {"cond_dropout": 0.1})
    host.fresh()
    again = _run(host, prompt, state=["10", 0], lora=["10", 3], report=["10", 5])
    assert "0 trained now" in again["report"] and "by train.json: conditioning dropout 0.6" in again["report"]
    assert _bytes(first["lora"]) == _bytes(again["lora"])
    assert again["state"].settings == first["state"].settings
