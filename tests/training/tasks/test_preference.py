"""Preference tuning through whole steps: the losses by hand in float64, validation, resume, and what is refused."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
from graft_nodes.tests.training.run.test_validation import MEANS, put_on
from graft_nodes.training.data.dataset import WorsePicture
from graft_nodes.training.objective.settings import ObjectiveSettings
from graft_nodes.training.random_draws import generator as seeded_generator
from graft_nodes.training.reports import text
from graft_nodes.training.run import call as runs
from graft_nodes.training.run.batch_loader import BatchSchedule
from graft_nodes.training.run.loop import Callbacks, train
from graft_nodes.training.run.step import backward_, batch_losses
from graft_nodes.training.run.workspace import Workspace
from graft_nodes.training.state import equal
from graft_nodes.training.store.store import Store
from graft_nodes.training.trainable.settings import AdapterSettings

BETA = 50.0
DPO = ObjectiveSettings(loss="dpo", beta=BETA, conditioning_dropout=0.0)
ADAPTERS = {"lora": AdapterSettings(targets="all", rank=2), "full": AdapterSettings("full", targets="all")}


def _with_pairs(dataset, seed=5):
    """The dataset with a worse picture for each image."""
    draws = torch.Generator().manual_seed(seed)

    def paired(images):
        return tuple(
            replace(image, worse=WorsePicture(image.latent + torch.randn(image.latent.shape, generator=draws)))
            for image in images
        )

    return replace(dataset, images=paired(dataset.images), held_out=paired(dataset.held_out), digest="d" * 64)


def _modules(lab, weights):
    """(the network with trained weights, the network as it was), in float64."""
    reference = copy.deepcopy(lab.Flow().module).double()
    trained = copy.deepcopy(reference)
    put_on(trained, weights)
    return trained, reference


def _error(module, latents, level, noise, contexts):
    """The mean squared error of the velocity of each picture."""
    clean = latents.double() * 0.5
    with torch.no_grad():
        velocity = module((1 - level) * clean + level * noise, contexts)
    return (velocity - (noise - clean)).square().flatten(1).mean(1)


def _loss_by_hand(modules, better, worse, level, noise, contexts):
    """(losses of the pairs, whether the better picture gained more)."""
    differences = []
    for module in modules:
        of_better, of_worse = (_error(module, latents, level, noise, contexts) for latents in (better, worse))
        differences.append(of_better - of_worse)
    inside = -BETA / 2 * (differences[0] - differences[1])
    return torch.log1p(torch.exp(-inside)), inside > 0


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_steps_loss_is_that_of_the_formula_with_one_noise_and_level_for_both(lab, kind):
    dataset = _with_pairs(lab.pictures(8))
    start = lab.state(lab.Flow(), dataset, ADAPTERS[kind], objective=DPO)
    for step in (0, 5):
        before = train(start, lab.Flow(), dataset, step)
        found = train(before, lab.Flow(), dataset, 1).history.loss[-1]
        (batch,) = BatchSchedule.from_state(before, dataset).batches(step, 0)
        draws = seeded_generator(start.start.seed, step, "noise part 0")
        level = torch.rand(4, generator=draws).clamp(min=1e-3).double().view(4, 1, 1, 1)
        noise = torch.randn(batch.latents.shape, generator=draws).double()
        contexts = torch.tensor([MEANS[caption] for caption in batch.captions]).double().view(4, 1, 1, 1)
        modules = _modules(lab, before.trained)
        expected, _ = _loss_by_hand(modules, batch.latents, batch.worse, level, noise, contexts)
        assert found == pytest.approx(float(expected.mean()), rel=1e-4)
        if step == 0:
            assert found == pytest.approx(math.log(2), rel=1e-6)
        else:
            assert abs(found - math.log(2)) > 1e-3


@pytest.mark.parametrize("kind", ADAPTERS)
def test_held_out_pairs_are_measured_by_the_same_loss_and_by_their_accuracy(lab, kind):
    dataset = _with_pairs(lab.pictures(11, held_out=[0, 4, 5]))
    start = lab.state(lab.Flow(), dataset, ADAPTERS[kind], objective=DPO)
    trained = train(start, lab.Flow(), dataset, 6, Callbacks(validate_every=3))
    assert trained.history.accuracy[0] == (0, 0.5) and trained.history.validation[0][1] == pytest.approx(math.log(2))
    means, right = [], []
    modules = _modules(lab, trained.trained)
    for number, image in enumerate(dataset.held_out):
        draws = seeded_generator(start.start.seed, number, "validation")
        level = ((torch.arange(4) + torch.rand((), generator=draws)) / 4).clamp(min=1e-3).double().view(4, 1, 1, 1)
        noise = torch.randn((4, *image.latent.shape), generator=draws).double()
        contexts = torch.full((4, 1, 1, 1), MEANS[image.caption]).double()
        better, worse = (latent.expand(4, -1, -1, -1) for latent in (image.latent, image.worse.latent))
        losses, is_right = _loss_by_hand(modules, better, worse, level, noise, contexts)
        means.append(losses.mean())
        right.append(is_right.double().mean())
    assert trained.history.validation[-1] == (6, pytest.approx(float(torch.stack(means).mean()), rel=1e-4))
    assert trained.history.accuracy[-1] == (6, pytest.approx(float(torch.stack(right).mean())))


def test_training_raises_the_accuracy_on_the_pairs_that_it_sees(lab):
    dataset = _with_pairs(lab.pictures(8))
    dataset = replace(dataset, held_out=dataset.images)
    start = lab.state(lab.Flow(), dataset, objective=DPO, learning_rate=3e-2, total_steps=60)
    history = train(start, lab.Flow(), dataset, 60, Callbacks(validate_every=60)).history
    assert history.accuracy[0][1] == 0.5 and history.accuracy[-1][1] >= 0.9
    assert history.validation[-1][1] < 0.7 * history.validation[0][1]


@pytest.mark.parametrize("settings", [{}, {"ip_noise": 0.1}, {"offset_noise": 0.1, "pyramid_noise": 0.3}])
def test_two_calls_are_one_and_the_state_has_the_bytes(lab, settings):
    dataset = _with_pairs(lab.pictures(7, held_out=[6]))
    start = lab.state(lab.Flow(), dataset, objective=replace(DPO, **settings), accumulation=2)
    callbacks = Callbacks(validate_every=1)
    whole = train(start, lab.Flow(), dataset, 5, callbacks)
    parts = train(train(start, lab.Flow(), dataset, 2, callbacks), lab.Flow(), dataset, 3, callbacks)
    assert equal(whole, parts) and whole.history == parts.history


def test_every_pair_of_a_step_counts_the_same(lab):
    """Of seven pairs, four are in the first micro-batch and three in the second."""
    dataset, denoiser = _with_pairs(lab.pictures(7)), lab.Flow()
    work = Workspace(lab.state(denoiser, dataset, objective=DPO, accumulation=2), denoiser, dataset)
    with work.install():
        loss = backward_(work)
        accumulated = {name: tensor.grad.clone() for name, tensor in work.trained.items()}
        each = []
        for part in range(2):
            (batch,) = work.loader.take(0, part)
            generator = seeded_generator(work.start_state.start.seed, 0, f"noise part {part}")
            each.append(batch_losses(work, batch, generator, {}))
        mean = torch.cat(each).mean()
        grads = torch.autograd.grad(mean, list(work.trained.values()))
    assert [len(losses) for losses in each] == [4, 3]
    assert loss == pytest.approx(float(mean.detach()), rel=1e-5)
    for (name, gradient), expected in zip(accumulated.items(), grads, strict=True):
        assert torch.allclose(gradient, expected, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_it_trains_in_half_precision(lab, precision):
    dataset = _with_pairs(lab.pictures(8))
    state = train(lab.state(lab.Flow(), dataset, objective=DPO, precision=precision), lab.Flow(), dataset, 3)
    assert state.step == 3 and all(torch.isfinite(tensor).all() for tensor in state.trained.values())


def test_a_stored_result_is_taken_again_with_its_accuracy(lab, tmp_path):
    dataset = _with_pairs(lab.pictures(8, held_out=[3]))
    start = lab.state(lab.Flow(), dataset, objective=DPO)

    def called(denoiser):
        opened = runs.run(start, 4, lambda: _Opened(denoiser), dataset, Store(tmp_path, "run"), CALLBACKS)
        return opened.state, opened

    first, outcome = called(lab.Flow())
    again = lab.Flow()
    second, _ = called(again)
    assert equal(first, second) and first.history == second.history and not again.calls
    recorded = json.loads((outcome.folder / "state.json").read_text())["history"]["accuracy"]
    assert [step for step, _ in recorded] == [0, 2, 4]
    report = text.step(start, outcome, ())
    assert f"implicit accuracy on held-out pairs 50% at step 0, {first.history.accuracy[-1][1]:.0%} at 4" in report
    other = replace(start, settings=replace(start.settings, objective=replace(DPO, beta=2 * BETA)))
    assert other.settings.digest != start.settings.digest


CALLBACKS = Callbacks(validate_every=2)


class _Opened:
    def __init__(self, denoiser):
        self.denoiser = denoiser

    def __enter__(self):
        return self.denoiser

    def __exit__(self, *_):
        return None


def test_images_without_a_worse_picture_are_named(lab):
    paired = _with_pairs(lab.pictures(6))
    dataset = replace(paired, images=(*paired.images[:4], *(replace(image, worse=None) for image in paired.images[4:])))
    with pytest.raises(ValueError, match=r"dpo learns from pairs, and 2 of 6 images have no worse picture: 4, 5"):
        train(lab.state(lab.Flow(), dataset, objective=DPO), lab.Flow(), dataset, 1)


def test_other_losses_train_on_the_better_pictures_alone(lab):
    plain = replace(lab.pictures(6), digest="d" * 64)
    paired = _with_pairs(lab.pictures(6))
    first, second = (train(lab.state(lab.Flow(), given), lab.Flow(), given, 3) for given in (plain, paired))
    assert equal(first, second)


def test_the_model_is_left_as_it_was(lab):
    dataset, denoiser = _with_pairs(lab.pictures(6)), lab.Flow()
    before = {name: tensor.clone() for name, tensor in denoiser.module.state_dict().items()}
    train(lab.state(denoiser, dataset, ADAPTERS["full"], objective=DPO), denoiser, dataset, 2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in denoiser.module.state_dict().items())
    assert not [module for module in denoiser.module.modules() if module._forward_hooks]
