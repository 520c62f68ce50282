"""Timestep samplings against kohya's scripts and AI-Toolkit, written out, on the same draws; noise levels with and
without the model's own shift.
"""

import math
from dataclasses import replace

import pytest
import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from graft_nodes.training.objective.settings import ObjectiveSettings, check_for
from graft_nodes.training.objective.timesteps import describe_levels, draw_levels, draw_timesteps, tokens_of
from graft_nodes.training.run.loop import train
from graft_nodes.training.state import equal

COUNT, TOKENS = 4000, tokens_of((16, 96, 160))


def _drawn(tokens=TOKENS, **settings):
    return draw_timesteps(ObjectiveSettings(**settings), COUNT, torch.Generator().manual_seed(3), tokens).double()


def _normal():
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(3)).double()


def _uniform():
    return torch.rand(COUNT, generator=torch.Generator().manual_seed(3)).double()


def _time_shift(mu, t):
    """sd-scripts' flux_train_utils.time_shift with sigma 1."""
    return math.exp(mu) / (math.exp(mu) + (1 / t - 1))


def _mode(scale):
    """compute_density_for_timestep_sampling of diffusers and sd-scripts."""
    u = _uniform()
    return 1 - u - scale * (torch.cos(math.pi * u / 2) ** 2 - 1 + u)


KOHYAS = {
    "sigmoid": ({"sigmoid_scale": 0.7}, lambda: torch.sigmoid(0.7 * _normal())),
    "shift": (
        {"sigmoid_scale": 1.3, "shift": 3.1582},
        lambda: (torch.sigmoid(1.3 * _normal()) * 3.1582) / (1 + 2.1582 * torch.sigmoid(1.3 * _normal())),
    ),
    "flux_shift": (
        {"sigmoid_scale": 0.9},
        lambda: _time_shift((1.15 - 0.5) / (4096 - 256) * (TOKENS - 256) + 0.5, torch.sigmoid(0.9 * _normal())),
    ),
    "logit-normal": ({"logit_mean": 0.4, "logit_std": 0.6}, lambda: torch.sigmoid(0.4 + 0.6 * _normal())),
    "mode": ({"mode_scale": 1.29}, lambda: _mode(1.29)),
    "uniform": ({}, _uniform),
}


@pytest.mark.parametrize(
    "settings", [{"timesteps": "sigmoid", "sigmoid_scale": 100.0}, {"timesteps": "logit-normal", "logit_std": 10.0}]
)
def test_no_share_is_the_whole_schedule(settings):
    """A sigmoid of 40 is 1 in float32: the share becomes the number before 1."""
    u = draw_timesteps(ObjectiveSettings(**settings), COUNT, torch.Generator().manual_seed(3))
    assert u.dtype == torch.float32 and u.max() == torch.nextafter(torch.tensor(1.0), torch.tensor(0.0))


@pytest.mark.parametrize("name", KOHYAS)
def test_what_is_drawn_is_kohyas_on_the_same_numbers(name):
    settings, expected = KOHYAS[name]
    assert torch.allclose(_drawn(timesteps=name, **settings), expected().clamp(0, 1), atol=2e-6)


def _ai_toolkits_table(shift=None):
    """The thousand timesteps that CustomFlowMatchEulerDiscreteScheduler.set_train_timesteps draws from, as sigmas: even
    ones, moved by a shift that its configuration has or by the size of the image (TOKENS).
    """
    sigma_min = 0.001
    if shift is not None:  # without dynamic shifting diffusers' own constructor has moved the last one already
        sigma_min = shift * sigma_min / (1 + (shift - 1) * sigma_min)
    even = torch.linspace(1.0, sigma_min, 1000, dtype=torch.float64)
    if shift is not None:
        return even, shift * even / (1 + (shift - 1) * even)
    slope = (1.15 - 0.5) / (4096 - 256)
    return even, _time_shift(TOKENS * slope + 0.5 - slope * 256, even)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("uniform", {"model_shift": False}),  # linear
        ("ai-toolkit shift", {"shift": 3.0}),
        ("ai-toolkit shift", {"shift": 6.0}),  # lumina2_shift
        ("ai-toolkit flux_shift", {}),
    ],
    ids=["linear", "shift", "lumina2_shift", "flux_shift"],
)
def test_what_is_drawn_lies_where_ai_toolkits_timesteps_do_on_the_same_numbers(name, settings):
    """AI-Toolkit takes one of a thousand: the neighbors of each number in its table bound what is drawn here."""
    found, u = _drawn(timesteps=name, **settings), _uniform()
    even, table = (
        _ai_toolkits_table() if name.endswith("flux_shift") else _ai_toolkits_table(settings.get("shift", 1.0))
    )
    above = 1000 - torch.searchsorted(even.flip(0), u)  # the first one that is below
    at_end = above == 1000
    assert at_end.sum() < 40 and (found[at_end] <= table[-1] + 1e-6).all()
    after = above[~at_end]
    assert (found[~at_end] >= table[after] - 1e-6).all() and (found[~at_end] <= table[after - 1] + 1e-6).all()
    assert float((table[after - 1] - table[after]).max()) < 0.006


