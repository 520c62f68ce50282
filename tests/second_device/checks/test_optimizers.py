"""Optimizers on a device, where they read no numbers in a step, take the steps that they take on the CPU."""

import pytest
import torch
from graft_nodes.tests.second_device.device import CPU, DEVICE
from graft_nodes.training.optimizers.registry import OPTIMIZERS
from graft_nodes.training.optimizers.settings import OptimizerSettings
from graft_nodes.training.optimizers.stepper import OptimizerStepper

SHAPES = {"a.lora_up.weight": (8, 40), "a.lora_down.weight": (40, 8), "a.conv": (6, 4, 3, 3), "a.bias": (8,)}
CHOICES = [
    *((name, "") for name in OPTIMIZERS.names() if name != "adamw8bit"),  # bitsandbytes has no kernels for this device
    ("adafactor", "scale_parameter = false"),
    ("adafactor", "relative_step = true"),
    ("prodigyplus", "factored = false, use_bias_correction = true"),
]


def _numbers(seed, scale):
    draws = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draws) * scale for name, shape in SHAPES.items()}


@pytest.mark.parametrize(("optimizer", "options"), CHOICES)
def test_the_steps_are_those_on_the_cpu(optimizer, options):
    rate = {"prodigy": 1.0, "prodigyplus": 1.0, "automagic": 1e-6}.get(optimizer, 1e-2)
    if options == "relative_step = true":
        rate = 1e-4
    settings = OptimizerSettings(optimizer=optimizer, options=options, learning_rate=rate, clip_norm=0.0)
    states, weights = [], []
    for device in (CPU, DEVICE):
        moving = OptimizerStepper(settings, _numbers(1, 0.1), {}, device, 0)
        for step in range(12):
            moving.prepare(rate, step)
            for name, gradient in _numbers(100 + step, 3.0 if step == 5 else 0.1).items():
                moving.trained[name].grad = gradient.to(device)
            moving.norm()
            moving.step_()
        states.append(moving.state())
        weights.append({name: tensor.cpu() for name, tensor in moving.trained.items()})
    for one, other in (weights, states):
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            torch.testing.assert_close(
                other[name], tensor, rtol=2e-5, atol=1e-7, msg=lambda text, name=name: name + text
            )
