"""Start Training's training-only LoRA: on while the loss is computed, off in previews, in MODEL and in saved files."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from graft_nodes.storage.digest import sha256_of_tensors
from PIL import Image
from safetensors.torch import load_file, save_file

RANK, ALPHA, STRENGTH = 4, 2.0, 0.5
TARGETS = ("attn1.to_q", "attn2.to_v", "proj_in", "in_layers.2")  # linear layers, and convolutions of both sizes


@pytest.fixture(scope="module")
def adapter(host):
    """A LoRA file on linear layers and convolutions of the demo model: its tensors by layer."""
    model = host.call("GraftDemo")[0].model
    draw = torch.Generator().manual_seed(3)
    state, layers = {}, {}
    for name, weight in model.named_parameters():
        path = name.removesuffix(".weight")
        if path != name and path.endswith(TARGETS):
            down = torch.randn((RANK, *weight.shape[1:]), generator=draw) * 0.3
            up = torch.randn((weight.shape[0], RANK, *(1,) * (weight.ndim - 2)), generator=draw)
            state |= {f"{path}.lora_up.weight": up, f"{path}.lora_down.weight": down}
            state[f"{path}.alpha"] = torch.tensor(ALPHA)
            layers[name] = (up.double(), down.double())
    write(host, "trains.safetensors", state)
    assert len(layers) > 8
    return layers


def write(host, name, state):
    os.makedirs(os.path.join(host.models, "loras"), exist_ok=True)
    save_file({key: tensor.contiguous() for key, tensor in state.items()}, os.path.join(host.models, "loras", name))


@pytest.fixture(scope="module")
def parts(host):
    """Model, CLIP, VAE and a dataset of four pictures, one of them held out."""
    folder = os.path.join(host.input, "distilled")
    os.makedirs(folder, exist_ok=True)
    draw = np.random.default_rng(1)
    for i in range(4):
        pixels = draw.integers(0, 255, (128, 128, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(os.path.join(folder, f"{i}.png"))
    model, clip, vae = host.call("GraftDemo")
    given = {"folder": "distilled", "vae": vae, "clip": clip, "resolution": 128, "validation": 0.25}
    return model, clip, vae, host.call("GraftDataset", **given)[0]


@pytest.fixture
def run(request, host):
    """A folder name of its own for each test."""
    name = f"only {abs(hash(request.node.name))}"
    yield name
    shutil.rmtree(os.path.join(host.output, "graft", name), ignore_errors=True)


def stack(host, *files, strength=STRENGTH, **row):
    rows = [{"file": file, "model": strength, **row} for file in files]
    return host.call("GraftLoRAStack", rows=json.dumps({"version": 1, "rows": rows}))[0]


def merged_by_hand(host, layers):
    """The demo model with the LoRA added into its weights in float64."""
    model = host.call("GraftDemo")[0]
    weights = dict(model.model.named_parameters())
    with torch.inference_mode():
        for name, (up, down) in layers.items():
            change = (up.flatten(1) @ down.flatten(1)).view(weights[name].shape) * (STRENGTH * ALPHA / RANK)
            weights[name].copy_((weights[name].double().cpu() + change).float())
    return model


def begun(host, parts, run, model=None, training_only=None, learning_rate=1e-3, optimizer=None, **settings):
    _, clip, vae, dataset = parts
    given = {"learning_rate": learning_rate, "batch_size": 2, "precision": "float32", **(optimizer or {})}
    chosen = host.call("GraftAdapter", **{"rank": 2, **settings})[0]
    chosen = host.call("GraftOptimizer", settings=chosen, **given)[0]
    chosen = host.call("GraftEMA", settings=chosen, schedule="ramp")[0]
    if training_only is not None:
        chosen = host.call("GraftTrainingOnlyLoRA", settings=chosen, lora_stack=training_only)[0]
    return host.call(
        "GraftTrainStart",
        model=model or parts[0],
        dataset=dataset,
        clip=clip,
        vae=vae,
        settings=chosen,
        run=run,
    )


KINDS = {
    "lora": {"targets": "attention"},
    "locon": {"targets": "all"},
    "lokr": {"targets": "attention+ff"},
    "oft": {"targets": "attention"},
    "full": {"targets": "all"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_a_model_with_the_lora_merged_by_hand(host, adapter, parts, run, kind):
    settings = {"kind": kind, **KINDS[kind]}
    losses = {}
    for name, model, only in (
        ("switched", None, stack(host, "trains.safetensors")),
        ("by hand", merged_by_hand(host, adapter), None),
        ("without", None, None),
    ):
        state, _ = begun(host, parts, f"{run} {name}", model, only, **settings)
        after = host.call("TrainStep", state=state, steps=3, validate_every=1)[0]
        losses[name] = torch.tensor([*after.history.loss, *(loss for _, loss in after.history.validation)])
    assert torch.allclose(losses["switched"], losses["by hand"], rtol=2e-4)
    assert not torch.allclose(losses["without"], losses["by hand"], rtol=2e-2)


@pytest.mark.parametrize("speed", [{"checkpointing": True}, {"offload": "layers"}, {"offload": "activations"}])
def test_it_is_on_however_memory_is_saved(host, adapter, parts, run, speed):
    found = []
    for number, optimizer in enumerate(({}, speed)):
        state, _ = begun(host, parts, f"{run} {number}", None, stack(host, "trains.safetensors"), optimizer=optimizer)
        found.append(torch.tensor(host.call("TrainStep", state=state, steps=2)[0].history.loss))
    assert torch.allclose(*found, rtol=1e-5)


def modules(model):
    """Attributes and hooks of every part."""
    return {name: (sorted(part.__dict__), len(part._forward_hooks)) for name, part in model.named_modules()}


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_previews_model_and_the_saved_file_are_without_it(host, adapter, parts, run, kind, monkeypatch):
    model, clip, _, _ = parts
    kept = []
    previews = host.module("host").previews
    real = previews.decode
    monkeypatch.setattr(previews, "decode", lambda vae, latents, held: kept.append(latents) or real(vae, latents, held))
    prompt = host.call("CLIPTextEncode", clip=clip, text="a red square")[0]
    latent = host.call("EmptyLatentImage", width=64, height=64, batch_size=1)[0]
    before, state_before = modules(model.model), sha256_of_tensors(model.model.state_dict())
    state, report = begun(host, parts, run, None, stack(host, "trains.safetensors"), kind=kind, learning_rate=1e-2)
    assert "off in previews, in MODEL and in what is saved" in report and "trains.safetensors: " in report
    given = {"steps": 2, "preview_every": 2, "validate_every": 2, "positive": prompt, "latent": latent}
    after, sampling, _, lora, _, step_report = host.call("TrainStep", state=state, **given)
    assert "off in previews, in MODEL and in what is saved" in step_report
    assert modules(model.model) == before and sha256_of_tensors(model.model.state_dict()) == state_before
    by_hand = host.call("LoRAStackPatch", model=model, lora_model=lora)[0]
    fingerprint = host.module("host").fingerprint.fingerprint_patcher
    assert fingerprint(sampling) == fingerprint(by_hand)
    sampled = {"positive": prompt, "negative": prompt, "latent_image": latent, "seed": 0, "steps": 20, "cfg": 1.0}
    sampled |= {"sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    expected = host.call("KSampler", model=by_hand, **sampled)[0]["samples"]
    assert torch.allclose(kept[0].cpu(), expected.cpu(), atol=2e-3 * float(expected.abs().max()))
    with_it = host.call("LoRAStackPatch", model=by_hand, lora_stack=stack(host, "trains.safetensors"))[0]
    other = host.call("KSampler", model=with_it, **sampled)[0]["samples"]
    assert not torch.allclose(other.cpu(), expected.cpu(), atol=2e-2 * float(expected.abs().max()))
    (path,) = host.call("GraftSaveLoRA", state=after, dtype="float32", names="comfyui", prefix=f"loras/{run}")
    saved = load_file(path)
    assert saved.keys() == lora.keys() and all(torch.equal(saved[name], lora[name]) for name in saved)


def test_the_run_goes_on_with_the_same_bytes(host, adapter, parts, run):
    def whole(state):
        return sha256_of_tensors({**state.trained, **state.average}), state.history, state.key

    only = stack(host, "trains.safetensors")
    state, _ = begun(host, parts, run, None, only)
    at_once = host.call("TrainStep", state=state, steps=4, validate_every=2)[0]
    shutil.rmtree(os.path.join(host.output, "graft", run))
    half = host.call("TrainStep", state=begun(host, parts, run, None, only)[0], steps=2, validate_every=2)[0]
    assert whole(host.call("TrainStep", state=half, steps=2, validate_every=2)[0]) == whole(at_once)
    shutil.rmtree(os.path.join(host.output, "graft", run))
    host.call("GraftSaveState", state=half, name="switched")
    given = {"name": "switched", "model": parts[0], "dataset": parts[3]}
    loaded = host.call("GraftLoadState", **given, training_only=only)[0]
    assert whole(host.call("TrainStep", state=loaded, steps=2, validate_every=2)[0]) == whole(at_once)
    again = host.call("GraftLoadState", **given)[0]
    assert host.call("TrainStep", state=again, steps=0)[0].step == 2, "it can be sampled without"
    shutil.rmtree(os.path.join(host.output, "graft", run))
    with pytest.raises(ValueError, match="Connect that LoRA to training-only LoRA of Load State"):
        host.call("TrainStep", state=again, steps=2)
    with pytest.raises(ValueError, match="what is connected is"):
        host.call("GraftLoadState", **given, training_only=stack(host, "trains.safetensors", strength=0.25))


def test_it_counts_in_the_run_s_identity_only_where_it_is_used(host, adapter, parts, run):
    plain = begun(host, parts, run)[0].start
    for empty in ([], stack(host, "trains.safetensors", strength=0.0)):
        assert begun(host, parts, run, None, empty)[0].start == plain
    used = [begun(host, parts, run, None, stack(host, "trains.safetensors", strength=s))[0].start for s in (0.5, 1.0)]
    assert len({plain.digest, *(start.digest for start in used)}) == 3
    state = begun(host, parts, run)[0]
    host.call("GraftSaveState", state=state, name="without")
    record = json.loads((Path(host.output) / "graft_states" / "without" / "state.json").read_text(encoding="utf-8"))
    assert "training_only" not in record["begun_from"]
    with pytest.raises(ValueError, match="trained without a training-only LoRA, and one is connected"):
        host.call("GraftLoadState", name="without", model=parts[0], training_only=stack(host, "trains.safetensors"))


def test_what_cannot_be_used_is_refused_before_the_first_step(host, adapter, parts, run):
    network = dict(parts[0].model.named_parameters())
    path = next(iter(adapter)).removesuffix(".weight")
    norm = next(name.removesuffix(".weight") for name in network if name.endswith("norm1.weight"))
    rows, *columns = network[f"{path}.weight"].shape
    ones = (1,) * (len(columns) - 1)
    pair = {"lora_up.weight": torch.ones(rows, 2, *ones), "lora_down.weight": torch.ones(2, *columns)}
    dora = {**pair, "dora_scale": torch.ones(1, columns[0], *ones)}
    write(host, "stranger.safetensors", {f"diffusion_model.nowhere.{name}": tensor for name, tensor in pair.items()})
    write(host, "norm.safetensors", {f"{norm}.diff": torch.ones_like(network[f"{norm}.weight"], device="cpu")})
    write(host, "dora.safetensors", {f"{path}.{name}": tensor for name, tensor in dora.items()})
    for file, row, settings, said in (
        ("stranger.safetensors", {}, {}, "stranger.safetensors cannot be used"),
        ("norm.safetensors", {}, {}, "LayerNorm has no bypass"),
        ("dora.safetensors", {}, {"kind": "full"}, "depends on the weight, and the weight is trained"),
        ("trains.safetensors", {"schedule": "0-0.5"}, {}, "Empty the schedule"),
    ):
        with pytest.raises(ValueError, match=said):
            begun(host, parts, run, None, stack(host, file, **row), **settings)
    begun(host, parts, run, None, stack(host, "dora.safetensors"))
    assert not os.path.exists(os.path.join(host.output, "graft", run))
    with pytest.raises((ValueError, FileNotFoundError), match="missing-one"):
        begun(host, parts, run, None, [("missing-one.safetensors", 1.0, 1.0)])


# --- a stack that stays on the model is another thing -----------------------------------------------------------------


def said_by(host, parts, run, model):
    """(what a LoRA trained on a model says it was trained on top of, the report of Start Training)."""
    from graft_nodes.training.lora_metadata import lora_metadata

    state, report = begun(host, parts, run, model)[:2]
    return lora_metadata(state).get("graft_trained_on_top_of"), report


@pytest.mark.parametrize("mode", ["merge", "bypass", "host"])
def test_a_lora_trained_on_top_of_a_stack_says_so(host, adapter, parts, run, mode):
    below = host.call("LoRAStackPatch", model=parts[0], lora_stack=stack(host, "trains.safetensors"), mode=mode)[0]
    text, report = said_by(host, parts, run, below)
    assert text == "trains.safetensors at 0.5"
    assert "trained on top of trains.safetensors at 0.5: what is saved belongs on a model that has it too" in report
    more = host.call(
        "LoRAStackPatch",
        model=below,
        lora_stack=[
            *stack(host, "trains.safetensors", strength=-1),
            *stack(host, "trains.safetensors", strength=0),
            *stack(host, "trains.safetensors", strength=0.25, blocks="IN=1, M=0.5"),
        ],
        mode=mode,
    )[0]
    expected = "trains.safetensors at 0.5; trains.safetensors at -1; trains.safetensors at 0.25, blocks IN=1, M=0.5"
    assert said_by(host, parts, run, more)[0] == expected
    assert said_by(host, parts, run, below)[0] == "trains.safetensors at 0.5", "the one below is as it was"


def test_a_plain_model_and_a_training_only_lora_say_nothing(host, adapter, parts, run):
    text, report = said_by(host, parts, run, parts[0])
    assert text is None and "trained on top of" not in report
    only = stack(host, "trains.safetensors")
    state = begun(host, parts, run, training_only=only)[0]
    assert not state.notes.get("graft_trained_on_top_of")


def test_patches_of_other_nodes_are_counted(host, adapter, parts, run):
    model = parts[0].clone()
    weight = next(name for name in adapter)
    shape = dict(model.model.named_parameters())[weight].shape
    model.add_patches({weight: ("diff", (torch.zeros(shape),))}, 1.0)
    assert said_by(host, parts, run, model)[0] == "1 weight patched by other nodes"
