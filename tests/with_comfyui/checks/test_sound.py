"""Latents of sound alone, (B, C, T) of ACE-Step 1.5 and Stable Audio and (B, C, h, T) of ACE-Step 1: they train through
Samples as pictures do, and models of pictures refuse them by name.
"""

import shutil
from pathlib import Path

import comfy.supported_models
import pytest
import torch
from families import build, conditions, random
from tiny_families import EVERY, Family

from . import test_train_families as of_families
from .test_samples import common, cut_in_a_step, loader_of, node, ran, whole

STABLE_AUDIO = Family(
    "StableAudio",
    {"audio_model": "dit1.0", "embed_dim": 64, "depth": 2, "num_heads": 2, "project_cond_tokens": True},
    (64, 20),
    predicts="v",
    text=768,
)
SOUNDS = ("ace-step 1.5", "ace-step", "stable audio")
LONGER = 6  # of a second length


@pytest.fixture(autouse=True)
def stable_audio(monkeypatch):
    """A model of Stable Audio 1, with the embedders of its seconds, which are in its file."""
    import comfy.ldm.audio.embedders as embedders

    weights = {}
    for number, name in enumerate(("start", "total")):
        for key, tensor in embedders.NumberConditioner(768).state_dict().items():
            drawn = random(*tensor.shape, seed=number) * 0.05
            weights[f"conditioner.conditioners.seconds_{name}.{key}"] = drawn
    monkeypatch.setitem(EVERY, "stable audio", Family(**{**vars(STABLE_AUDIO), "weights": weights}))


def songs_of(name):
    """A node that gives lists of latents of sound, two of one length and two of another, and of conditionings."""

    class Songs:
        RETURN_TYPES = ("LATENT", "CONDITIONING")
        OUTPUT_IS_LIST = (True, True)
        FUNCTION = "make"
        CATEGORY = "test"

        @classmethod
        def INPUT_TYPES(cls):
            return {"required": {"seed": ("INT", {"default": 0})}}

        def make(self, seed):
            *sides, length = EVERY[name].latent
            latents = []
            for number in range(5):
                lengths = length + LONGER * (number % 2)
                latents.append({"samples": random(1, *sides, lengths, seed=number + 100 * seed), "type": "audio"})
            return latents, [[list(conditions(name, seed=number))] for number in range(5)]

    return Songs


def songs(seed=0):
    return {
        "songs": node("TestSongs", seed=seed),
        "samples": node("GraftSamples", latents=["songs", 0], conditioning=["songs", 1], validation=0.2, repeats=2),
    }


@pytest.fixture
def put(host, monkeypatch):
    """Stands the tiny model of a family, and its songs, in for loaders."""

    def stand_in(name):
        build(name)  # skips where this ComfyUI has no such family
        parts = {"UNETLoader": loader_of("MODEL", lambda: build(name)), "TestSongs": songs_of(name)}
        for kind in ("CLIPLoader", "VAELoader"):
            parts[kind] = loader_of("CLIP", lambda: None)
        for kind, part in parts.items():
            monkeypatch.setitem(host.nodes.NODE_CLASS_MAPPINGS, kind, part)
        host.fresh()

    return stand_in


@pytest.mark.parametrize("name", SOUNDS)
def test_sound_trains_branches_stops_and_resumes(host, put, monkeypatch, name):
    run = f"sound {name}"
    place = Path(host.output) / "graft" / run
    put(name)
    asked = {"state": ["step0", 0], "report": ["samples", 1], "dataset": ["samples", 0]}
    found = ran(host, {**songs(), **common(4, run=run)}, **asked)
    at_once, data = found["state"], found["dataset"]
    lines = found["report"].splitlines()
    shape = "x".join(map(str, EVERY[name].latent))
    assert lines[0] == "4 samples to train on, 1 held out for validation"
    assert any(shape in line for line in lines)
    lengths = [image.latent.shape[-1] for image in data.images]
    assert len(set(lengths)) == 2 and all(image.repeats == 2 for image in data.images)
    batches = [
        batch
        for step in range(8)
        for batch in host.module("training.data.batches").make_batches(data, 2, 0.0, 0, step, step, "part 0")
    ]
    assert {tuple(batch.latents.shape[1:]) for batch in batches} == {tuple(image.latent.shape) for image in data.images}
    assert len(at_once.history.loss) == 4 and all(torch.isfinite(torch.tensor(at_once.history.loss)))
    moved = [key for key, tensor in at_once.trained.items() if "lora_up" in key and bool(tensor.any())]
    assert len(moved) > 0.4 * sum("lora_up" in key for key in at_once.trained)
    shutil.rmtree(place)
    put(name)
    monkeypatch.setattr(host.module("training.data.sample_store"), "KEPT_BYTES", 0)
    read = {"state": ["step1", 0], "half": ["step0", 0], "report": ["samples", 1], "dataset": ["samples", 0]}
    branched = ran(host, {**songs(), **common(2, 2, run=run)}, **read)
    assert "read from the cache when they are drawn" in branched["report"]
    assert branched["dataset"].digest == data.digest and whole(branched["state"]) == whole(at_once)
    host.call("GraftSaveState", state=branched["half"], name=run)
    shutil.rmtree(place)
    cut_in_a_step(host, monkeypatch, {**songs(), **common(4, run=run)})
    assert whole(ran(host, {**songs(), **common(4, run=run)}, state=["step0", 0])["state"]) == whole(at_once)
    shutil.rmtree(place)
    loaded = host.call("GraftLoadState", name=run, model=build(name), dataset=data)[0]
    assert whole(host.call("TrainStep", state=loaded, steps=2, validate_every=1)[0]) == whole(at_once)
    shutil.rmtree(place, ignore_errors=True)
    forgetful = {**songs(), **common(4, run=run)}
    forgetful["optimizer"]["inputs"]["checkpointing"] = True
    assert ran(host, forgetful, state=["step0", 0])["state"].trained.keys() == at_once.trained.keys()
    same = ran(host, forgetful, state=["step0", 0])["state"].trained
    assert all(torch.equal(tensor, at_once.trained[key]) for key, tensor in same.items())
    other = ran(host, {**songs(1), **common(1, run=f"{run} other")}, state=["step0", 0])["state"]
    assert other.history.loss[0] != at_once.history.loss[0] and other.start.digest != at_once.start.digest


