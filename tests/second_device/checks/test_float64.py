"""Training on a device that has no float64, as MPS has none."""

import pytest
import torch
from graft_nodes.tests.second_device.device import DEVICE, meter
from graft_nodes.training.objective.settings import ObjectiveSettings
from graft_nodes.training.objective.timesteps import HIGH_NOISE, belongs
from graft_nodes.training.optimizers import by_tensor
from graft_nodes.training.run.loop import train
from graft_nodes.training.trainable.settings import AdapterSettings

from ...training.conftest import lab  # noqa: F401

LORA = AdapterSettings(targets="all", rank=2)


@pytest.fixture(autouse=True)
def without_float64():
    by_tensor.widest_float.cache_clear()
    meter.lacks_float64 = True
    yield
    meter.lacks_float64 = False
    by_tensor.widest_float.cache_clear()


def trained(lab, device, **settings):  # noqa: F811
    class OnDevice(lab.Flow):
        def denoise(self, x, sigma, conditionings, options):
            return super().denoise(x, sigma, [type(c)(c.context.to(x.device)) for c in conditionings], options)

    denoiser, dataset = OnDevice(), lab.pictures()
    denoiser.device = device
    denoiser.module.to(device)
    state = lab.state(denoiser, dataset, LORA, ema=False, **settings)
    return train(state, denoiser, dataset, 3)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"precision": "full-bf16"},
        {"precision": "fp16"},
        {"fused_backward": True, "clip_norm": 0.0},
        {"precision": "full-bf16", "fused_backward": True, "clip_norm": 0.0},
        {"optimizer": "prodigyplus", "schedule": "constant"},
        {"optimizer": "prodigy"},
        {"optimizer": "adafactor"},
        {"optimizer": "automagic", "schedule": "constant", "warmup": 0},
        {"optimizer": "came"},
    ],
    ids=str,
)
def test_it_trains_as_elsewhere(lab, settings):  # noqa: F811
    found = trained(lab, DEVICE, **settings)
    expected = trained(lab, torch.device("cpu"), **settings)
    assert found.history.norm == pytest.approx(expected.history.norm, rel=1e-2)
    assert found.history.norm[0] > 0


def test_experts_levels_are_compared_exactly():
    boundary = 0.875 + 2**-40  # between two numbers of float32
    settings = ObjectiveSettings(expert=HIGH_NOISE, boundary=boundary)
    levels = torch.tensor([0.875, 0.8750001, 0.5, 0.9])
    assert belongs(settings, levels.to(DEVICE)).tolist() == [False, True, False, True]