@pytest.mark.parametrize("shift", [None, 3.0, 6.0])
def test_the_table_is_the_one_of_diffusers_from_which_ai_toolkit_takes_it(shift):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift or 1.0, use_dynamic_shifting=shift is None)
    mu = 0.5 + (scheduler.config.max_shift - 0.5) * (TOKENS - 256) / (4096 - 256)
    scheduler.set_timesteps(1000, mu=mu if shift is None else None)
    _, table = _ai_toolkits_table(shift)
    assert torch.allclose(scheduler.sigmas[:-1].double(), table, atol=2e-7)


def test_ai_toolkits_sigmoid_is_kohyas_on_the_other_sign():
    assert torch.allclose(_drawn(timesteps="sigmoid"), 1 - torch.sigmoid(-_normal()), atol=2e-6)


def test_kohyas_and_ai_toolkits_flux_shift_differ():
    kohyas, ai_toolkits = (_drawn(timesteps=name) for name in ("flux_shift", "ai-toolkit flux_shift"))
    assert kohyas.std() < 0.8 * ai_toolkits.std() and (ai_toolkits < 0.1).sum() > 5 * (kohyas < 0.1).sum()


def test_logit_normal_without_settings_is_what_stored_runs_drew():
    drawn = draw_timesteps(ObjectiveSettings(timesteps="logit-normal"), COUNT, torch.Generator().manual_seed(3))
    assert torch.equal(drawn, torch.randn(COUNT, generator=torch.Generator().manual_seed(3)).sigmoid())


def test_tokens_are_counted_in_a_frame_and_over_time_of_sound():
    assert tokens_of((16, 9, 13)) == tokens_of((16, 5, 9, 13)) == 24
    assert tokens_of((64, 31)) == 31


def test_flux_shift_is_noisier_for_larger_images():
    small, large = (_drawn(tokens_of((16, side, side)), timesteps="flux_shift").median() for side in (32, 128))
    assert small == pytest.approx(1 / (1 + math.exp(-0.5)), abs=0.02)
    assert large == pytest.approx(1 / (1 + math.exp(-1.15)), abs=0.02)


class Shifted:
    """The lab's flow model with a shift of its own, as SD 3's; keeps the noise levels that it is trained at."""

    def __init__(self, denoiser):
        self._denoiser, self.levels = denoiser, []

    def __getattr__(self, name):
        return getattr(self._denoiser, name)

    def sigma(self, u):
        return 3 * u / (1 + 2 * u)

    def denoise(self, x, sigma, conditionings, options):
        self.levels += sigma.tolist()
        return self._denoiser.denoise(x, sigma, conditionings, options)


@pytest.mark.parametrize(
    ("settings", "least", "most"),
    [
        ({"min_timestep": 0.5}, 0.75, 1.0),  # of the schedule
        ({"min_timestep": 0.5, "max_timestep": 0.6, "model_shift": False}, 0.5, 0.6),
        ({"timesteps": "sigmoid", "min_timestep": 0.5, "max_timestep": 0.6}, 0.5, 0.6),
        ({"timesteps": "flux_shift", "max_timestep": 0.1}, 0.0, 0.1),
        ({"min_timestep": 0.5, "sigma_bounds": True}, 0.5, 1.0),
        ({"min_timestep": 0.2, "max_timestep": 0.3, "sigma_bounds": True}, 0.2, 0.3),
        ({"timesteps": "sigmoid", "min_timestep": 0.5, "max_timestep": 0.6, "sigma_bounds": True}, 0.5, 0.6),
    ],
    ids=str,
)
def test_minimum_and_maximum_bound_the_noise_levels(lab, settings, least, most):
    denoiser, dataset = Shifted(lab.Flow()), lab.pictures()
    train(lab.state(denoiser, dataset, objective=ObjectiveSettings(**settings)), denoiser, dataset, 6)
    assert len(denoiser.levels) > 12 and min(denoiser.levels) >= least and max(denoiser.levels) <= most


def test_the_report_says_which_noise_levels_a_flow_model_is_trained_at():
    def sigma(u):
        return 3 * u / (1 + 2 * u)

    assert (
        "timestep sampling uniform, on top of the model's own shift: half of the noise levels (sigma) are above 0.75"
        in (describe_levels(ObjectiveSettings(), sigma, TOKENS))
    )
    without = describe_levels(ObjectiveSettings(model_shift=False), sigma, TOKENS)
    assert "without the model's own shift" in without and "are above 0.50, 90% of them from 0.05 to 0.95" in without
    assert "timestep sampling sigmoid, without" in describe_levels(
        ObjectiveSettings(timesteps="sigmoid"), sigma, TOKENS
    )


