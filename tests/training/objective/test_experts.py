"""Experts of a pair: each gets only the noise levels that the sampler gives it, drawn as for one model, and what files
and reports say of it.
"""

from types import SimpleNamespace

import pytest
import torch
from graft_nodes.patches.models.registry import FAMILIES
from graft_nodes.training import lora_metadata
from graft_nodes.training.objective import experts
from graft_nodes.training.objective.settings import ObjectiveSettings, check_for
from graft_nodes.training.objective.timesteps import (
    TIMESTEPS,
    describe_levels,
    draw_expert_levels,
    expert_levels_at,
    tokens_of,
)
from graft_nodes.training.run.loop import Callbacks, train
from graft_nodes.training.state import change_settings, equal

COUNT, TOKENS = 10_000, tokens_of((16, 60, 104))
HIGH, LOW = "high noise", "low noise"


def shifted(u, shift):
    """ComfyUI's ModelSamplingDiscreteFlow: time_snr_shift, in float64."""
    u = u.double()
    return shift * u / (1 + (shift - 1) * u)


def levels_of_one_model(name, shift, model_shift, generator):
    """What kohya's scripts draw, written out in float64: 400,000 noise levels for a model without experts."""
    count = 400_000
    uniform = torch.rand(count, generator=generator, dtype=torch.float64)
    normal = torch.randn(count, generator=generator, dtype=torch.float64)
    flux = 0.5 + (1.15 - 0.5) / (4096 - 256) * (TOKENS - 256)
    drawn = {
        "uniform": uniform,
        "logit-normal": normal.sigmoid(),
        "shifted": shifted(uniform, 3.0),
        "mode": 1 - uniform - 1.29 * (torch.cos(torch.pi / 2 * uniform) ** 2 - 1 + uniform),
        "sigmoid": normal.sigmoid(),
        "shift": shifted(normal.sigmoid(), 3.0),
        "flux_shift": shifted(normal.sigmoid(), float(torch.tensor(flux).exp())),
        "ai-toolkit shift": shifted(uniform, 3.0),
        "ai-toolkit flux_shift": shifted(uniform, float(torch.tensor(flux).exp())),
    }[name]
    if name.endswith("shift") or name == "sigmoid" or not model_shift:
        return drawn
    return shifted(drawn, shift)


def drawn(settings, shift, count=COUNT):
    return draw_expert_levels(
        settings, count, torch.Generator().manual_seed(3), TOKENS, lambda u: shifted(u, shift).float()
    )


@pytest.mark.parametrize("model_shift", [True, False], ids=["on top", "without"])
@pytest.mark.parametrize(("shift", "boundary"), [(5.0, 0.9), (8.0, 0.875)])
@pytest.mark.parametrize("name", TIMESTEPS.names())
def test_each_expert_gets_its_side_of_the_boundary_in_the_shape_of_the_whole(name, shift, boundary, model_shift):
    settings = {"timesteps": name, "shift": 3.0, "boundary": boundary, "model_shift": model_shift}
    whole = levels_of_one_model(name, shift, model_shift, torch.Generator().manual_seed(9))
    sides = {HIGH: whole[whole >= boundary], LOW: whole[whole < boundary]}
    for expert, expected in sides.items():
        found = drawn(ObjectiveSettings(expert=expert, **settings), shift).double()
        assert found.shape == (COUNT,)
        if expert == HIGH:
            assert float(found.min()) >= boundary and float(found.max()) <= 1.0
        else:
            assert float(found.min()) >= 0.0 and float(found.max()) < boundary
        shares = torch.linspace(0.02, 0.98, 49, dtype=torch.float64)
        at = expected.quantile(shares)
        below = torch.searchsorted(found.sort().values, at, right=True).double() / COUNT
        assert float((below - shares).abs().max()) < 0.03


def test_the_boundary_itself_is_the_high_noise_experts():
    """In float32 0.9 is a little less than 0.9: such a level is the low-noise expert's."""
    at = torch.tensor([0.875, 0.9], dtype=torch.float32)
    for boundary, index, expert in ((0.875, 0, HIGH), (0.9, 1, LOW)):
        settings = ObjectiveSettings(expert=expert, boundary=boundary)
        found = draw_expert_levels(settings, 4, torch.Generator(), TOKENS, lambda u, i=index: at[i].expand(len(u)))
        assert found.tolist() == [float(at[index])] * 4


def test_a_distribution_without_levels_for_the_expert_is_refused():
    settings = ObjectiveSettings(timesteps="shift", shift=0.02, expert=HIGH, boundary=0.999)
    with pytest.raises(ValueError, match="draws next to no noise levels for expert high noise"):
        drawn(settings, 8.0, count=4)
    with pytest.raises(ValueError, match="expert boundary is 0, and was not replaced"):
        drawn(ObjectiveSettings(expert=HIGH), 8.0)


class Shifted:
    """The lab's flow model with a shift of 8, as Wan's; keeps the noise levels that it is trained and validated at."""

    def __init__(self, denoiser):
        self._denoiser, self.levels = denoiser, []

    def __getattr__(self, name):
        return getattr(self._denoiser, name)

    def sigma(self, u):
        return shifted(u, 8.0).float()

    def denoise(self, x, sigma, conditionings, options):
        self.levels += sigma.tolist()
        return self._denoiser.denoise(x, sigma, conditionings, options)


