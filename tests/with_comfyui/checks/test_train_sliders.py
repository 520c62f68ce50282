"""Sliders on tiny models of ComfyUI's own classes, with every method, from noise, pictures and pairs: gradients at each
strength are those of finite differences, two calls are one, and ComfyUI computes with the saved LoRA at a strength
below 0 what training computed.
"""

from dataclasses import replace

import comfy.supported_models
import pytest
import torch
from families import build, conditions, latent
from graft_nodes import host as wall
from graft_nodes.training.data import sliders
from graft_nodes.training.data.dataset import Conditioning, Dataset, WorsePicture
from graft_nodes.training.objective.slider import (
    AI_TOOLKIT,
    BOTH_DIRECTIONS,
    CONCEPT_SLIDERS,
    PICTURE_PAIRS,
    SliderSettings,
)
from graft_nodes.training.run.step import batch_losses
from graft_nodes.training.run.workspace import Workspace
from graft_nodes.training.state import equal
from graft_nodes.training.tasks.slider import losses_at
from slopes import slope_along
from tiny_families import FAMILIES

NAMES = ("sd1", "sd2-v", "sdxl", "sd3", "flux", "qwen", "z-image", "wan")
PICTURES = "pictures"  # with prompts in place of their captions
WAYS = [(name, way) for name in NAMES for way in (BOTH_DIRECTIONS, AI_TOOLKIT)]
WAYS += [(name, way) for name in ("sd1", "sd2-v", "flux") for way in (CONCEPT_SLIDERS, PICTURE_PAIRS, PICTURES)]


class Hash:
    digest, unhashed = "clip", ()


def _settings(way):
    if way == PICTURE_PAIRS:
        return SliderSettings(way)
    prompts = {"positive": ("old",), "negative": ("young",), "target": ("person",)}
    if way == AI_TOOLKIT:
        prompts["anchor"] = ("people",)
    method = BOTH_DIRECTIONS if way == PICTURES else way
    return SliderSettings(method, **prompts, guidance=1.0, steps=2)


def _data(name, way):
    settings, texts = _settings(way), ("", "person", "old", "young", "people")
    conditionings = {text: Conditioning(*conditions(name, seed)) for seed, text in enumerate(texts)}
    if way in (PICTURE_PAIRS, PICTURES):
        latents = [latent(name, seed) for seed in range(4)]
        data = Dataset.from_latents(latents, ["person"] * 4, conditionings, held_out=[3])
        if way == PICTURES:
            return sliders.make_picture_dataset(settings, data, conditionings, Hash())
        worse = [WorsePicture(latent(name, 10 + seed).float()) for seed in range(4)]
        images = [replace(image, worse=other) for image, other in zip(data.images, worse, strict=False)]
        held_out = [replace(image, worse=worse[3]) for image in data.held_out]
        return sliders.make_pair_dataset(settings, replace(data, images=tuple(images), held_out=tuple(held_out)))
    zeros = latent(name, 0)
    size = (8 * zeros.shape[-1], 8 * zeros.shape[-2])
    return sliders.make_noise_dataset(settings, zeros, size, conditionings, ("vae", "clip"))


def _state(host, name, way=BOTH_DIRECTIONS):
    """A state at step 1 of a slider, so that its adapter does something."""
    if not hasattr(comfy.supported_models, FAMILIES[name].supported):
        pytest.skip(f"this ComfyUI has no {FAMILIES[name].supported}")
    with torch.inference_mode():
        model = build(name)
    (adapter,) = host.call("GraftAdapter", rank=2)
    (optimizer,) = host.call("GraftOptimizer", learning_rate=1e-2, batch_size=2, total_steps=4)
    given = {"model": model, "dataset": _data(name, way), "adapter": adapter, "optimizer": optimizer}
    state, _ = host.call("GraftTrainStart", **given, run=f"slider {name} {way}")
    return host.call("TrainStep", state=state, steps=1, validate_every=2)[0]


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_gradients_at_each_strength_are_those_of_finite_differences(host, name, way):
    state = _state(host, name, way)
    with torch.inference_mode(False), wall.denoiser.open_denoiser(state.subject.model) as denoiser:
        work = Workspace(state, denoiser, state.subject.dataset)
        try:
            with work.install():
                (batch, *_) = work.loader.take(1, 0)
                draws = torch.Generator().manual_seed(3)
                x = denoiser.process_in(torch.randn(batch.latents.shape, generator=draws))
                sigma = denoiser.sigma(torch.full((len(x),), 0.6))
                for strength in work.dataset.slider.strengths:
                    _check_slope(work, lambda at=strength: _loss(work, at, batch, x, sigma))
        finally:
            work.close()


def _loss(work, strength, batch, x, sigma):
    with work.at_strength(strength):
        if work.dataset.has_pictures:
            return batch_losses(work, batch, torch.Generator().manual_seed(5), {}).double().sum()
        return losses_at(work, batch, x, sigma, {}).double().sum()


def _check_slope(work, loss):
    work.stepper.drop_gradients()
    loss().backward()
    ways = {key: t.grad.clone() for key, t in work.trained.items() if t.grad is not None}
    norm = float(torch.stack([way.double().square().sum() for way in ways.values()]).sum().sqrt())
    assert norm > 0
    ways = {key: way / norm for key, way in ways.items()}
    assert norm == pytest.approx(slope_along(work.trained, ways, loss, (0.02, 0.01)), rel=3e-2)


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_two_calls_are_one(host, name, way):
    state = _state(host, name, way)
    whole = host.call("TrainStep", state=state, steps=2, validate_every=2)[0]
    half = host.call("TrainStep", state=state, steps=1, validate_every=2)[0]
    parts = host.call("TrainStep", state=half, steps=1, validate_every=2)[0]
    assert equal(whole, parts) and whole.history.validation == parts.history.validation
    assert len(whole.history.validation) == 2


@pytest.mark.parametrize("name", NAMES)
def test_comfyui_computes_with_the_lora_at_minus_one_what_training_computed(host, name):
    state = _state(host, name)
    model = state.subject.model
    (conditioning,) = (state.subject.dataset.conditionings[text] for text in ("person",))
    draws = torch.Generator().manual_seed(3)
    with torch.inference_mode(False), torch.no_grad(), wall.denoiser.open_denoiser(model) as denoiser:
        x = denoiser.process_in(torch.randn(latent(name, 0)[None].shape, generator=draws))
        sigma = denoiser.sigma(torch.tensor([0.6]))
        plain = denoiser.denoise(x, sigma, [conditioning], {})
        work = Workspace(state, denoiser, state.subject.dataset)
        with work.install(), work.at_strength(-1.0), torch.no_grad():
            trained = denoiser.denoise(x, sigma, [conditioning], {})
        work.close()
    patched, *_ = host.call("LoRAStackPatch", model=model, lora_model=state.lora_model(), lora_strength=-1.0)
    with torch.inference_mode(False), torch.no_grad(), wall.denoiser.open_denoiser(patched) as denoiser:
        found = denoiser.denoise(x, sigma, [conditioning], {})
    change = (trained - plain).norm()
    assert change > 0 and (found - trained).norm() < 2e-3 * change + 1e-5 * plain.norm()