@pytest.mark.parametrize("prediction", ["eps", "v"])
@pytest.mark.parametrize("name", ["sigmoid", "shift", "flux_shift", "ai-toolkit shift", "ai-toolkit flux_shift"])
def test_what_draws_noise_levels_is_for_flow_models(prediction, name):
    check_for(ObjectiveSettings(timesteps=name), "flow")
    with pytest.raises(ValueError, match=f"timestep sampling {name} draws the noise levels of flow models"):
        check_for(ObjectiveSettings(timesteps=name), prediction)
    with pytest.raises(ValueError, match="only flow models have a shift of their own"):
        check_for(ObjectiveSettings(model_shift=False), prediction)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sigmoid_scale": 0.0}, "sigmoid scale is 0.0, expected from 0.01"),
        ({"weighting": "min-snr", "gamma": math.nan}, "min-SNR gamma is nan, expected a number"),
        ({"logit_std": -1.0}, "logit deviation is -1.0, expected from 0.01"),
        ({"logit_mean": math.inf}, "logit mean is inf"),
        ({"mode_scale": 2.0}, "mode scale is 2.0, expected from -1.0 to 1.75"),
        ({"mode_scale": -1.01}, r"mode scale is -1\.01, expected from -1\.0 to 1\.75"),
    ],
)
def test_wrong_numbers_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        ObjectiveSettings(**settings)


@pytest.mark.parametrize("mode_scale", [-1.0, 0.5, 1.75])
def test_bounds_of_the_mode_scale_are_allowed_themselves(mode_scale):
    assert ObjectiveSettings(mode_scale=mode_scale).mode_scale == mode_scale


def test_a_run_with_new_settings_resumes(lab):
    denoiser, dataset = lab.Flow(), lab.pictures()
    start = lab.state(denoiser, dataset, objective=ObjectiveSettings(timesteps="flux_shift", model_shift=False))
    whole = train(start, denoiser, dataset, 3)
    assert equal(whole, train(train(start, denoiser, dataset, 1), denoiser, dataset, 2))


def _sd3(u):
    return 3 * u / (1 + 2 * u)


@pytest.mark.parametrize("name", ["uniform", "logit-normal"])
def test_bounds_in_sigma_keep_the_shape_between_them(name):
    """The distribution is squeezed between the timesteps of the bounds, which invert SD 3's shift."""
    settings = ObjectiveSettings(timesteps=name, min_timestep=0.3, max_timestep=0.8, sigma_bounds=True)
    found = draw_levels(settings, COUNT, torch.Generator().manual_seed(3), TOKENS, _sd3).double()
    u = _uniform() if name == "uniform" else _normal().sigmoid()
    least, most = (sigma / (3 - 2 * sigma) for sigma in (0.3, 0.8))
    assert torch.allclose(found, _sd3(least + (most - least) * u), atol=1e-6)
    assert float(found.min()) >= 0.3 and float(found.max()) <= float(torch.tensor(0.8))


def test_bounds_in_sigma_are_part_of_a_runs_identity():
    plain = ObjectiveSettings(min_timestep=0.3)
    assert replace(plain, sigma_bounds=True).identity() != plain.identity()
    same = (draw_levels(one, 50, torch.Generator().manual_seed(3), TOKENS, _sd3) for one in _without_bounds())
    assert torch.equal(*same)


def _without_bounds():
    return ObjectiveSettings(), ObjectiveSettings(sigma_bounds=True)


def test_bounds_without_noise_levels_between_them_are_refused():
    settings = ObjectiveSettings(min_timestep=0.9, sigma_bounds=True)
    with pytest.raises(
        ValueError, match=r"no noise levels \(sigma\) from minimum timestep 0\.9 .* its highest is 0\.5"
    ):
        draw_levels(settings, 1, torch.Generator(), TOKENS, lambda u: u / 2)
    with pytest.raises(ValueError, match="bounds are sigmas is for flow models"):
        check_for(settings, "eps")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"min_timestep": 0.5}, "none below 0.75 (minimum timestep 0.5) or above 1 (maximum timestep 1)"),
        ({"max_timestep": 0.5, "sigma_bounds": True}, "none below 0 (minimum timestep 0) or above 0.5 (maximum"),
        ({"max_timestep": 0.5, "timesteps": "sigmoid"}, "none below 0 (minimum timestep 0) or above 0.5 (maximum"),
    ],
    ids=str,
)
def test_the_report_gives_both_bounds_as_sigmas(settings, said):
    assert said in describe_levels(ObjectiveSettings(**settings), _sd3, TOKENS)
    assert "none below" not in describe_levels(ObjectiveSettings(), _sd3, TOKENS)
