"""Latents of sound alone, (B, C, T) of ACE-Step 1.5 and Stable Audio and (B, C, h, T) of ACE-Step 1, and LTX-2's video
with its sound: they train through Samples as pictures do, and models that do not take them refuse them by name.
"""

import importlib
import shutil
from pathlib import Path

import comfy.supported_models
import comfy.utils
import pytest
import torch
from families import build, conditions, latents, parts_of, random
from graft_nodes import host as wall
from graft_nodes.training.data.parts import pack_parts, unpack_parts
from graft_nodes.training.trainable.install import make_lora
from tiny_families import EVERY

from . import test_train_families as of_families
from .test_samples import common, cut_in_a_step, loader_of, node, ran, whole

SOUNDS = ("ace-step 1.5", "ace-step", "stable audio")
BOTH = "ltx 2 sound"
VIDEO, SOUND = EVERY[BOTH].latent, EVERY[BOTH].sound
LONGER = 6  # of a second length


def latent_of(name, number, seed=0):
    """A LATENT of sound, of one length or another; of LTX-2 a video with it, and `seed` changes the sound alone."""
    longer, seed = LONGER * (number % 2), number + 100 * seed
    if name != BOTH:
        *sides, length = EVERY[name].latent
        return {"samples": random(1, *sides, length + longer, seed=seed), "type": "audio"}
    channels, length, frequencies = SOUND
    sound = {"samples": random(1, channels, length + longer, frequencies, seed=seed), "type": "audio"}
    video = {"samples": random(1, *VIDEO, seed=number + 50)}
    return nodes_lt().LTXVConcatAVLatent.execute(video, sound).args[0]


def nodes_lt():
    """ComfyUI's nodes of LTX-2; skips where it has none with sound."""
    module = importlib.import_module("comfy_extras.nodes_lt")
    if not hasattr(module, "LTXVConcatAVLatent"):
        pytest.skip("this ComfyUI has no latents of video with sound")
    return module


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
            latents = [latent_of(name, number, seed) for number in range(5)]
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


@pytest.mark.parametrize("name", [*SOUNDS, BOTH])
def test_sound_trains_branches_stops_and_resumes(host, put, monkeypatch, name):
    run = f"sound {name}"
    place = Path(host.output) / "graft" / run
    put(name)
    asked = {"state": ["step0", 0], "report": ["samples", 1], "dataset": ["samples", 0]}
    found = ran(host, {**songs(), **common(4, run=run)}, **asked)
    at_once, data = found["state"], found["dataset"]
    lines = found["report"].splitlines()
    shape = "128x2x4x5 with sound of 8x10x16" if name == BOTH else "x".join(map(str, EVERY[name].latent))
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
    ups = [key for key in at_once.trained if "lora_up" in key]
    assert len(moved) > 0.4 * len(ups)
    if name == BOTH:
        assert moved == ups and sum("audio" in key for key in ups) > len(ups) // 2
        assert not any(shape in line for line in lines if "bring" in line)
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


def watched(host, monkeypatch):
    """What training adds noise to and what comes back: lists of (clean, noise, sigma) and of denoised latents. Those of
    the memory plan, which have no values, are left out.
    """
    denoiser, added, made = host.module("host.denoiser").Denoiser, [], []
    noisy, denoise = denoiser.noisy, denoiser.denoise

    def watched_noisy(self, clean, noise, sigma):
        if not sigma.is_meta:
            added.append((clean, noise, sigma))
        return noisy(self, clean, noise, sigma)

    def watched_denoise(self, *given):
        denoised = denoise(self, *given)
        if not denoised.is_meta:
            made.append(denoised)
        return denoised

    monkeypatch.setattr(denoiser, "noisy", watched_noisy)
    monkeypatch.setattr(denoiser, "denoise", watched_denoise)
    return added, made


@pytest.mark.parametrize("name", [*SOUNDS, BOTH])
def test_the_loss_of_sound_is_the_mean_square_of_the_model_s_own_error(host, put, monkeypatch, name):
    """Of video with sound it is the sum of both means, however much longer one is than the other."""
    put(name)
    added, made = watched(host, monkeypatch)
    run = f"sound loss {name}"
    state = ran(host, {**songs(), **common(1, run=run, validate_every=0)}, state=["step0", 0])["state"]
    (clean, noise, sigma), denoised = added[0], made[0].detach().double()
    each = []
    for number, level in enumerate(sigma.double().tolist()):
        scale = (1 + level**-2) ** 0.5 if name == "stable audio" else 1 / level
        square = ((denoised - clean.double())[number] * scale) ** 2
        if name == BOTH:
            cut = 128 * 2 * 4 * 5
            each.append(float(square[0, :cut].mean() + square[0, cut:].mean()))
        else:
            each.append(float(square.mean()))
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


# --- video with its sound ---------------------------------------------------------------------------------------------


