"""The contract of every loss, loss weighting and timestep sampling; one of each is made up and trained with."""

import importlib.util
import textwrap
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from graft_nodes.training.lora_metadata import lora_metadata
from graft_nodes.training.objective.loss import losses, step_weights
from graft_nodes.training.objective.loss_kinds import LOSSES, LossKind
from graft_nodes.training.objective.settings import ObjectiveSettings, check_for
from graft_nodes.training.objective.timesteps import TIMESTEPS, TimestepSampling, draw_timesteps
from graft_nodes.training.objective.weightings import WEIGHTINGS, LossWeighting
from graft_nodes.training.run.loop import train
from graft_nodes.training.state import equal

CONTRIBUTING = Path(__file__).parents[3] / "CONTRIBUTING.md"
SIGMA = torch.tensor([0.05, 0.3, 0.6, 0.95])


def _example():
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(4, 4, 5, 5, generator=generator) for _ in range(2))


@pytest.mark.parametrize("name", LOSSES.names())
@pytest.mark.parametrize("prediction", ["eps", "v", "flow"])
def test_every_loss_is_finite_one_an_image_and_zero_without_error(name, prediction):
    denoised, target = _example()
    settings = ObjectiveSettings(loss=name)
    found = losses(settings, prediction, denoised, target, SIGMA)
    assert found.shape == (4,) and found.dtype == torch.float32 and torch.isfinite(found).all() and (found > 0).all()
    assert not losses(settings, prediction, target, target, SIGMA).any() and LOSSES.get(name).kohya_name


@pytest.mark.parametrize("name", WEIGHTINGS.names())
@pytest.mark.parametrize("prediction", ["eps", "v"])
def test_every_weighting_is_finite_and_never_negative(name, prediction):
    weights = step_weights(ObjectiveSettings(weighting=name), prediction, SIGMA)
    assert weights.shape == (4,) and torch.isfinite(weights).all() and (weights >= 0).all()
    assert all(key.startswith("ss_") for key in WEIGHTINGS.get(name).metadata(5.0))


@pytest.mark.parametrize("gamma", [1.0, 5.0])
@pytest.mark.parametrize("prediction", ["eps", "v"])
def test_the_weighting_that_contributing_shows_is_min_snr_without_its_corner(tmp_path, prediction, gamma):
    """a b / (a + b) is from half of min(a, b) to all of it; far from the corner it is all of it."""
    recipe = CONTRIBUTING.read_text(encoding="utf-8").partition("### Add a loss weighting")[2]
    code = textwrap.dedent(recipe.partition("```python\n")[2].partition("```")[0])
    imports = "from torch import Tensor\nfrom graft_nodes.training.objective.weightings import _snr\n"
    file = tmp_path / "shown.py"
    file.write_text(imports + code, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("shown", file)
    shown = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shown)
    sigma = torch.logspace(-2, 3, 50, dtype=torch.float64)
    soft = shown._soft_min_snr(sigma, prediction, gamma)
    hard = step_weights(ObjectiveSettings(weighting="min-snr", gamma=gamma), prediction, sigma)
    assert (soft <= hard * (1 + 1e-6)).all() and (soft >= hard / 2 * (1 - 1e-6)).all()
    torch.testing.assert_close(soft[[0, -1]], hard[[0, -1]], rtol=1e-3, atol=0)


@pytest.mark.parametrize("weighting", list(WEIGHTINGS), ids=lambda record: record.name)
def test_a_weighting_by_snr_is_refused_where_there_is_none(weighting):
    settings = ObjectiveSettings(weighting=weighting.name)
    if not weighting.needs_snr:
        check_for(settings, "flow")
        return
    with pytest.raises(ValueError, match=f"loss weighting {weighting.name} needs a signal-to-noise ratio"):
        check_for(settings, "flow")
    with pytest.raises(ValueError, match="with loss function x0-mse use none"):
        ObjectiveSettings(loss="x0-mse", weighting=weighting.name)


@pytest.mark.parametrize("name", TIMESTEPS.names())
def test_every_sampling_stays_in_range_and_comes_from_its_generator(name):
    settings = ObjectiveSettings(timesteps=name, shift=2.0)
    first, second = (draw_timesteps(settings, 500, torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(first, second) and first.shape == (500,) and first.min() >= 0 and first.max() < 1


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (LossKind, {"name": "a", "kohya_name": "a", "compute": lambda *_: None}),
        (LossWeighting, {"name": "a", "weights": lambda *_: None}),
        (TimestepSampling, {"name": "a", "draw": lambda *_: None}),
    ],
)
def test_a_record_without_a_needed_field_is_refused(kind, given):
    assert {f.name for f in fields(kind) if f.default is f.default_factory} == set(given) and kind(**given)
    for name in given:
        with pytest.raises(TypeError, match=name):
            kind(**{key: value for key, value in given.items() if key != name})


def _late(sigma, prediction, gamma):
    """Counts the noisier half only, gamma times."""
    return gamma * (sigma > 0.5).to(sigma.dtype)


def _quartic(error, prediction, sigma):
    return error.square().square()


def _noisy_end(count, generator, shift):
    return 0.9 + 0.1 * torch.rand(count, generator=generator)


MADE_UP = [
    (
        WEIGHTINGS,
        "weighting",
        LossWeighting(name="late", weights=_late, needs_snr=False, metadata=lambda gamma: {"ss_late_weighting": gamma}),
    ),
    (LOSSES, "loss", LossKind(name="quartic", kohya_name="quartic", compute=_quartic)),
    (TIMESTEPS, "timesteps", TimestepSampling(name="noisy-end", draw=_noisy_end)),
]


@pytest.mark.parametrize(("registry", "setting", "record"), MADE_UP, ids=lambda value: getattr(value, "name", ""))
def test_one_record_is_all_that_a_new_one_needs(lab, registry, setting, record):
    denoiser, dataset = lab.Flow(), lab.pictures(held_out=[9])
    with pytest.raises(ValueError, match=f"{registry.title} is '{record.name}', expected one of"):
        ObjectiveSettings(**{setting: record.name})
    plain = train(lab.state(denoiser, dataset), denoiser, dataset, 3)
    with registry.registered(record):
        objective = ObjectiveSettings(**{setting: record.name}, gamma=2.0)
        start = lab.state(denoiser, dataset, objective=objective)
        whole = train(start, denoiser, dataset, 3)
        assert equal(whole, train(train(start, denoiser, dataset, 1), denoiser, dataset, 2))
        assert whole.history.loss != plain.history.loss and whole.key != plain.key
        metadata = lora_metadata(whole)
    if registry is WEIGHTINGS:
        assert metadata["ss_late_weighting"] == "2.0"
    if registry is LOSSES:
        assert metadata["ss_loss_type"] == "quartic"
    assert record.name not in registry
