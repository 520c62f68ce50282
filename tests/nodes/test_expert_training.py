"""Both experts of a pair in one run: each gets the bytes of a run of its own, one model is on the device at a time,
previews are the pair's, and both are saved, loaded and split.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from graft_nodes.tests.host_fixture import one_link
from graft_nodes.training.state import equal
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

BOUNDARY = 0.6


@pytest.fixture(scope="module")
def parts(host):
    """The demo model, another one, CLIP, VAE and a dataset of four pictures, one of them held out."""
    folder = os.path.join(host.input, "experts")
    os.makedirs(folder, exist_ok=True)
    draw = np.random.default_rng(1)
    for i in range(4):
        pixels = draw.integers(0, 255, (128, 128, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(os.path.join(folder, f"{i}.png"))
    high, clip, vae = host.call("GraftDemo")
    low = host.call("GraftDemo")[0]
    with torch.inference_mode():
        for parameter in low.model.diffusion_model.parameters():
            parameter.mul_(0.9)
    given = {"folder": "experts", "vae": vae, "clip": clip, "resolution": 128, "validation": 0.25}
    return high, low, clip, vae, host.call("GraftDataset", **given)[0]


@pytest.fixture
def run(request, host):
    """A run name of its own for each test."""
    name = f"pair {abs(hash(request.node.name))}"
    yield name
    for folder in ("graft", "graft_states", "loras"):
        for path in Path(host.output, folder).glob(f"{name}*"):
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True) if path.is_file() else None


def objective(host, expert="both"):
    return host.call("GraftObjective", expert=expert, boundary=BOUNDARY)[0]


def begun(host, parts, run, expert="both", model=None, low="connected", **given):
    """`given` are settings by part, with low_noise_ before those of the low noise expert alone."""
    high, low_model, clip, vae, dataset = parts
    given.setdefault("adapter", host.call("GraftAdapter", rank=2)[0])
    own = {}
    for prefix, place in (("low_noise_", own), ("", given)):
        stack = given.pop(f"{prefix}training_only", None)
        if stack is not None:
            place["training_only"] = host.call("GraftTrainingOnlyLoRA", lora_stack=stack)[0]
    if "low_noise_adapter" in given:
        own["adapter"] = given.pop("low_noise_adapter")
    if own:
        given["low_noise_settings"] = one_link(own)["settings"]
    models = {"model": model or high}
    if low == "connected":
        models = {"high_noise_model": model or high, "low_noise_model": low_model}
    return host.call(
        "GraftTrainPairStart" if low == "connected" else "GraftTrainStart",
        **models,
        dataset=dataset,
        clip=clip,
        vae=vae,
        optimizer=host.call("GraftOptimizer", learning_rate=1e-3, batch_size=2, precision="float32")[0],
        objective=objective(host, expert),
        ema=host.call("GraftEMA", schedule="ramp")[0],
        run=run,
        **given,
    )


def prompts(host, clip):
    latent = host.call("EmptyLatentImage", width=128, height=128, batch_size=1)[0]
    conditioning = host.call("CLIPTextEncode", clip=clip, text="a red circle")[0]
    return {"positive": conditioning, "latent": latent}


def test_the_experts_take_turns_and_each_gets_the_bytes_of_a_run_of_its_own(host, parts, run, monkeypatch):
    import comfy.model_management as management

    high, low, clip, _, _ = parts
    trained, alone = host.module("host.whole_models").whole_model, {}
    for expert, model in (("high noise", high), ("low noise", low)):
        state, _ = begun(host, parts, f"{run} alone", expert, model, low=None)
        alone[expert] = host.call("TrainStep", state=state, steps=5, validate_every=2)[0]
    denoiser, seen = host.module("host.denoiser").Denoiser, []
    denoise = denoiser.denoise

    def watched(self, x, sigma, *more):
        networks = {id(one.model.model) for one in management.current_loaded_models}
        assert {id(trained(model).model) for model in (high, low)} & networks == {id(self.model)}
        seen.extend((self.model is trained(high).model, float(level)) for level in sigma)
        return denoise(self, x, sigma, *more)

    monkeypatch.setattr(denoiser, "denoise", watched)
    pair, report = begun(host, parts, run)
    assert f"run '{run}_high_noise'" in report and f"run '{run}_low_noise'" in report
    assert "from 0.6 up are trained" in report and "below 0.6 are trained" in report
    found = host.call(
        "TrainStep", state=pair, steps=5, validate_every=2, preview_every=3, switch_every=2, **prompts(host, clip)
    )
    for state, expected in zip(found[0].states, alone.values(), strict=True):
        assert equal(state, expected) and state.history == expected.history
    assert seen and all((level >= BOUNDARY) == is_high for is_high, level in seen)
    turns = [is_high for number, (is_high, _) in enumerate(seen) if not number or is_high != seen[number - 1][0]]
    assert turns == [True, False] * 4  # up to 2, 3, 4 and 5
    assert "8 previews" not in found[5] and "2 previews of the pair" in found[5]
    assert "sampled with this expert alone" not in found[5]
    for ending in ("high_noise", "low_noise"):
        names = sorted(path.name for path in Path(host.output, "graft", f"{run}_{ending}", "previews").iterdir())
        assert [name[13:] for name in names] == ["00000003-average-0.jpg", "00000003-weights-0.jpg"]
    seen.clear()
    again = host.call("TrainStep", state=pair, steps=5, validate_every=2)[0]
    assert not seen and all(equal(*two) for two in zip(again.states, found[0].states, strict=True))
    split = host.call("GraftSplitExperts", state=found[0])
    assert (split[0], split[3]) == found[0].states
    for model, state in ((split[1], alone["high noise"]), (split[4], alone["low noise"])):
        assert model.model is state.subject.model.model
    assert split[2].keys() == split[5].keys() and not all(torch.equal(split[2][k], split[5][k]) for k in split[2])


def test_a_preview_is_what_two_ksamplers_make_of_the_pair(host, parts, run):
    """ComfyUI's own KSampler (Advanced), which changes the model at a step, is the oracle."""
    high, low, clip, _, _ = parts
    given, seed = prompts(host, clip), 11
    sampling = high.get_model_object("model_sampling")
    import comfy.samplers

    sigmas = comfy.samplers.calculate_sigmas(sampling, "simple", 20)
    border = int((sigmas[:-1] >= BOUNDARY).sum())
    assert 2 < border < 18
    common = {"noise_seed": seed, "steps": 20, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple"}
    common |= {"positive": given["positive"], "negative": given["positive"]}
    first = host.call(
        "KSamplerAdvanced", model=high, add_noise="enable", latent_image=given["latent"], start_at_step=0,
        end_at_step=border, return_with_leftover_noise="enable", **common,
    )[0]  # fmt: skip
    expected = host.call(
        "KSamplerAdvanced", model=low, add_noise="disable", latent_image=first, start_at_step=border,
        end_at_step=10000, return_with_leftover_noise="disable", **common,
    )[0]  # fmt: skip
    sample = host.module("host.pair_previews").sample_pair
    before = torch.get_rng_state()
    found = sample((high, low), BOUNDARY, given["positive"], None, given["latent"], seed)
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(found, expected["samples"].cpu(), rtol=1e-4, atol=1e-4)
    whole = sample((high, low), 0.0, given["positive"], None, given["latent"], seed)
    assert not torch.allclose(whole, found, atol=1e-2), "the other expert has a part in it"


def test_both_are_saved_loaded_and_trained_on(host, parts, run):
    high, low, _, _, dataset = parts
    pair, _ = begun(host, parts, run)
    whole = host.call("TrainStep", state=pair, steps=4, validate_every=0)[0]
    half = host.call("TrainStep", state=pair, steps=2, validate_every=0)[0]
    folders = host.call("GraftSaveState", state=half, name=run)[0].splitlines()
    assert [Path(one).name for one in folders] == [f"{run}_high_noise", f"{run}_low_noise"]
    for ending in ("high_noise", "low_noise"):
        shutil.rmtree(Path(host.output, "graft", f"{run}_{ending}"))
    given = {"model": high, "low_noise_model": low, "dataset": dataset}
    for name in (f"{run}_high_noise", f"{run}_low_noise"):
        loaded = host.call("GraftLoadState", name=name, **given)[0]
        on = host.call("TrainStep", state=loaded, steps=2, validate_every=0, switch_every=1)[0]
        assert all(equal(*two) for two in zip(on.states, whole.states, strict=True))
    single = host.call("GraftLoadState", name=f"{run}_low_noise", model=low, dataset=dataset)[0]
    assert equal(host.call("TrainStep", state=single, steps=2, validate_every=0)[0], whole.low)
    changed = host.call("TrainStep", state=half, steps=2, validate_every=0, objective=objective(host))[0]
    assert all(equal(*two) for two in zip(changed.states, whole.states, strict=True))
    paths = [Path(one) for one in host.call("GraftSaveLoRA", state=whole, prefix=f"loras/{run}")[0].splitlines()]
    assert [path.name.rpartition("_0")[0] for path in paths] == [f"{run}_high_noise", f"{run}_low_noise"]
    for path, expert in zip(paths, ("high noise", "low noise"), strict=True):
        with safe_open(path, "pt") as file:
            assert file.metadata()["graft_expert"] == expert
    for number, (path, expert) in enumerate(zip(paths, ("high noise", "low noise"), strict=True)):
        lora = host.call("GraftSplitExperts", state=whole)[3 * number + 2]
        average = host.call("EMAMerge", model=high, state=whole.states[number])[2]
        saved = load_file(path)
        for one in (lora, average):
            own = Path(host.call("GraftSaveLoRA", lora_model=one, prefix=f"loras/{run} alone")[0])
            assert own.name.startswith(f"{run} alone_{expert.replace(' ', '_')}_0")
            with safe_open(own, "pt") as file:
                assert (file.metadata()["graft_expert"], file.metadata()["graft_expert_boundary"]) == (expert, "0.6")
            found = load_file(own)
            assert found.keys() == saved.keys()
            assert all(torch.equal(found[key], saved[key]) for key in saved) == (one is lora)
    plain = Path(host.call("GraftSaveLoRA", lora_model=dict(lora), prefix=f"loras/{run} alone")[0])
    assert plain.name.startswith(f"{run} alone_0")
    with pytest.raises(ValueError, match="does not end in _high_noise or _low_noise"):
        host.call("GraftSaveState", state=whole.high, name=run)
        host.call("GraftLoadState", name=run, **given)
    with pytest.raises(ValueError, match="EMA Merge: this training state is of a pair of experts"):
        host.call("EMAMerge", model=high, state=whole)
    with pytest.raises(ValueError, match="Split Expert Pair: this training state is of one model"):
        host.call("GraftSplitExperts", state=whole.high)


def test_load_state_gives_each_expert_what_is_connected(host, parts, run):
    """Its own model, and the dataset, CLIP and VAE of both; a state that is saved again, also the other's, is loaded
    again; two states of one expert are not a pair.
    """
    high, low, clip, vae, dataset = parts
    pair, _ = begun(host, parts, run)
    host.call("GraftSaveState", state=pair, name=run)
    given = {"name": f"{run}_high_noise", "model": high, "dataset": dataset, "clip": clip, "vae": vae}
    loaded = host.call("GraftLoadState", **given, low_noise_model=low)[0]
    for state, model, expert in ((loaded.high, high, "high noise"), (loaded.low, low, "low noise")):
        subject = state.subject
        assert (subject.model, subject.clip, subject.vae, subject.dataset) == (model, clip, vae, dataset)
        assert state.settings.objective.expert == expert
    fingerprint = host.node("GraftLoadState").fingerprint_inputs
    before = fingerprint(**given)
    record = Path(host.output, "graft_states", f"{run}_low_noise", "state.json")
    os.utime(record, (1000, 1000))
    assert fingerprint(**given) != before
    host.call("GraftSaveState", state=pair.high, name=f"{run}_low_noise")
    with pytest.raises(ValueError, match="are not the states of a high noise and a low noise expert"):
        host.call("GraftLoadState", **given, low_noise_model=high)


def test_what_does_not_fit_a_pair_is_said(host, parts, run):
    with pytest.raises(ValueError, match="expert is high noise, and Start Training Expert Pair trains both"):
        begun(host, parts, run, "high noise")
    with pytest.raises(ValueError, match="expert is both, and Start Training has one model"):
        begun(host, parts, run, low=None)
    with pytest.raises(ValueError, match="high noise model and low noise model are the same model"):
        begun(host, parts, run, model=parts[1])
    adapter = host.call("GraftAdapter", text_encoder=True)[0]
    with pytest.raises(ValueError, match="Start Training Expert Pair: train text encoder is on"):
        begun(host, parts, run, adapter=adapter)
    assert not list(Path(host.output, "graft").glob(f"{run}*"))


def test_all_that_only_one_expert_can_have_is_said_at_once(host, parts, run, monkeypatch):
    group = host.module("training.distributed.process_group")
    monkeypatch.setattr(type(group.current()), "size", 2)
    trained = {"lora_unet_middle_block_1_proj_in.lora_up.weight": torch.zeros(2, 2)}
    adapter = host.call("GraftAdapter", rank=2, text_encoder=True, initial=trained)[0]
    with pytest.raises(ValueError, match="Start Training Expert Pair: ") as error:
        begun(host, parts, run, adapter=adapter, training_only=[("a.safetensors", 1.0, 1.0)])
    for said in (
        "train text encoder is on: both experts read the one text encoder, so switch it off",
        "connect another Adapter Settings, with the low noise expert's initial LoRA or without one",
        "connect Training-only LoRA with that of the low noise expert to low noise settings",
        "there are several ranks",
        "train each expert in a run of its own",
    ):
        assert said in str(error.value)
    words = host.call("GraftWords", words="sks_cat", initial="red")[0]
    with pytest.raises(ValueError, match="each of the two models would train vectors of its own for one word"):
        begun(host, parts, run, words=words)
    assert not list(Path(host.output, "graft").glob(f"{run}*"))


def test_what_only_one_expert_has_is_asked_for_the_other(host, parts, run, stacks):
    encoder = host.call("GraftAdapter", text_encoder=True)[0]
    for given, said in (
        ({"low_noise_adapter": encoder}, "train text encoder is on"),
        ({"training_only": stacks[0]}, "that of the low noise expert to low noise settings, or with an"),
        ({"low_noise_training_only": stacks[1]}, "that of the high noise expert to settings, or with an"),
        ({"low_noise_settings": host.call("GraftEMA")[0]}, "settings has EMA Settings, which both experts share"),
    ):
        with pytest.raises(ValueError, match=said):
            begun(host, parts, run, **given)
    adapter = host.call("GraftAdapter", rank=2)[0]
    with pytest.raises(ValueError, match="high noise model and low noise model are the same model"):
        begun(host, parts, run, model=parts[1], low_noise_adapter=host.call("GraftAdapter", rank=4)[0], adapter=adapter)
    half, _ = begun(host, parts, run, training_only=stacks[0], low_noise_training_only=[])
    assert half.high.start.training_only and not half.low.start.training_only
    with pytest.raises(ValueError, match="Load State: low noise training-only LoRA is connected, and low noise model"):
        host.call("GraftSaveState", state=half, name=run)
        host.call("GraftLoadState", name=f"{run}_low_noise", model=parts[1], low_noise_training_only=stacks[1])


def test_each_expert_goes_on_from_a_lora_of_its_own(host, parts, run):
    """Trained at two ranks, then trained on: each expert's bytes are those of a run alone."""
    high, low, _, _, _ = parts
    first, _ = begun(host, parts, f"{run} first", low_noise_adapter=host.call("GraftAdapter", rank=3)[0])
    first = host.call("TrainStep", state=first, steps=2, validate_every=0)[0]
    loras = [host.call("GraftSplitExperts", state=first)[number] for number in (2, 5)]
    ranks = [min(t.shape[0] for name, t in lora.items() if name.endswith("lora_down.weight")) for lora in loras]
    assert ranks == [2, 3]
    adapters = []
    for rank, lora in zip(ranks, loras, strict=True):
        adapters.append(host.call("GraftAdapter", rank=rank, initial=lora)[0])
    pair, _ = begun(host, parts, run, adapter=adapters[0], low_noise_adapter=adapters[1])
    for state, lora in zip(pair.states, loras, strict=True):
        found = state.lora_model()
        assert found.keys() == lora.keys() and all(torch.equal(found[name], lora[name]) for name in lora)
    pair = host.call("TrainStep", state=pair, steps=3, validate_every=0, switch_every=1)[0]
    for expert, model, adapter, state in zip(
        ("high noise", "low noise"), (high, low), adapters, pair.states, strict=True
    ):
        alone, _ = begun(host, parts, f"{run} alone", expert, model, low=None, adapter=adapter)
        assert equal(host.call("TrainStep", state=alone, steps=3, validate_every=0)[0], state)


@pytest.fixture(scope="module")
def stacks(host, parts):
    """A training-only LoRA for each expert."""
    weights = dict(parts[0].model.named_parameters())
    name = next(name for name in weights if name.endswith("attn1.to_q.weight"))
    path = name.removesuffix(".weight")
    found = []
    os.makedirs(os.path.join(host.models, "loras"), exist_ok=True)
    for number in range(2):
        draw = torch.Generator().manual_seed(number)
        rows, columns = weights[name].shape
        tensors = {
            f"{path}.lora_up.weight": torch.randn(rows, 2, generator=draw),
            f"{path}.lora_down.weight": torch.randn(2, columns, generator=draw),
        }
        file = f"expert{number}.safetensors"
        save_file(tensors, os.path.join(host.models, "loras", file))
        rows = json.dumps({"version": 1, "rows": [{"file": file, "model": 1.0}]})
        found.append(host.call("GraftLoRAStack", rows=rows)[0])
    return found


def test_each_expert_has_a_training_only_lora_of_its_own(host, parts, run, stacks, monkeypatch):
    """Each expert's bytes are those of a run alone with its LoRA; previews are sampled without them; both states load
    with their own.
    """
    high, low, clip, _, dataset = parts
    alone = []
    for expert, model, stack in zip(("high noise", "low noise"), (high, low), stacks, strict=True):
        state, _ = begun(host, parts, f"{run} alone", expert, model, low=None, training_only=stack)
        alone.append(host.call("TrainStep", state=state, steps=4, validate_every=2)[0])
    plain, _ = begun(host, parts, f"{run} plain")
    plain = host.call("TrainStep", state=plain, steps=4, validate_every=2)[0]
    given = {"training_only": stacks[0], "low_noise_training_only": stacks[1]}
    pair, report = begun(host, parts, run, **given)
    assert "expert0.safetensors" in report and "expert1.safetensors" in report
    previews, sampled, trained = host.module("host.pair_previews"), [], host.module("host.whole_models").whole_model
    sample = previews.sample_pair

    def seen(models, *more):
        result = sample(models, *more)
        bare = [model.clone() for model in models]
        sampled.append(all(not wrapped(trained(model)) for model in (high, low)))
        assert torch.equal(sample(bare, *more), result)
        return result

    monkeypatch.setattr(previews, "sample_pair", seen)
    half = host.call("TrainStep", state=pair, steps=2, validate_every=2, preview_every=1, **prompts(host, clip))[0]
    assert sampled and all(sampled)
    host.call("GraftSaveState", state=half, name=run)
    whole = host.call("TrainStep", state=half, steps=2, validate_every=2, switch_every=1)[0]
    for state, expected, without in zip(whole.states, alone, plain.states, strict=True):
        assert equal(state, expected) and state.history.loss != without.history.loss
    for ending in ("high_noise", "low_noise"):
        shutil.rmtree(Path(host.output, "graft", f"{run}_{ending}"))
    models = {"model": high, "low_noise_model": low, "dataset": dataset}
    loaded = host.call("GraftLoadState", name=f"{run}_low_noise", **models, **given)[0]
    on = host.call("TrainStep", state=loaded, steps=2, validate_every=2)[0]
    assert all(equal(*two) for two in zip(on.states, whole.states, strict=True))
    with pytest.raises(ValueError, match="was trained with the training-only LoRA"):
        swapped = {"training_only": stacks[1], "low_noise_training_only": stacks[0]}
        host.call("GraftLoadState", name=f"{run}_low_noise", **models, **swapped)
    without = host.call("GraftLoadState", name=f"{run}_low_noise", **models)[0]
    with pytest.raises(ValueError, match="that of the low noise expert of a pair to low noise training-only LoRA"):
        host.call("TrainStep", state=without, steps=3)


def wrapped(model):
    """The modules of a model whose forward is not their class's."""
    return [name for name, module in model.model.diffusion_model.named_modules() if "forward" in vars(module)]
