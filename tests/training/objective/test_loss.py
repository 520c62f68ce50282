"""Losses and weights against the formulas of the papers and of kohya's trainer, in float64."""

import math

import numpy as np
import pytest
import torch
from diffusers.schedulers.scheduling_ddim import rescale_zero_terminal_snr
from graft_nodes.training.objective.loss import losses, step_weights
from graft_nodes.training.objective.noise import PYRAMIDS, nearest, noise_like, perturbation, zero_terminal
from graft_nodes.training.objective.settings import ObjectiveSettings, check_for
from graft_nodes.training.objective.timesteps import draw_timesteps
from graft_nodes.training.random_draws import generator


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
    assert torch.allclose(found, expected, rtol=1e-9)


def test_v_loss_is_that_of_the_velocity():
    clean, noise, out, sigma = _example()
    alpha = 1 / (sigma**2 + 1).sqrt()
    s = sigma * alpha
    noised = _view(alpha) * clean + _view(s) * noise  # variance preserving
    velocity = _view(alpha) * noise - _view(s) * clean
    denoised = _view(alpha) * noised - _view(s) * out
    expected = (out - velocity).square().flatten(1).mean(1)
    assert torch.allclose(losses(ObjectiveSettings(), "v", denoised, clean, sigma), expected, rtol=1e-9)


def test_flow_loss_is_that_of_the_flow():
    clean, noise, out, _ = _example()
    sigma = torch.rand(6, dtype=torch.float64) * 0.99 + 0.005
    x = (1 - _view(sigma)) * clean + _view(sigma) * noise
    expected = (out - (noise - clean)).square().flatten(1).mean(1)
    found = losses(ObjectiveSettings(), "flow", x - _view(sigma) * out, clean, sigma)
    assert torch.allclose(found, expected, rtol=1e-9)


def test_x0_loss_is_plain():
    clean, _, out, sigma = _example()
    found = losses(ObjectiveSettings(loss="x0-mse"), "eps", out, clean, sigma)
    assert torch.allclose(found, (out - clean).square().flatten(1).mean(1), rtol=1e-9)


@pytest.mark.parametrize(("loss", "factor"), [("huber", 2 * 0.1), ("smooth-l1", 2.0)])
def test_huber_losses_are_kohyas(loss, factor):
    clean, noise, out, sigma = _example()
    x = clean + _view(sigma) * noise
    c = 0.1
    expected = (factor * (((out - noise) ** 2 + c**2).sqrt() - c)).flatten(1).mean(1)
    found = losses(ObjectiveSettings(loss=loss), "eps", x - _view(sigma) * out, clean, sigma)
    assert torch.allclose(found, expected, rtol=1e-9)


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


# Some of the thousand weights that AI-Toolkit measured, by their place: 0 is timestep 1000, pure noise, 999 is 1.
AI_TOOLKITS = {
    3: 0.939913,
    35: 1.297278,
    110: 1.511606,
    160: 1.497992,
    260: 1.337487,
    360: 1.153855,
    410: 1.065447,
    510: 0.911384,
    610: 0.795454,
    660: 0.754654,
    760: 0.714136,
    860: 0.73143,
    910: 0.700794,
    970: 0.509819,
}


def test_weighted_is_ai_toolkits():
    settings = ObjectiveSettings(weighting="ai-toolkit weighted")
    sigma = torch.tensor([(1000 - place) / 1000 for place in AI_TOOLKITS], dtype=torch.float64)
    expected = torch.tensor(list(AI_TOOLKITS.values()), dtype=torch.float64)
    assert torch.allclose(step_weights(settings, "flow", sigma), expected, rtol=0.0055, atol=0)
    all_levels = torch.linspace(0.001, 1.0, 1000, dtype=torch.float64)
    assert float(step_weights(settings, "flow", all_levels).mean()) == pytest.approx(1.0, abs=1e-3)
    ends = step_weights(settings, "flow", torch.tensor([0.0, 1.0]))
    assert torch.allclose(ends, torch.tensor([0.44726, 0.905707]), rtol=1e-4)


