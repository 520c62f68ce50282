"""Targets of distilled models: the authors' formulas in float64, whole steps by hand, and what does not go together."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from graft_nodes.tests.training.run.test_validation import MEANS, put_on
from graft_nodes.training.data.dataset import Conditioning, SampleConditioning
from graft_nodes.training.objective.guidance import TARGETS, move_target, remove_guidance
from graft_nodes.training.objective.loss import losses
from graft_nodes.training.objective.settings import ObjectiveSettings
from graft_nodes.training.random_draws import generator as seeded_generator
from graft_nodes.training.run.batch_loader import BatchSchedule
from graft_nodes.training.run.loop import Callbacks, train
from graft_nodes.training.run.step import batch_losses
from graft_nodes.training.run.workspace import Workspace
from graft_nodes.training.state import equal
from graft_nodes.training.trainable.settings import AdapterSettings

SCALE = 2.5
GUIDED = [one for one in TARGETS if one != "plain"]
ADAPTERS = {"lora": AdapterSettings(targets="all", rank=2), "full": AdapterSettings("full", targets="all")}


def authors_mse(target, prediction, wanted, without):
    """The mean squared errors (B,) of the authors' code, on the model's own prediction.

    ostris/ai-toolkit moves what is wanted, without gradients; tdrussell/diffusion-pipe divides the guidance out of the
    prediction.
    """
    if target == "differential":
        wanted = prediction.detach() + SCALE * (wanted - prediction.detach())
    if target == "cfg-augmented":
        prediction = (prediction + (SCALE - 1) * without) / SCALE
    return (prediction - wanted).square().flatten(1).mean(1)


@pytest.mark.parametrize("target", GUIDED)
@pytest.mark.parametrize("kind", ["eps", "v", "flow"])
def test_loss_and_gradient_are_those_of_the_authors_formula(target, kind):
    draws = torch.Generator().manual_seed(4)
    clean, noise, out, empty = (torch.randn(5, 4, 6, 6, generator=draws, dtype=torch.float64) for _ in range(4))
    sigma = torch.rand(5, generator=draws, dtype=torch.float64) * 0.9 + 0.05
    s = sigma.view(-1, 1, 1, 1)
    if kind == "flow":
        x, wanted = (1 - s) * clean + s * noise, noise - clean
    elif kind == "eps":
        x, wanted = clean + s * noise, noise
    else:
        alpha = (1 + s**2) ** -0.5
        x, wanted = alpha * (clean + s * noise), alpha * noise - alpha * s * clean

    def denoised_of(prediction):
        return alpha * x - alpha * s * prediction if kind == "v" else x - s * prediction

    expected_out, found_out = (out.clone().requires_grad_() for _ in range(2))
    expected = authors_mse(target, expected_out, wanted, empty)
    denoised, goal = denoised_of(found_out), clean
    if target == "differential":
        goal = move_target(denoised, clean, SCALE)
    else:
        denoised = remove_guidance(denoised, denoised_of(empty), SCALE)
    found = losses(ObjectiveSettings(), kind, denoised, goal, sigma)
    assert torch.allclose(found, expected, rtol=1e-9)
    expected.sum().backward()
    found.sum().backward()
    assert torch.allclose(found_out.grad, expected_out.grad, rtol=1e-8, atol=1e-12)


def velocities(module, latents, level, noise, contexts):
    """(the velocity, what it should be, that of the empty prompt) of a float64 network, for latents of a dataset."""
    clean = latents.double() * 0.5
    x = (1 - level) * clean + level * noise
    with torch.no_grad():
        return module(x, contexts), noise - clean, module(x, torch.zeros_like(contexts))


@pytest.mark.parametrize("target", GUIDED)
@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_steps_loss_is_that_of_the_formula_by_hand(lab, target, kind):
    dataset = lab.pictures(8)
    objective = ObjectiveSettings(target=target, target_scale=SCALE, conditioning_dropout=0.0)
    start = lab.state(lab.Flow(), dataset, ADAPTERS[kind], objective=objective)
    for step in (0, 5):
        before = train(start, lab.Flow(), dataset, step)
        denoiser = lab.Flow()
        found = train(before, denoiser, dataset, 1).history.loss[-1]
        assert denoiser.calls == (2 if target == "cfg-augmented" else 1)
        (batch,) = BatchSchedule.from_state(before, dataset).batches(step, 0)
        draws = seeded_generator(start.start.seed, step, "noise part 0")
        level = torch.rand(4, generator=draws).clamp(min=1e-3).double().view(4, 1, 1, 1)
        noise = torch.randn(batch.latents.shape, generator=draws).double()
        contexts = torch.tensor([MEANS[caption] for caption in batch.captions]).double().view(4, 1, 1, 1)
        module = copy.deepcopy(lab.Flow().module).double()
        put_on(module, before.trained)
        expected = authors_mse(target, *velocities(module, batch.latents, level, noise, contexts))
        assert found == pytest.approx(float(expected.mean()), rel=1e-4)


@pytest.mark.parametrize("target", GUIDED)
def test_a_validation_measures_the_same_error(lab, target):
    dataset = lab.pictures(9, held_out=[0])
    objective = ObjectiveSettings(target=target, target_scale=SCALE)
    trained = train(
        lab.state(lab.Flow(), dataset, objective=objective), lab.Flow(), dataset, 3, Callbacks(validate_every=3)
    )
    draws = seeded_generator(trained.start.seed, 0, "validation")
    level = ((torch.arange(4) + torch.rand((), generator=draws)) / 4).clamp(min=1e-3).double().view(4, 1, 1, 1)
    (image,) = dataset.held_out
    noise = torch.randn((4, *image.latent.shape), generator=draws).double()
    contexts = torch.full((4, 1, 1, 1), MEANS[image.caption]).double()
    module = copy.deepcopy(lab.Flow().module).double()
    put_on(module, trained.trained)
    latents = image.latent.expand(4, -1, -1, -1)
    expected = authors_mse(target, *velocities(module, latents, level, noise, contexts))
    assert trained.history.validation[-1] == (3, pytest.approx(float(expected.mean()), rel=1e-4))


@pytest.mark.parametrize("target", GUIDED)
def test_a_held_prediction_stays_what_it_was(lab, target):
    """Before the first step a regularization picture has no error, whatever the target is, and all others have one."""
    dataset = replace(lab.pictures(8), regularization=lab.pictures(8, seed=7), regularization_share=0.5)
    objective = ObjectiveSettings(target=target, prior="output-preservation", conditioning_dropout=0.0)
    denoiser = lab.Flow()
    work = Workspace(lab.state(denoiser, dataset, objective=objective), denoiser, dataset)
    with work.install():
        (batch,) = work.loader.take(0, 0)
        found = batch_losses(work, batch, seeded_generator(0, 0, "noise"), {})
    assert 0 < batch.is_regularization.sum() < len(found)
    assert (found[batch.is_regularization] < 1e-9).all() and (found[~batch.is_regularization] > 0.01).all()


@pytest.mark.parametrize("target", GUIDED)
def test_scale_1_is_the_plain_target(lab, target):
    dataset = lab.pictures(8)
    found = []
    for objective in (ObjectiveSettings(target=target, target_scale=1.0), ObjectiveSettings()):
        start = lab.state(lab.Flow(), dataset, objective=objective)
        found.append(train(start, lab.Flow(), dataset, 4).trained)
    for name, tensor in found[0].items():
        assert torch.allclose(tensor, found[1][name], atol=1e-6), name


@pytest.mark.parametrize("settings", [{"target": "differential"}, {"target": "cfg-augmented"}, {"noise_candidates": 4}])
@pytest.mark.parametrize("workers", [0, 2])
def test_two_calls_are_one_and_the_state_has_the_bytes(lab, settings, workers):
    dataset = lab.pictures(7, held_out=[6], workers=workers)
    start = lab.state(lab.Flow(), dataset, objective=ObjectiveSettings(**settings), accumulation=2)
    whole = train(start, lab.Flow(), dataset, 5, Callbacks(validate_every=1))
    parts = train(start, lab.Flow(), dataset, 2, Callbacks(validate_every=1))
    parts = train(parts, lab.Flow(), dataset, 3, Callbacks(validate_every=1))
    assert equal(whole, parts) and whole.history == parts.history


def test_samples_without_an_empty_prompt_are_refused_by_name(lab):
    dataset = lab.pictures(4)
    own = SampleConditioning(Conditioning(torch.zeros(1, 1, 1)))
    lacking = replace(dataset, images=(*dataset.images[:3], replace(dataset.images[3], brought=own)))
    start = lab.state(lab.Flow(), lacking, objective=ObjectiveSettings(target="cfg-augmented"))
    with pytest.raises(ValueError, match=f"1 of 4 samples lack: {dataset.images[3].name}. Connect CLIP"):
        train(start, lab.Flow(), lacking, 1)


@pytest.mark.parametrize(("other", "remedy"), [({"target": GUIDED[0]}, "plain"), ({"noise_candidates": 2}, "1")])
def test_pairs_are_refused(other, remedy):
    with pytest.raises(ValueError, match=f"loss function dpo .*set (it|noise candidates) to {remedy}"):
        ObjectiveSettings(loss="dpo", **other)


def test_its_settings_are_in_the_identity():
    plain = json.dumps(ObjectiveSettings().identity())
    for other in ({"target": "differential"}, {"target_scale": 4.0}, {"noise_candidates": 2}):
        assert json.dumps(ObjectiveSettings(**other).identity()) != plain
