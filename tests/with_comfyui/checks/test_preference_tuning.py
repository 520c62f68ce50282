"""Preference tuning on tiny models of ComfyUI's own classes: a step's gradients are those of finite differences of the
loss, which is computed here from the host's own forward, and the model is left as it was.
"""

import contextlib
import copy
import math
from dataclasses import replace

import comfy.supported_models
import pytest
import torch
from families import build, conditions, latent, random
from graft_nodes import host as wall
from graft_nodes.training.data.dataset import Conditioning, Dataset, WorsePicture
from graft_nodes.training.objective.settings import ObjectiveSettings
from graft_nodes.training.optimizers.settings import OptimizerSettings
from graft_nodes.training.run import step as steps
from graft_nodes.training.run import workspace
from graft_nodes.training.state import Settings, Start, begin, equal
from graft_nodes.training.trainable.settings import AdapterSettings
from slopes import slope_along
from tiny_families import FAMILIES

BETA = 30.0
OBJECTIVE = ObjectiveSettings(loss="dpo", beta=BETA, conditioning_dropout=0.0)


def _pairs(name, held_out=()):
    """Two pairs with one caption each, and held-out ones of the first caption."""
    captions = {text: Conditioning(*conditions(name, seed)) for seed, text in enumerate(("", "a", "b"))}
    texts = ["a", "b", *("a" for _ in held_out)]
    latents = [latent(name, seed) for seed in range(len(texts))]
    made = Dataset.from_latents(latents, texts, captions, held_out=list(held_out))

    def paired(images):
        worse = (WorsePicture(latent(name, 5 + int(image.name)).float()) for image in images)
        return tuple(replace(image, worse=other) for image, other in zip(images, worse, strict=True))

    return replace(made, images=paired(made.images), held_out=paired(made.held_out))


def _state(patcher, dataset, kind):
    """A state whose adapters already do something."""
    adapter = AdapterSettings(kind, rank=2, targets="attention+ff")
    settings = Settings(OptimizerSettings(batch_size=2, precision="float32"), OBJECTIVE)
    network = patcher.model.diffusion_model
    base = {name: p.detach().clone() for name, p in network.named_parameters()}
    state = begin(network, Start("model", dataset.digest, adapter, None, 3), settings, base=lambda: base)
    draws = torch.Generator().manual_seed(4)
    moved = {name: t + 0.03 * torch.randn(t.shape, generator=draws) for name, t in state.trained.items()}
    return replace(state, trained=moved)


