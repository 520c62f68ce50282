"""Objectives that need more than one forward or another schedule: output preservation, masks and perturbed inputs
through a whole step.
"""

from dataclasses import replace

import pytest
import torch
from graft_nodes.training.objective.noise import LAST_SIGNAL
from graft_nodes.training.objective.settings import ObjectiveSettings
from graft_nodes.training.run.batch_loader import BatchLoader
from graft_nodes.training.run.loop import train
from graft_nodes.training.run.step import advance_, backward_
from graft_nodes.training.run.workspace import Workspace
from graft_nodes.training.state import equal
from graft_nodes.training.tasks import denoising
from graft_nodes.training.trainable.settings import AdapterSettings


def _with_regularization(lab, share=0.5):
    return lab.pictures(6, regularization=lab.pictures(4, seed=9), regularization_share=share)


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_target_of_regularization_pictures_is_the_bases_own_prediction(lab, kind, checkpointing, monkeypatch):
    """With a base that already predicts regularization pictures as it did, their loss is 0 at the start and grows as
    others train.
    """
    denoiser, dataset = lab.Flow(), _with_regularization(lab)
    objective = ObjectiveSettings(prior="output-preservation", prior_weight=2.0)
    adapter = AdapterSettings(kind, targets="all", rank=2)
    state = lab.state(denoiser, dataset, adapter, objective=objective, checkpointing=checkpointing)
    seen = []

    def noting(settings, prediction, denoised, target, sigma, mask=None, parts=()):
        seen.append((denoised.detach().clone(), target.clone()))
        return losses(settings, prediction, denoised, target, sigma, mask, parts)

    losses = denoising.losses
    monkeypatch.setattr(denoising, "losses", noting)
    work = Workspace(state, denoiser, dataset)
    with work.install():
        backward_(work)
        denoised, target = seen[0]
        close = (denoised - target).flatten(1).abs().amax(1) < 1e-6
        assert close.tolist() == [False, False, True, True]  # nothing is trained yet: the two predictions are one
        for _ in range(3):
            advance_(work)
        seen.clear()
        backward_(work)
        assert all(
            tensor.grad is not None for tensor in work.trained.values()
        )  # the trained tensors are installed again
    denoised, target = seen[0]
    x = (denoised - target).flatten(1).abs().amax(1)
    assert (x > 1e-6).all()
    assert not [module for module in denoiser.module.modules() if module._forward_hooks]


def test_a_preserved_model_drifts_less_where_it_is_preserved(lab):
    denoiser, dataset = lab.Flow(), _with_regularization(lab)
    found = {}
    for name, prior, weight in (("none", "regularization", 0.0), ("kept", "output-preservation", 20.0)):
        state = lab.state(
            denoiser, dataset, objective=ObjectiveSettings(prior=prior, prior_weight=weight), learning_rate=2e-2
        )
        after = train(state, denoiser, dataset, 25)
        work = Workspace(after, denoiser, dataset)
        draws, drift = torch.Generator().manual_seed(5), 0.0
        with work.install(), torch.no_grad():
            for picture in dataset.regularization.images:
                x, sigma = picture.latent[None] + torch.randn(1, 4, 6, 6, generator=draws), torch.tensor([0.5])
                conditionings = [dataset.conditionings[picture.caption]]
                now = denoiser.denoise(x, sigma, conditionings, {})
                with work.switch_off_trained():
                    before = denoiser.denoise(x, sigma, conditionings, {})
                drift += float((now - before).square().mean())
        found[name] = drift
    assert found["kept"] < 0.5 * found["none"]


@pytest.mark.parametrize(
    "objective", [{"ip_noise": 0.2}, {"loss": "scheduled-huber"}, {"prior": "output-preservation"}]
)
def test_each_changes_the_bytes_and_two_calls_are_one(lab, objective):
    denoiser, dataset = lab.Flow(), _with_regularization(lab)
    plain = train(lab.state(denoiser, dataset), denoiser, dataset, 4)
    start = lab.state(denoiser, dataset, objective=ObjectiveSettings(**objective))
    whole, parts = train(start, denoiser, dataset, 4), train(train(start, denoiser, dataset, 1), denoiser, dataset, 3)
    assert equal(whole, parts) and not torch.equal(
        whole.trained["blocks.0.ff.lora_up.weight"], plain.trained["blocks.0.ff.lora_up.weight"]
    )


@pytest.mark.parametrize("prior", ["regularization", "output-preservation"])
def test_a_prior_without_pictures_is_refused(lab, prior):
    denoiser, dataset = lab.Flow(), lab.pictures()
    state = lab.state(denoiser, dataset, objective=ObjectiveSettings(prior=prior))
    with pytest.raises(ValueError, match=f"prior preservation {prior} needs a regularization dataset"):
        train(state, denoiser, dataset, 1)


def test_places_without_mask_do_not_train(lab, monkeypatch):
    denoiser, dataset = lab.Flow(), lab.pictures()
    taken = BatchLoader.take
    monkeypatch.setattr(
        BatchLoader, "take", lambda *a: [replace(b, mask=torch.zeros(len(b.latents), 1, 6, 6)) for b in taken(*a)]
    )
    work = Workspace(lab.state(denoiser, dataset), denoiser, dataset)
    with work.install():
        assert backward_(work) == 0.0
        assert all(not tensor.grad.any() for tensor in work.trained.values())


def test_zero_terminal_snr_needs_levels_without_signal(lab):
    class V(lab.Flow):
        prediction, last = "v", 14.6

        def sigma(self, u):
            return 0.03 + u * self.last

    denoiser, dataset = V(), lab.pictures()
    state = lab.state(denoiser, dataset, objective=ObjectiveSettings(zero_terminal_snr=True))
    with pytest.raises(ValueError, match="end with signal"):
        train(state, denoiser, dataset, 1)
    denoiser.last = LAST_SIGNAL**-0.5
    assert train(state, denoiser, dataset, 1).step == 1
