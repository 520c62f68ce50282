"""Losses and weights against the formulas of the papers and of kohya's trainer, in float64."""

import pytest
import torch
from graft_nodes.training.draws import generator
from graft_nodes.training.objective import ObjectiveSettings, check_for, losses, noise_like, shares, step_weights


def _example(seed=0, batch=6):
    draws = torch.Generator().manual_seed(seed)
    clean, noise, out = (torch.randn(batch, 4, 5, 5, generator=draws, dtype=torch.float64) for _ in range(3))
    return clean, noise, out, torch.rand(batch, generator=draws, dtype=torch.float64) * 10 + 0.05


def _view(sigma):
    return sigma.view(-1, 1, 1, 1)


def test_eps_loss_is_that_of_the_noise():
    clean, noise, out, sigma = _example()
    x = clean + _view(sigma) * noise
    denoised = x - _view(sigma) * out
    expected = (out - noise).square().flatten(1).mean(1)
    found = losses(ObjectiveSettings(), "eps", denoised, clean, sigma)
    assert torch.allclose(found.double(), expected, rtol=1e-4)


def test_v_loss_is_that_of_the_velocity():
    clean, noise, out, sigma = _example()
    alpha = 1 / (sigma**2 + 1).sqrt()
    s = sigma * alpha
    noised = _view(alpha) * clean + _view(s) * noise  # variance preserving
    velocity = _view(alpha) * noise - _view(s) * clean
    denoised = _view(alpha) * noised - _view(s) * out
    expected = (out - velocity).square().flatten(1).mean(1)
    assert torch.allclose(losses(ObjectiveSettings(), "v", denoised, clean, sigma).double(), expected, rtol=1e-4)


def test_flow_loss_is_that_of_the_flow():
    clean, noise, out, _ = _example()
    sigma = torch.rand(6, dtype=torch.float64) * 0.99 + 0.005
    x = (1 - _view(sigma)) * clean + _view(sigma) * noise
    expected = (out - (noise - clean)).square().flatten(1).mean(1)
    found = losses(ObjectiveSettings(), "flow", x - _view(sigma) * out, clean, sigma)
    assert torch.allclose(found.double(), expected, rtol=1e-3)


def test_x0_loss_is_plain():
    clean, _, out, sigma = _example()
    found = losses(ObjectiveSettings(loss="x0-mse"), "eps", out, clean, sigma)
    assert torch.allclose(found.double(), (out - clean).square().flatten(1).mean(1), rtol=1e-5)


@pytest.mark.parametrize(("loss", "factor"), [("huber", 2 * 0.1), ("smooth-l1", 2.0)])
def test_huber_losses_are_kohyas(loss, factor):
    clean, noise, out, sigma = _example()
    x = clean + _view(sigma) * noise
    c = 0.1
    expected = (factor * (((out - noise) ** 2 + c**2).sqrt() - c)).flatten(1).mean(1)
    found = losses(ObjectiveSettings(loss=loss), "eps", x - _view(sigma) * out, clean, sigma)
    assert torch.allclose(found.double(), expected, rtol=1e-4)


@pytest.mark.parametrize("gamma", [1.0, 5.0, 20.0])
@pytest.mark.parametrize("prediction", ["eps", "v"])
def test_min_snr_is_the_papers(prediction, gamma):
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    bar = torch.cumprod(1 - betas, 0)
    snr = bar / (1 - bar)  # kohya's apply_snr_weight: min(snr, gamma) / snr, for v / (snr + 1)
    expected = torch.minimum(snr, torch.full_like(snr, gamma)) / (snr + (prediction == "v"))
    found = step_weights(ObjectiveSettings(weighting="min-snr", gamma=gamma), prediction, ((1 - bar) / bar).sqrt())
    assert torch.allclose(found, expected, rtol=1e-6)


def test_min_snr_without_signal_is_finite():
    sigma = torch.tensor([4.5e3, 1e9, float("inf")])
    for prediction, limit in (("eps", 1.0), ("v", 0.0)):
        found = step_weights(ObjectiveSettings(weighting="min-snr"), prediction, sigma)
        assert torch.isfinite(found).all() and torch.allclose(found[1:], torch.full((2,), limit), atol=1e-6)


@pytest.mark.parametrize("prediction", ["eps", "v"])
def test_debiased_is_kohyas(prediction):
    sigma = torch.logspace(-3, 2, 50, dtype=torch.float64)
    snr = torch.minimum(sigma**-2, torch.tensor(1000.0, dtype=torch.float64))
    expected = 1 / (snr + 1) if prediction == "v" else 1 / snr.sqrt()
    assert torch.allclose(step_weights(ObjectiveSettings(weighting="debiased"), prediction, sigma), expected)


def test_timesteps_have_their_distributions():
    def draw(**settings):
        return shares(ObjectiveSettings(**settings), 20000, generator(0, 0, "test"))

    grid = torch.linspace(0.05, 0.95, 19)
    uniform, normal, shifted = draw(), draw(timesteps="logit-normal"), draw(timesteps="shifted", shift=3.0)
    for found in (uniform, normal, shifted):
        assert found.min() >= 0 and found.max() < 1
    assert torch.allclose(torch.stack([(uniform < g).float().mean() for g in grid]), grid, atol=0.02)
    expected = torch.distributions.Normal(0, 1).cdf(torch.logit(grid))
    assert torch.allclose(torch.stack([(normal < g).float().mean() for g in grid]), expected, atol=0.02)
    assert torch.allclose(torch.stack([(shifted < g).float().mean() for g in grid]), grid / (3 - 2 * grid), atol=0.02)


def test_noise_is_normal_offset_and_pyramid():
    latents = torch.zeros(64, 4, 32, 32)

    def draw(**settings):
        return noise_like(ObjectiveSettings(**settings), latents, generator(0, 0, "test"))

    plain, offset, pyramid = draw(), draw(offset_noise=0.5), draw(pyramid_noise=0.7)
    assert plain.std() == pytest.approx(1.0, abs=0.01)
    added = offset - plain
    assert torch.allclose(added, added[:, :, :1, :1].expand_as(added), atol=1e-5)
    assert added[:, :, 0, 0].std() == pytest.approx(0.5, abs=0.06)
    assert pyramid.std() == pytest.approx(1.0, abs=1e-4)
    low = torch.nn.functional.avg_pool2d(pyramid, 8).std() / torch.nn.functional.avg_pool2d(plain, 8).std()
    assert low > 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "scheduled-huber"}, "scheduled-huber is not available in this version"),
        ({"ip_noise": 0.1, "zero_terminal_snr": True}, "ip_noise.*zero_terminal_snr"),
        ({"prior": "output-preservation"}, "output-preservation is not available.*use regularisation"),
        ({"loss": "x0-mse", "weighting": "min-snr"}, "with loss x0-mse use none"),
        ({"pyramid_noise": 1.0}, "pyramid_noise is 1.0"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        ObjectiveSettings(**settings)


def test_settings_that_the_model_cannot_have():
    with pytest.raises(ValueError, match="flow models lack"):
        check_for(ObjectiveSettings(weighting="min-snr"), "flow")
    with pytest.raises(ValueError, match="training knows eps, v and flow"):
        check_for(ObjectiveSettings(), "EDM")