def test_parts_are_packed_as_comfyuis_sampler_packs_them():
    nodes_lt()
    parts = [random(2, *VIDEO, seed=0), random(2, *SOUND, seed=1)]
    expected, shapes = comfy.utils.pack_latents(parts)
    found = pack_parts(parts)
    assert torch.equal(found, expected)
    for mine, theirs in zip(
        unpack_parts(found, (VIDEO, SOUND)), comfy.utils.unpack_latents(expected, shapes), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_video_with_sound_is_sampled_as_it_was_trained():
    """With the saved file by ComfyUI's own loader and sampler; test_train_families.py holds its gradients."""
    nodes_lt()
    patcher, settings = build(BOTH), of_families.adapter(BOTH)
    trained, parts = of_families.moved(patcher, settings), parts_of(BOTH)
    x, sigma, (context, extras) = latents(BOTH, 4), torch.tensor([0.6]), conditions(BOTH, 3)
    with torch.no_grad():
        found = of_families.denoised(patcher, settings, trained, x, sigma, BOTH)
        plain = of_families.sampled(patcher, x, sigma, context, extras, parts)
        with_it = of_families.with_file(patcher, make_lora(trained, settings, None))
        expected = of_families.sampled(with_it, x, sigma, context, extras, parts)
    for before, mine, without, theirs in zip(
        *(unpack_parts(t, parts) for t in (x, found, plain, expected)), strict=True
    ):
        scale = float((theirs - before).abs().max())
        assert float((mine - theirs).abs().max()) < 2e-4 * scale
        assert float((without - theirs).abs().max()) > 1e-2 * scale


def test_models_without_sound_beside_their_video_refuse_it(host):
    latents = [latent_of(BOTH, number) for number in range(2)]
    text = [[list(conditions(BOTH, seed=0))]]
    dataset = host.call("GraftSamples", latents=latents, conditioning=text, validation=[0.0])[0]
    for name in ("ltx", "wan", "sd1", "ace-step"):
        with pytest.raises(ValueError, match=r"Start Training: \w+ takes no sound beside its video, and sample 1 has"):
            host.call("GraftTrainStart", model=build(name), dataset=dataset, run="refused")
    nested = importlib.import_module("comfy.nested_tensor").NestedTensor
    other = {"samples": nested([random(1, *VIDEO, seed=0), random(1, 4, 10, 16, seed=1)])}
    dataset = host.call("GraftSamples", latents=[other], conditioning=text, validation=[0.0])[0]
    with pytest.raises(ValueError, match="LTXAV takes sound of 8 channels and 16 frequencies beside its video"):
        host.call("GraftTrainStart", model=build(BOTH), dataset=dataset, run="refused")
    wrong = {"samples": nested([random(1, 4, 8, 8, seed=0), random(1, 8, 10, 16, seed=1)])}
    with pytest.raises(ValueError, match=r"latent 1 has parts of the shapes \(1, 4, 8, 8\) and \(1, 8, 10, 16\)"):
        host.call("GraftSamples", latents=[wrong], conditioning=text)


def test_a_mask_weighs_the_video_and_leaves_the_sound_whole(host, put, monkeypatch):
    nodes_lt()
    put(BOTH)
    added, made = watched(host, monkeypatch)
    monkeypatch.setitem(
        host.nodes.NODE_CLASS_MAPPINGS, "LoadImageMask", loader_of("MASK", lambda: torch.zeros(1, 8, 10))
    )
    graph = {**songs(), **common(1, run="masked sound", validate_every=0), "mask": node("LoadImageMask")}
    graph["samples"]["inputs"]["masks"] = ["mask", 0]
    loss = ran(host, graph, state=["step0", 0])["state"].history.loss[0]
    (clean, _, sigma), cut = added[0], 128 * 2 * 4 * 5
    error = (made[0].detach().double() - clean.double())[:, 0, cut:] / sigma.double()[:, None]
    assert loss == pytest.approx(float((error**2).mean()), rel=1e-5)


class TinyVideoVAE:
    """Stands in for the VAE of LTX-2's video."""

    def decode(self, latents):
        assert latents.shape[1:] == VIDEO
        return random(latents.shape[0], 9, 32, 40, 3, seed=0)


def test_previews_of_video_with_sound_show_its_frames(host, put, monkeypatch):
    """Sampled from KSampler's noise for the seed, both parts in turn."""
    nodes_lt()
    put(BOTH)
    monkeypatch.setitem(host.nodes.NODE_CLASS_MAPPINGS, "VAELoader", loader_of("VAE", TinyVideoVAE))
    graph = {**songs(), **common(1, run="shown sound")}
    graph["start"]["inputs"]["vae"] = ["vae", 0]
    state = ran(host, graph, state=["start", 0])["state"]
    latent = latent_of(BOTH, 0)
    host.call(
        "TrainStep",
        state=state,
        steps=2,
        preview_every=2,
        positive=[list(conditions(BOTH, seed=0))],
        latent=latent,
    )
    assert len(list((Path(host.output) / "graft" / "shown sound" / "previews").glob("*.jpg"))) == 9
    _, noise, _ = wall.previews.prepare_sampling(build(BOTH), latent, 5)
    with torch.random.fork_rng(devices=[]):
        expected = importlib.import_module("comfy.sample").prepare_noise(latent["samples"], 5)
    for mine, theirs in zip(noise.unbind(), expected.unbind(), strict=True):
        assert torch.equal(mine, theirs)
