"""The loss of preference pairs, against the two published scripts' formulas in float64."""

import math

import pytest
import torch
from graft_nodes.training.objective.loss import losses
from graft_nodes.training.objective.preference import implicit_accuracy, margins, pair_losses
from graft_nodes.training.objective.settings import ObjectiveSettings

BETA = 3000.0


def _predictions(seed=0, pairs=5):
    """(prediction, reference's prediction, target) of better and worse pictures, in float64."""
    draws = torch.Generator().manual_seed(seed)
    target = torch.randn(2 * pairs, 4, 6, 6, generator=draws, dtype=torch.float64)
    reference = target + 0.3 * torch.randn(target.shape, generator=draws, dtype=torch.float64)
    prediction = reference + 0.01 * torch.randn(target.shape, generator=draws, dtype=torch.float64)
    return prediction, reference, target


def _authors(prediction, reference, target, beta):
    """SalesforceAIResearch's train.py: losses by mean, and -0.5 * beta inside."""
    of_model = (prediction - target).pow(2).mean(dim=[1, 2, 3])
    of_reference = (reference - target).pow(2).mean(dim=[1, 2, 3])
    half = len(target) // 2
    model_difference = of_model[:half] - of_model[half:]
    reference_difference = of_reference[:half] - of_reference[half:]
    return torch.log1p(torch.exp(0.5 * beta * (model_difference - reference_difference)))


def _diffusers(prediction, reference, target, beta_dpo):
    """train_diffusion_dpo.py of diffusers: the same without the half."""
    of_model = torch.nn.functional.mse_loss(prediction, target, reduction="none").flatten(1).mean(1)
    of_reference = torch.nn.functional.mse_loss(reference, target, reduction="none").flatten(1).mean(1)
    better, worse = of_model.chunk(2)
    reference_better, reference_worse = of_reference.chunk(2)
    logits = (reference_better - reference_worse) - (better - worse)
    return -torch.log(torch.sigmoid(beta_dpo * logits)), logits


@pytest.mark.parametrize("seed", range(4))
def test_the_loss_is_that_of_both_scripts(seed):
    prediction, reference, target = _predictions(seed)
    settings = ObjectiveSettings(loss="dpo", beta=BETA)
    sigma = torch.linspace(0.2, 0.9, len(target), dtype=torch.float64)
    scale = sigma.view(-1, 1, 1, 1)
    clean = torch.zeros_like(target)  # so that denoised latents are minus sigma times the prediction's error
    errors, of_reference = (
        losses(settings, "flow", -scale * (given - target), clean, sigma) for given in (prediction, reference)
    )
    found = margins(errors, of_reference)
    assert torch.allclose(pair_losses(BETA, found), _authors(prediction, reference, target, BETA), rtol=1e-9)
    expected, logits = _diffusers(prediction, reference, target, BETA / 2)
    assert torch.allclose(pair_losses(BETA, found), expected, rtol=1e-9)
    assert torch.allclose(found, logits, rtol=1e-7, atol=1e-15)
    assert float(implicit_accuracy(errors, of_reference)) == pytest.approx(float((logits > 0).double().mean()))


def test_a_model_that_is_as_it_was_has_the_loss_of_a_coin_and_half_the_accuracy():
    prediction, *_ = _predictions()
    errors = prediction.square().flatten(1).mean(1)
    same = margins(errors, errors)
    assert torch.equal(pair_losses(BETA, same), torch.full((5,), math.log(2), dtype=torch.float64))
    assert float(implicit_accuracy(errors, errors)) == 0.5
    assert float(implicit_accuracy(errors * (1 + 1e-7), errors)) == 0.5, "rounding is not a preference"


def test_less_error_of_the_better_picture_and_more_of_the_worse_one_lower_the_loss():
    errors = torch.tensor([0.2, 0.3], dtype=torch.float64, requires_grad=True)
    loss = pair_losses(BETA, margins(errors, errors.detach()))
    (gradient,) = torch.autograd.grad(loss.sum(), errors)
    assert torch.allclose(gradient, torch.tensor([BETA / 4, -BETA / 4], dtype=torch.float64))


def test_far_pairs_have_finite_losses_and_gradients():
    far = torch.tensor([-1.0, 1.0], requires_grad=True)
    loss = pair_losses(1e5, far)
    (gradient,) = torch.autograd.grad(loss.sum(), far)
    assert loss.tolist() == [50_000.0, 0.0] and gradient.tolist() == [-50_000.0, 0.0]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"beta": 0.0}, "DPO beta is 0.0, expected from 0.01"),
        ({"beta": math.inf}, "DPO beta is inf"),
        ({"loss": "dpo", "prior": "regularization"}, "set prior preservation to none"),
        ({"loss": "dpo", "prior": "output-preservation"}, "set prior preservation to none"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        ObjectiveSettings(**settings)