@pytest.mark.parametrize("prediction", ["eps", "v"])
def test_weighted_is_for_flow_models(prediction):
    settings = ObjectiveSettings(weighting="ai-toolkit weighted")
    check_for(settings, "flow")
    with pytest.raises(ValueError, match="loss weighting ai-toolkit weighted is for flow models, and this model"):
        check_for(settings, prediction)


def test_timesteps_have_their_distributions():
    def draw(**settings):
        return draw_timesteps(ObjectiveSettings(**settings), 20000, generator(0, 0, "test"))

    grid = torch.linspace(0.05, 0.95, 19)
    uniform, normal, shifted = draw(), draw(timesteps="logit-normal"), draw(timesteps="shifted", shift=3.0)
    for found in (uniform, normal, shifted):
        assert found.min() >= 0 and found.max() < 1
    assert torch.allclose(torch.stack([(uniform < g).float().mean() for g in grid]), grid, atol=0.02)
    expected = torch.distributions.Normal(0, 1).cdf(torch.logit(grid))
    assert torch.allclose(torch.stack([(normal < g).float().mean() for g in grid]), expected, atol=0.02)
    assert torch.allclose(torch.stack([(shifted < g).float().mean() for g in grid]), grid / (3 - 2 * grid), atol=0.02)
    narrow = draw(timesteps="logit-normal", min_timestep=0.25, max_timestep=0.75)
    assert torch.allclose(narrow, 0.25 + 0.5 * normal) and narrow.min() >= 0.25 and narrow.max() < 0.75
    assert torch.equal(draw(min_timestep=0.0, max_timestep=1.0), uniform)


def _levels(steps=1000):
    """Rising noise levels of Stable Diffusion's schedule, its alpha-bar and its betas."""
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, steps, dtype=torch.float64) ** 2
    bar = torch.cumprod(1 - betas, 0)
    return ((1 - bar) / bar).sqrt(), bar, betas


@pytest.mark.parametrize("prediction", ["eps", "v", "flow"])
def test_scheduled_huber_is_kohyas(prediction):
    clean, noise, out, _ = _example()
    c, steps = 0.1, torch.tensor([3, 120, 400, 640, 850, 999])
    table, bar, _ = _levels()
    view = _view
    if prediction == "flow":  # huber_schedule exponential
        sigma = steps.double() / 1000
        delta = torch.exp(-(-math.log(c) / 1000) * steps.double())
        x, target = (1 - view(sigma)) * clean + view(sigma) * noise, noise - clean
        denoised = x - view(sigma) * out
    else:  # huber_schedule snr
        sigma, bar = table[steps], bar[steps]
        delta = (1 - c) / (1 + ((1 - bar) / bar) ** 0.5) ** 2 + c
        x, target = clean + view(sigma) * noise, noise
        denoised = x - view(sigma) * out
        if prediction == "v":
            alpha, s = bar.sqrt(), (1 - bar).sqrt()
            x = view(alpha) * clean + view(s) * noise
            target, denoised = view(alpha) * noise - view(s) * clean, view(alpha) * x - view(s) * out
    expected = (2 * view(delta) * (((out - target) ** 2 + view(delta) ** 2).sqrt() - view(delta))).flatten(1).mean(1)
    found = losses(ObjectiveSettings(loss="scheduled-huber"), prediction, denoised, clean, sigma)
    assert torch.allclose(found, expected, rtol=1e-8)


