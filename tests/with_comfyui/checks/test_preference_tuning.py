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
from graft_nodes.training.state import Settings, Start, begin
from graft_nodes.training.trainable.settings import AdapterSettings
from slopes import slope_along
from tiny_families import FAMILIES

BETA = 30.0
OBJECTIVE = ObjectiveSettings(loss="dpo", beta=BETA, conditioning_dropout=0.0)


def _pairs(name):
    """Two pairs with one caption each."""
    captions = {text: Conditioning(*conditions(name, seed)) for seed, text in enumerate(("", "a", "b"))}
    made = Dataset.from_latents([latent(name, seed) for seed in range(2)], ["a", "b"], captions)
    paired = [
        replace(image, worse=WorsePicture(latent(name, 5 + number).float())) for number, image in enumerate(made.images)
    ]
    return replace(made, images=tuple(paired))


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
            denoiser = stack.enter_context(wall.denoiser.denoiser(self.patcher))
            work = stack.enter_context(contextlib.closing(workspace.Workspace(self.state, denoiser, self.dataset)))
            stack.enter_context(work.installed())
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
        with work.plain():
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