class Made:
    """A tiny model, its pairs, and a state on it."""

    def __init__(self, name, kind):
        self.patcher, self.dataset = build(name), _pairs(name)
        self.state = _state(self.patcher, self.dataset, kind)

    @contextlib.contextmanager
    def work(self):
        """A workspace of the state whose adapters are on the model."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            denoiser = stack.enter_context(wall.denoiser.open_denoiser(self.patcher))
            work = stack.enter_context(contextlib.closing(workspace.Workspace(self.state, denoiser, self.dataset)))
            stack.enter_context(work.install())
            yield work


def _loss(work, batch, worse=None):
    given = batch if worse is None else replace(batch, worse=worse)
    return steps.batch_losses(work, given, torch.Generator().manual_seed(0), {})


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_those_of_finite_differences(name, kind):
    if not hasattr(comfy.supported_models, FAMILIES[name].supported):
        pytest.skip(f"this ComfyUI has no {FAMILIES[name].supported}")
    made = Made(name, kind)
    before = copy.deepcopy(made.patcher.model.diffusion_model.state_dict())
    with made.work() as work:
        (batch,) = work.loader.take(0, 0)
        loss = _loss(work, batch)
        assert loss.shape == (2,) and float(loss.detach().sum()) != pytest.approx(2 * math.log(2), abs=1e-5)
        loss.double().sum().backward()
        _check_slopes(work, batch)
        _check_against_the_formula(work, batch)
    after = made.patcher.model.diffusion_model.state_dict()
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())


def _check_slopes(work, batch):
    """Along the gradient of all trained tensors."""
    gradients = {key: t.grad.clone() for key, t in work.trained.items() if t.grad is not None}
    assert gradients
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    sizes = torch.stack([work.trained[key].detach().norm() for key in gradients]).norm()
    length = min(0.002 * float(sizes), 0.02 / float(norm))  # near enough to be straight, far enough to be no rounding
    ways = {key: gradient / norm * length for key, gradient in gradients.items()}
    along = sum(float((gradient * ways[key]).sum()) for key, gradient in gradients.items())

    def loss():
        with torch.no_grad():
            return _loss(work, batch).double().sum()

    assert along == pytest.approx(slope_along(work.trained, ways, loss, (1.0, 0.5)), rel=3e-2)


def _check_against_the_formula(work, batch):
    """The loss from four calls of the host's own forward: better and worse, trained and as it was."""
    denoiser = work.denoiser
    draws = torch.Generator().manual_seed(0)
    share = torch.rand(2, generator=draws).clamp(0.0, 1 - 2**-24)
    sigma = denoiser.sigma(share)
    better = denoiser.process_in(batch.latents)
    noise = torch.randn(better.shape, generator=draws)

    def error(latents):
        clean = denoiser.process_in(latents)
        found = denoiser.denoise(denoiser.noisy(clean, noise, sigma), sigma, batch.conditionings, {})
        scale = 1 / sigma
        if denoiser.prediction == "v":
            scale = (1 + sigma**-2).sqrt()
        wide = (found - clean).double() * scale.double().view(-1, *[1] * (clean.ndim - 1))
        return wide.square().flatten(1).mean(1)

    with torch.no_grad():
        trained = error(batch.latents) - error(batch.worse)
        with work.switch_off_trained():
            reference = error(batch.latents) - error(batch.worse)
        expected = torch.log1p(torch.exp(BETA / 2 * (trained - reference)))
        assert torch.allclose(_loss(work, batch).double(), expected, rtol=1e-3, atol=1e-4)


def test_other_draws_for_the_worse_picture_do_not_come_in():
    """A pair of one picture twice has the loss of a coin whatever is trained."""
    with Made("sd1", "lora").work() as work:
        (batch,) = work.loader.take(0, 0)
        same = _loss(work, batch, batch.latents).detach()
        other = _loss(work, batch, batch.latents + random(*batch.latents.shape, seed=8)).detach()
    assert torch.allclose(same, torch.full((2,), math.log(2)), rtol=0, atol=1e-6)
    assert not torch.allclose(same, other, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["sd1", "flux"])
def test_two_calls_are_one_and_held_out_pairs_are_measured(host, name):
    data = _pairs(name, held_out=[2])
    (objective,) = host.call("GraftObjective", loss="dpo", beta=BETA, conditioning_dropout=0.0)
    (adapter,) = host.call("GraftAdapter", rank=2)
    (optimizer,) = host.call("GraftOptimizer", learning_rate=1e-2, batch_size=2, total_steps=4, precision="float32")
    given = {"model": build(name), "dataset": data, "adapter": adapter, "optimizer": optimizer}
    state, _ = host.call("GraftTrainStart", **given, objective=objective, run=f"preferred {name}")
    whole = host.call("TrainStep", state=state, steps=2, validate_every=1)[0]
    half = host.call("TrainStep", state=state, steps=1, validate_every=1)[0]
    parts = host.call("TrainStep", state=half, steps=1, validate_every=1)[0]
    assert equal(whole, parts) and whole.history == parts.history
    assert all(torch.equal(tensor, parts.trained[key]) for key, tensor in whole.trained.items())
    assert all(torch.equal(tensor, parts.optimizer[key]) for key, tensor in whole.optimizer.items())
    (begun, first), *_, (_, last) = whole.history.validation
    assert (begun, first) == (0, pytest.approx(math.log(2), rel=1e-6)) and last != first
    assert whole.history.accuracy[0] == (0, 0.5) and [step for step, _ in whole.history.accuracy] == [0, 1, 2]