def test_gradients_of_stable_audio_are_those_of_finite_differences_of_sampling():
    """Those of ACE-Step and ACE-Step 1.5 are held in test_train_families.py."""
    of_families.test_gradients_are_those_of_finite_differences_of_sampling("stable audio")
    of_families.test_checkpointed_gradients_are_the_same_bytes("stable audio")


def watched(host, monkeypatch):
    """What training adds noise to and what comes back: lists of (clean, noise, sigma) and of denoised latents."""
    denoiser, added, made = host.module("host.denoiser").Denoiser, [], []
    noisy, denoise = denoiser.noisy, denoiser.denoise

    def watched_noisy(self, clean, noise, sigma):
        added.append((clean, noise, sigma))
        return noisy(self, clean, noise, sigma)

    def watched_denoise(self, *given):
        made.append(denoise(self, *given))
        return made[-1]

    monkeypatch.setattr(denoiser, "noisy", watched_noisy)
    monkeypatch.setattr(denoiser, "denoise", watched_denoise)
    return added, made


@pytest.mark.parametrize("name", SOUNDS)
def test_the_loss_of_sound_is_the_mean_square_of_the_model_s_own_error(host, put, monkeypatch, name):
    put(name)
    added, made = watched(host, monkeypatch)
    run = f"sound loss {name}"
    state = ran(host, {**songs(), **common(1, run=run, validate_every=0)}, state=["step0", 0])["state"]
    (clean, noise, sigma), denoised = added[0], made[0].detach().double()
    each = []
    for number, level in enumerate(sigma.double().tolist()):
        scale = (1 + level**-2) ** 0.5 if name == "stable audio" else 1 / level
        each.append(float((((denoised - clean.double())[number] * scale) ** 2).mean()))
    assert len(added) == 1 and abs(float(noise.std()) - 1) < 0.1
    assert state.history.loss[0] == pytest.approx(sum(each) / len(each), rel=1e-5)


def test_a_model_of_pictures_refuses_sound_and_a_model_of_sound_refuses_pictures(host, put):
    text = [[list(conditions("ace-step", seed=0))]]
    cases = {
        "ace-step 1.5": ["sd1", "wan", "ace-step"],
        "ace-step": ["sd1", "flux", "wan", "ace-step 1.5"],
        "sd1": ["ace-step", "ace-step 1.5", "stable audio"],
        "wan": ["ace-step", "ace-step 1.5"],
    }
    for of_latent, of_models in cases.items():
        latents = [{"samples": random(1, *EVERY[of_latent].latent, seed=n)} for n in range(2)]
        dataset = host.call("GraftSamples", latents=latents, conditioning=text, validation=[0.0])[0]
        for name in of_models:
            if not hasattr(comfy.supported_models, EVERY[name].supported):
                continue
            with pytest.raises(ValueError, match=r"Start Training: \w+ takes latents of .* and sample 1 has one of"):
                host.call("GraftTrainStart", model=build(name), dataset=dataset, run="refused")


def test_a_mask_says_nothing_of_sound(host):
    latents = [{"samples": random(1, 64, 20, seed=0)}]
    given = {"latents": latents, "conditioning": [[list(conditions("ace-step 1.5", seed=0))]]}
    with pytest.raises(ValueError, match=r"Samples: sample 1 is sound, .*: disconnect masks"):
        host.call("GraftSamples", **given, masks=[torch.ones(1, 8, 8)])


class TinySoundVAE:
    """Stands in for a VAE of sound: (B, T, 2)."""

    def decode(self, latents):
        return random(latents.shape[0], 40, 2, seed=0)


@pytest.mark.parametrize("name", SOUNDS)
def test_previews_of_sound_are_refused_before_the_first_step(host, put, monkeypatch, name):
    """What only the VAE can tell is said when the first preview is made."""
    put(name)
    monkeypatch.setitem(host.nodes.NODE_CLASS_MAPPINGS, "VAELoader", loader_of("VAE", TinySoundVAE))
    graph = {**songs(), **common(1, run="heard")}
    graph["start"]["inputs"]["vae"] = ["vae", 0]
    state = ran(host, graph, state=["start", 0])["state"]
    positive = [list(conditions(name, seed=0))]
    step = {"state": state, "steps": 1, "preview_every": 1, "positive": positive}
    samples = random(1, *EVERY[name].latent, seed=0)
    with pytest.raises(ValueError, match="the latent is of sound, which previews do not show"):
        host.call("TrainStep", **step, latent={"samples": samples, "type": "audio"})
    host.call("TrainStep", **{**step, "preview_every": 0, "latent": {"samples": samples}})
    with pytest.raises(ValueError, match="the latent is of sound, which previews do not show"):
        host.call("TrainStep", **{**step, "steps": 2}, latent={"samples": samples})
