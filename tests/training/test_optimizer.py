"""AdamW, clipping and schedules against formulas written out by hand."""

import math

import pytest
import torch
from graft_nodes.training import optimizer
from graft_nodes.training.adapters import AdapterSettings
from graft_nodes.training.optimizer import OptimizerSettings, rate_at
from graft_nodes.training.step import Workspace, advance_, backward_


@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.0}, {"clip_norm": 0.02, "weight_decay": 0.1}, {"lora_plus": 4.0}])
def test_three_steps_are_adamw_written_out(lab, settings):
    denoiser, dataset = lab.Flow(), lab.pictures()
    work = Workspace(lab.state(denoiser, dataset, AdapterSettings(targets="all", rank=2), **settings), denoiser, dataset)
    held = work.begun.settings.optimizer
    weights = {name: t.detach().double().clone() for name, t in work.trained.items()}
    first, second = ({name: torch.zeros_like(w) for name, w in weights.items()} for _ in range(2))
    with work.installed():
        for n in range(1, 4):
            backward_(work)
            grads = {name: t.grad.double().clone() for name, t in work.trained.items()}
            work.optimizer.zero_grad()
            norm = math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
            shrink = min(1.0, held.clip_norm / (norm + 1e-6)) if held.clip_norm else 1.0
            moved = advance_(work)
            assert moved.norm == pytest.approx(norm, rel=1e-4)
            for name, w in weights.items():
                rate = rate_at(held, n - 1) * (held.lora_plus if "lora_up" in name else 1.0)
                g = grads[name] * shrink
                first[name] = 0.9 * first[name] + 0.1 * g
                second[name] = 0.999 * second[name] + 0.001 * g * g
                w -= rate * held.weight_decay * w
                w -= rate * (first[name] / (1 - 0.9**n)) / ((second[name] / (1 - 0.999**n)).sqrt() + 1e-8)
                assert torch.allclose(w.float(), work.trained[name].detach(), atol=1e-6), name


def test_the_moments_come_back_from_a_state(lab):
    denoiser, dataset = lab.Flow(), lab.pictures()
    work = Workspace(lab.state(denoiser, dataset), denoiser, dataset)
    with work.installed():
        advance_(work)
    saved = optimizer.moments(work.optimizer, work.trained)
    again = optimizer.moments(optimizer.build(work.begun.settings.optimizer, work.trained, saved), work.trained)
    assert saved.keys() == again.keys() and all(torch.equal(saved[k], again[k]) for k in saved)
    assert {key.split("/")[0] for key in saved} == {"step", "exp_avg", "exp_avg_sq"}


def _rates(schedule, **settings):
    held = OptimizerSettings(learning_rate=2.0, schedule=schedule, total_steps=101, **settings)
    return [rate_at(held, step) for step in range(130)]


def test_schedules_end_at_their_floor_on_the_last_step():
    for schedule in ("linear", "cosine", "cosine-restarts", "polynomial"):
        rates = _rates(schedule, floor=0.1)
        assert rates[0] == 2.0 and rates[100] == pytest.approx(0.2) and rates[129] == pytest.approx(0.2), schedule
    assert set(_rates("constant")) == {2.0}


def test_schedules_are_their_formulas():
    for k in (0, 13, 50, 99, 100):
        x = k / 100
        assert _rates("linear")[k] == pytest.approx(2 * (1 - x))
        assert _rates("cosine", floor=0.02)[k] == pytest.approx(2 * (0.02 + 0.98 * (1 + math.cos(math.pi * x)) / 2))
        assert _rates("polynomial")[k] == pytest.approx(2 * (1 - x) ** 2)
    restarts = _rates("cosine-restarts")
    assert [k for k in range(1, 100) if restarts[k] > restarts[k - 1]] == [25, 50, 75]


def test_warmup_rises_linearly_and_counts_in_the_horizon():
    rates = _rates("cosine", warmup=10)
    assert rates[:10] == pytest.approx([2 * (k + 1) / 10 for k in range(10)])
    assert rates[10] == 2.0 and rates[100] == pytest.approx(0.0)


def test_scale_lr_is_the_documented_power():
    held = OptimizerSettings(learning_rate=1.0, batch_size=4, accumulation=3, scale_lr=True)
    assert rate_at(held, 5) == pytest.approx(12**0.55)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "lion"}, "optimizer lion is not available in this version of Graft; use adamw"),
        ({"optimizer": "x"}, "optimizer is 'x', expected one of adamw"),
        ({"precision": "fp16"}, "precision fp16 is not available"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"warmup": 2000}, "warmup is 2000 steps and total_steps only 1000"),
        ({"floor": 2.0, "batch_size": 0}, "batch_size is 0.*floor is 2.0"),
    ],
)
def test_wrong_settings_are_all_named(settings, message):
    with pytest.raises(ValueError, match=message):
        OptimizerSettings(**settings)
