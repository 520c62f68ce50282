"""AdamW, clipping and schedules against formulas written out by hand."""

import math

import pytest
import torch
from graft_nodes.training.adapters import AdapterSettings
from graft_nodes.training.optimizer import OptimizerSettings
from graft_nodes.training.schedules import rate_at
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
            work.mover.forget()
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
    first = work.state()
    again = Workspace(first, denoiser, dataset).state().optimizer
    assert first.optimizer.keys() == again.keys() and all(torch.equal(first.optimizer[k], again[k]) for k in again)
    assert {key.split("/")[0] for key in again} == {"step", "exp_avg", "exp_avg_sq"}


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
