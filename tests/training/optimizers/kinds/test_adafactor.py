"""Adafactor: torch's own unless scale_parameter or relative_step say otherwise; those are transformers'."""

import pytest
import torch
from graft_nodes.training.optimizers import stepper
from graft_nodes.training.optimizers.checks import remarks
from graft_nodes.training.optimizers.kinds.adafactor import TorchsAdafactor
from graft_nodes.training.optimizers.settings import OptimizerSettings
from transformers.optimization import Adafactor

CPU = torch.device("cpu")
SHAPES = {"a.lora_up.weight": (8, 4), "a.lora_down.weight": (4, 8), "a.conv": (6, 4, 3, 3), "a.bias": (8,)}


def _weights():
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in SHAPES.items()}
    weights["a.lora_up.weight"].zero_()
    return weights


def _trained(options, rate=1e-3, steps=5, weight_decay=0.01):
    settings = OptimizerSettings(
        optimizer="adafactor", learning_rate=rate, weight_decay=weight_decay, clip_norm=0.0, options=options
    )
    moving = stepper.OptimizerStepper(settings, _weights(), {}, CPU, 0)
    for step in range(steps):
        moving.prepare(rate, step)
        for tensor, gradient in zip(moving.trained.values(), _gradients(step), strict=True):
            tensor.grad = gradient
        moving.norm()
        moving.step_()
    return moving.copy_sampling_weights()


def _gradients(step):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) * 0.01 for shape in SHAPES.values()]


@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ("scale_parameter = false", {"scale_parameter": False, "relative_step": False, "lr": 1e-3}),
        ("relative_step = true", {"scale_parameter": True, "relative_step": True}),
        ("relative_step = True, warmup_init = True", {"relative_step": True, "warmup_init": True}),
        ("relative_step = true, scale_parameter = False", {"scale_parameter": False, "relative_step": True}),
        (
            "scale_parameter = false, beta2_decay = -0.5, d = 2",
            {"scale_parameter": False, "relative_step": False, "lr": 1e-3, "decay_rate": -0.5, "clip_threshold": 2.0},
        ),
    ],
    ids=lambda value: str(value)[:45],
)
def test_its_steps_are_those_of_transformers(options, theirs):
    weights = {name: torch.nn.Parameter(tensor) for name, tensor in _weights().items()}
    optimizer = Adafactor(list(weights.values()), weight_decay=0.01, **theirs)
    for step in range(5):
        for parameter, gradient in zip(weights.values(), _gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    for name, tensor in _trained(options).items():
        assert torch.allclose(tensor, weights[name].detach(), rtol=1e-5, atol=1e-8), name


def test_without_options_it_is_torchs():
    weights = {name: torch.nn.Parameter(tensor) for name, tensor in _weights().items()}
    optimizer = torch.optim.Adafactor(list(weights.values()), lr=1e-3, weight_decay=0.01)
    for step in range(5):
        for parameter, gradient in zip(weights.values(), _gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    assert all(torch.equal(tensor, weights[name].detach()) for name, tensor in _trained("").items())


@pytest.mark.parametrize("options", [{}, {"beta2_decay": -0.5, "d": 2.0}])
def test_on_a_device_it_is_torchs_too(options):
    """Its class there reads no number from the device; here it is on the CPU, as torch's."""
    trained = []
    for kind in (torch.optim.Adafactor, TorchsAdafactor):
        weights = {name: torch.nn.Parameter(tensor) for name, tensor in _weights().items()}
        optimizer = kind(list(weights.values()), lr=1e-2, weight_decay=0.01, **options)
        for step in range(5):
            for parameter, gradient in zip(weights.values(), _gradients(step), strict=True):
                parameter.grad = gradient
            optimizer.step()
        trained.append((weights, [optimizer.state[p] for p in weights.values()]))
    (theirs, their_state), (ours, our_state) = trained
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for mine, torchs in zip(our_state, their_state, strict=True):
        assert mine.keys() == torchs.keys() and all(torch.equal(mine[name], torchs[name]) for name in mine)


def test_up_weights_move_at_adamws_rate_without_scale_parameter():
    """They begin at 0: relative to their size a step of 1e-4 is one of 1e-7."""
    relative, plain = (_trained(options, 1e-4)["a.lora_up.weight"] for options in ("", "scale_parameter = false"))
    assert relative.abs().max() < 2e-6 and 1e-4 < plain.abs().max() < 2e-3


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "LoRA up weights begin at 0, so they hardly move: 0.01 is usual, or 1e-4 with the option scale_parameter"),
        ({"learning_rate": 1e-2}, ""),
        ({"options": "scale_parameter = false"}, ""),
        ({"options": "scale_parameter = false", "learning_rate": 0.1}, "takes AdamW's, 1e-4 is usual"),
        ({"options": "relative_step = true"}, "ignores the learning rate (0.0001)"),
    ],
)
def test_the_report_says_which_rate_is_usual(settings, said):
    found = remarks(OptimizerSettings(optimizer="adafactor", **settings))
    assert (said in found[0] and len(found) == 1) if said else not found


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"options": "warmup_init = true"}, "warmup_init is the warm-up of relative_step"),
        (
            {"options": "relative_step = true", "schedule": "cosine", "warmup": 5},
            "sets the rate .*learning rate schedule.*warmup steps",
        ),
        ({"options": "relative_step = true", "lora_plus": 4.0}, "the rate itself, so LoRA\\+ ratio 4.0 cannot be used"),
    ],
)
def test_what_relative_step_excludes_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        OptimizerSettings(optimizer="adafactor", **settings)