@pytest.mark.parametrize("size", [5, 40])
def test_masked_loss_is_kohyas(size):
    clean, noise, out, sigma = _example()
    mask = torch.rand(6, 1, size, size, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    fitted = torch.nn.functional.interpolate(mask, size=(5, 5), mode="area")
    expected = ((out - noise).square() * fitted).mean([1, 2, 3])
    found = losses(ObjectiveSettings(), "eps", clean + _view(sigma) * (noise - out), clean, sigma, mask)
    assert torch.allclose(found, expected, rtol=1e-9)
    frames = losses(ObjectiveSettings(), "eps", out[:, :, None], clean[:, :, None], sigma, mask)
    assert torch.allclose(frames, losses(ObjectiveSettings(), "eps", out, clean, sigma, mask))


@pytest.mark.parametrize("prediction", ["eps", "v", "flow"])
def test_input_perturbation_leaves_the_networks_own_target_as_it_was(prediction):
    """kohya: the noisy latents are made with noise + gamma * noise', the target with noise."""
    clean, noise, out, sigma = _example()
    extra = 0.1 * torch.randn(clean.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    s = _view(sigma)
    if prediction == "flow":
        s = s / 11
        denoised, expected = (1 - s) * clean + s * (noise + extra) - s * out, out - (noise - clean)
    elif prediction == "eps":
        denoised, expected = clean + s * (noise + extra) - s * out, out - noise
    else:
        bar = 1 / (1 + s**2)
        x = bar.sqrt() * clean + (1 - bar).sqrt() * (noise + extra)
        denoised = bar.sqrt() * x - (1 - bar).sqrt() * out
        expected = out - (bar.sqrt() * noise - (1 - bar).sqrt() * clean)
    level = s.flatten()
    target = clean + _view(perturbation(prediction, level)) * extra
    found = losses(ObjectiveSettings(), prediction, denoised, target, level)
    assert torch.allclose(found, expected.square().flatten(1).mean(1), rtol=1e-8)


def test_zero_terminal_snr_is_diffusers():
    sigmas, _, betas = _levels()
    expected = torch.cumprod(1 - rescale_zero_terminal_snr(betas), 0)
    found = zero_terminal(sigmas)
    assert torch.allclose((1 + found[:-1] ** 2) ** -1, expected[:-1], rtol=1e-9) and expected[-1] == 0
    assert (
        found[0] == pytest.approx(float(sigmas[0]), rel=1e-9)
        and 1 / (1 + found[-1] ** 2) < 1e-7
        and (found.diff() > 0).all()
    )
    assert torch.equal(zero_terminal(found), found)


def test_offset_noise_is_kohyas():
    draws = generator(0, 0, "test")
    noise = torch.randn(3, 4, 6, 7, generator=draws)
    expected = noise + 0.3 * torch.randn((3, 4, 1, 1), generator=draws)
    assert torch.equal(noise_like(torch.zeros(3, 4, 6, 7), 0.3, 0.0, generator(0, 0, "test")), expected)


def test_pyramid_noise_of_sound_gets_coarser_over_time_alone():
    """Each channel by itself: the formula in numpy, whose interpolation counts from the middle of each place."""
    draws = generator(0, 0, "test")
    expected = torch.randn(2, 5, 40, generator=draws).double().numpy()
    places = np.arange(40) + 0.5
    for level in range(6):
        length = max(1, int(40 / (float(torch.rand((), generator=draws)) * 2 + 2) ** level))
        coarse = torch.randn(2, 5, length, generator=draws).double().numpy()
        at = (np.arange(length) + 0.5) * 40 / length
        for row in np.ndindex(2, 5):
            expected[row] += np.interp(places, at, coarse[row]) * 0.7**level
        if length == 1:
            break
    expected = torch.from_numpy(expected / expected.std(ddof=1))
    found = noise_like(torch.zeros(2, 5, 40), 0.0, 0.7, generator(0, 0, "test"))
    assert level > 1 and torch.allclose(found.double(), expected, atol=1e-5)


def test_offset_noise_of_sound_is_one_number_for_each_channel():
    draws = generator(0, 0, "test")
    expected = torch.randn(3, 4, 20, generator=draws)
    expected = expected + 0.3 * torch.randn((3, 4, 1), generator=draws)
    assert torch.equal(noise_like(torch.zeros(3, 4, 20), 0.3, 0.0, generator(0, 0, "test")), expected)


@pytest.mark.parametrize("shape", [(2, 4, 64, 48), (2, 4, 3, 3), (2, 3, 2, 16, 16)])
def test_pyramid_noise_is_kohyas(shape):
    draws = generator(0, 0, "test")
    noise = torch.randn(shape, generator=draws).flatten(1, -3)
    w, h = noise.shape[2:]  # kohya's names
    up = torch.nn.Upsample(size=(w, h), mode="bilinear")
    for i in range(6):
        r = float(torch.rand((), generator=draws)) * 2 + 2
        wn, hn = max(1, int(w / (r**i))), max(1, int(h / (r**i)))
        noise += up(torch.randn(2, noise.shape[1], wn, hn, generator=draws)) * 0.7**i
        if wn == 1 or hn == 1:
            break
    found = noise_like(torch.zeros(shape), 0.0, 0.7, generator(0, 0, "test"))
    assert torch.allclose(found, (noise / noise.std()).view(shape), atol=1e-6)


def everydream2_pyramid(shape, discount, draws):
    """Each layer's sides come from the layer before, as `pyramid_noise_like` of its train.py has it."""
    noise = torch.randn(shape, generator=draws)
    sides = list(shape[2:])
    up = torch.nn.Upsample(size=tuple(sides), mode="bilinear")
    for i in range(10):
        r = float(torch.rand((), generator=draws)) * 2 + 2
        sides = [max(1, int(side / r**i)) for side in sides]
        noise += up(torch.randn(*shape[:2], *sides, generator=draws)) * discount**i
        if 1 in sides:
            break
    return noise / noise.std()


@pytest.mark.parametrize("shape", [(2, 4, 64, 48), (2, 4, 3, 3), (1, 4, 300, 200)])
def test_pyramid_noise_is_everydream2s(shape):
    found = noise_like(torch.zeros(shape), 0.0, 0.7, generator(0, 0, "test"), pyramid_kind="everydream2")
    assert torch.allclose(found, everydream2_pyramid(shape, 0.7, generator(0, 0, "test")), atol=1e-6)


def test_the_kinds_of_pyramid_noise_have_other_shares_of_low_frequencies():
    """The variance of the means of 8 x 8 places, which is 1/64 of plain noise, at a discount of 0.4: EveryDream2's gets
    coarse in fewer layers, so more of it is coarse.
    """
    found = {}
    for kind in PYRAMIDS:
        noise = noise_like(torch.zeros(400, 4, 64, 64), 0.0, 0.4, generator(0, 0, "test"), pyramid_kind=kind)
        found[kind] = float(torch.nn.functional.avg_pool2d(noise, 8).var())
    assert 1 / 64 < found["kohya"] < 0.95 * found["everydream2"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"offset_noise": -1.0}, "-1, expected from 0 to 1.*is zero terminal SNR: switch that on"),
        ({"loss": "l1", "prior": "yes"}, "loss function is 'l1'.*prior preservation is 'yes'"),
        ({"ip_noise": -0.1}, "input perturbation is -0.1"),
        ({"loss": "x0-mse", "weighting": "min-snr"}, "with loss function x0-mse use none"),
        ({"pyramid_noise": 1.0}, "pyramid noise discount is 1.0"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        ObjectiveSettings(**settings)


def test_settings_that_the_model_cannot_have():
    with pytest.raises(ValueError, match="flow models lack"):
        check_for(ObjectiveSettings(weighting="min-snr"), "flow")
    for prediction, reason in (
        ("eps", "predicts eps: at a level without signal"),
        ("flow", "begins at pure noise already"),
    ):
        with pytest.raises(ValueError, match=reason):
            check_for(ObjectiveSettings(zero_terminal_snr=True), prediction)
    check_for(ObjectiveSettings(zero_terminal_snr=True), "v")
    with pytest.raises(ValueError, match="training knows eps, v and flow"):
        check_for(ObjectiveSettings(), "EDM")


def test_the_nearest_noise_is_ai_toolkits():
    """Its loop over each image by itself, with strictly less as the comparison, on the same draws."""
    draws = torch.Generator().manual_seed(2)
    latents = torch.randn(6, 4, 5, 5, generator=draws)
    tries = [torch.randn(6, 4, 5, 5, generator=draws) for _ in range(7)]
    tries.append(tries[2].clone())  # as near as an earlier one, which stays
    expected = []
    for number, image in enumerate(latents):
        best, lowest = None, math.inf
        for noise in tries:
            loss = torch.nn.functional.mse_loss(image, noise[number])
            if loss < lowest:
                best, lowest = noise[number], loss
        expected.append(best)
    found = tries[0]
    for other in tries[1:]:
        found = nearest(latents, found, other)
    assert torch.equal(found, torch.stack(expected))