@pytest.mark.parametrize("expert", [HIGH, LOW])
def test_an_expert_trains_validates_branches_and_resumes_on_its_side_only(lab, expert):
    denoiser, dataset = Shifted(lab.Flow()), lab.pictures(held_out=[8, 9])
    settings = ObjectiveSettings(expert=expert, boundary=0.875)
    start = lab.state(denoiser, dataset, objective=settings)
    whole = train(start, denoiser, dataset, 6, Callbacks(validate_every=3))
    assert len(denoiser.levels) == 6 * 4 + 3 * 2 * (2 * 4)  # three validations of weights and average, 4 levels each
    assert all((level >= 0.875) == (expert == HIGH) for level in denoiser.levels)
    half = train(start, denoiser, dataset, 2)
    assert equal(train(half, denoiser, dataset, 4), whole)
    branch = train(half, denoiser, dataset, 1)
    assert not equal(branch, whole) and equal(train(branch, denoiser, dataset, 3), whole)
    plain = train(lab.state(denoiser, dataset), denoiser, dataset, 2)
    assert not equal(plain, half)


def test_held_out_loss_is_measured_evenly_over_the_experts_part_of_the_schedule():
    """With shift 8 the high-noise expert's part is the upper half of the schedule, as 0.875 lies at 0.4667."""
    border = 0.875 / (8 - 7 * 0.875)
    shares = (torch.arange(4) + 0.25) / 4
    for expert, low, high in ((HIGH, border, 1.0), (LOW, 0.0, border)):
        settings = ObjectiveSettings(expert=expert, boundary=0.875)
        found = expert_levels_at(settings, shares, lambda u: shifted(u, 8.0).float())
        assert torch.allclose(found.double(), shifted(low + (high - low) * shares, 8.0), atol=2e-3)
    with pytest.raises(ValueError, match="schedule has no noise levels for expert high noise"):
        expert_levels_at(ObjectiveSettings(expert=HIGH, boundary=0.9), shares, lambda u: u / 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"expert": "middle noise"}, "expert is 'middle noise', expected one of none, high noise, low noise"),
        ({"expert": HIGH, "boundary": 1.0}, "expert boundary is 1.0, expected from 0"),
        ({"boundary": 0.9}, "expert boundary is 0.9 and expert is none: choose the expert"),
        ({"expert": HIGH, "min_timestep": 0.875}, "expert high noise chooses the noise levels itself"),
        ({"expert": LOW, "max_timestep": 0.875}, "set minimum timestep to 0 and maximum timestep to 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ObjectiveSettings(**settings)


@pytest.mark.parametrize("prediction", ["eps", "v"])
def test_experts_are_for_flow_models(prediction):
    settings = ObjectiveSettings(expert=HIGH, boundary=0.5)
    check_for(settings, "flow")
    with pytest.raises(ValueError, match=f"expert high noise is for flow models such as Wan 2.2, .* {prediction}"):
        check_for(settings, prediction)


def wan(channels, kind="WanModel", **parts):
    """What Graft looks at of a Wan model."""
    return type(kind, (SimpleNamespace,), {})(patch_embedding=SimpleNamespace(in_channels=channels), **parts)


@pytest.mark.parametrize(
    ("model", "boundary"),
    [
        (wan(16), 0.875),  # text to video
        (wan(36), 0.9),  # image to video
        (wan(36, img_emb=object()), None),  # Wan 2.1's, one model
        (wan(48), None),  # the 5B
        (wan(16, "VaceWanModel"), None),
    ],
)
def test_the_boundary_of_a_wan_model(model, boundary):
    (family,) = (family for family in FAMILIES if family.name == "wan")
    assert family.expert_boundary(model) == boundary


def test_a_model_that_is_none_of_a_pair_needs_a_boundary(lab):
    module = lab.Net()
    with pytest.raises(ValueError, match="expert is low noise, and this model is not known as one of a pair"):
        experts.fill_boundary(ObjectiveSettings(expert=LOW), module)
    for settings in (ObjectiveSettings(), ObjectiveSettings(expert=LOW, boundary=0.3)):
        assert experts.fill_boundary(settings, module) is settings


@pytest.mark.parametrize(
    ("name", "expert", "named"),
    [
        ("loras/cat", HIGH, "loras/cat_high_noise"),
        ("loras/cat", LOW, "loras/cat_low_noise"),
        ("loras/cat", "none", "loras/cat"),
        ("loras/cat_high_noise", HIGH, "loras/cat_high_noise"),
        ("Cat-HighNoise-v2", HIGH, "Cat-HighNoise-v2"),
        ("loras/cat_low_noise", HIGH, "loras/cat_low_noise_high_noise"),
        ("low_noise/cat", LOW, "low_noise/cat_low_noise"),
        ("low_noise\\cat", LOW, "low_noise\\cat_low_noise"),
    ],
)
def test_a_files_name_ends_in_its_expert(name, expert, named):
    assert experts.name_file(name, expert) == named


def test_report_and_metadata_name_the_expert_and_say_nothing_without_one(lab):
    denoiser, dataset = lab.Flow(), lab.pictures()
    settings = ObjectiveSettings(expert=LOW, boundary=0.9)
    assert experts.describe(settings) == ["expert low noise: only noise levels (sigma) below 0.9 are trained"]
    assert experts.describe(ObjectiveSettings()) == []
    line = describe_levels(settings, lambda u: shifted(u, 8.0).float(), TOKENS)
    assert "above 0.74, 90% of them from 0.1" in line and line.endswith("to 0.89")
    state = lab.state(denoiser, dataset)
    assert not any(name.startswith("graft_expert") for name in lora_metadata.lora_metadata(state))
    metadata = lora_metadata.lora_metadata(change_settings(state, None, settings))
    assert (metadata["graft_expert"], metadata["graft_expert_boundary"]) == (LOW, "0.9")
