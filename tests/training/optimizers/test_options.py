"""Options of the optimizers' libraries: read and checked, handed to the library, and none of them dead."""

import importlib.util

import pytest
import torch
from graft_nodes.storage.digest import sha256_of_tensors
from graft_nodes.training.optimizers import build, options
from graft_nodes.training.optimizers.registry import OPTIMIZERS
from graft_nodes.training.optimizers.settings import OptimizerSettings
from graft_nodes.training.run.loop import train
from graft_nodes.training.trainable.settings import AdapterSettings

OTHER = {
    "clip_threshold": "0.1",
    "min_lr": "1e-4",
    "max_lr": "1e-5",
    "lr_bump": "1e-3",
    "beta2": "0.5",
    "betas": "0.5 0.9",
    "eps": "1e-2",
    "beta2_decay": "-0.3",
    "d": "1.5",
    "beta3": "0.5",
    "d0": "1e-4",
    "d_coef": "3",
    "growth_rate": "1.1",
    "decouple": "false",
    "use_bias_correction": "true",
    "safeguard_warmup": "false",
    "r": "1",
    "weight_lr_power": "0.5",
    "momentum": "0.3",
    "nesterov": "true",
    "ns_steps": "2",
    "scale_parameter": "false",
    "d_limiter": "false",
    "factored": "false",
    "use_stableadamw": "false",
    "schedulefree_c": "6",
    "relative_step": "true",
    "warmup_init": "true",
}
OWN = {("muon", "nesterov"): "false", ("came", "betas"): "0.5 0.9 0.9"}  # other values for one optimizer
NEEDED = {"warmup_init": "relative_step = true"}  # the option without which another is refused
NO_WARMUP = {"relative_step", "warmup_init"}
CASES = [(record.name, name) for record in OPTIMIZERS for name in record.options]


def _needs(optimizer):
    package = OPTIMIZERS.get(optimizer).package
    if package is not None and importlib.util.find_spec(package.module) is None:
        pytest.skip(f"{package.name} is not installed")


@pytest.mark.parametrize(("optimizer", "name"), CASES)
def test_every_option_changes_what_is_trained(lab, optimizer, name):
    _needs(optimizer)
    rate = {"prodigy": 1.0, "prodigyplus": 1.0, "adafactor": 1e-1, "automagic": 5e-5}.get(optimizer, 1e-2)
    given = {
        "optimizer": optimizer,
        "learning_rate": rate,
        "schedule": "constant",
        "warmup": 0 if optimizer in ("adacoor", "automagic") or name in NO_WARMUP else 3,
    }
    given |= {} if optimizer == "adacoor" else {"weight_decay": 0.1}
    value = OWN.get((optimizer, name), OTHER[name])
    found = []
    needed = NEEDED.get(name, "")
    for said in (needed, f"{name} = {value}, {needed}"):
        denoiser, dataset = lab.Flow(), lab.pictures()
        if name == "factored":  # only sides of 32 are
            denoiser, dataset = lab.Flow(lab.Net(32)), lab.pictures(shape=(32, 4, 4))
        kind = AdapterSettings("full" if optimizer in ("muon", "adamw8bit") else "lora", targets="all")
        state = lab.state(denoiser, dataset, kind, ema=False, **given, options=said)
        found.append(sha256_of_tensors(train(state, denoiser, dataset, 20 if name == "d_limiter" else 5).trained))
    if optimizer == "adamw8bit":
        made = build.build(
            OptimizerSettings(**given, options=f"{name} = {value}"), [{"params": [torch.zeros(2, requires_grad=True)]}]
        )
        assert made.param_groups[0][name] == options.parse(optimizer, f"{name} = {value}")[name]
    assert found[0] != found[1]


def test_two_steps_with_other_betas_are_adamw_written_out():
    w = torch.tensor([1.0, -2.0], requires_grad=True)
    settings = OptimizerSettings(learning_rate=0.1, weight_decay=0.0, options="betas=0.8,0.99\neps = 1e-3")
    made, first, second, expected = (
        build.build(settings, [{"params": [w]}]),
        0.0,
        0.0,
        torch.tensor([1.0, -2.0], dtype=torch.float64),
    )
    for n, g in enumerate((torch.tensor([0.5, 1.0]), torch.tensor([-1.0, 3.0])), 1):
        w.grad = g
        made.step()
        first, second = 0.8 * first + 0.2 * g.double(), 0.99 * second + 0.01 * g.double() ** 2
        expected = expected - 0.1 * (first / (1 - 0.8**n)) / ((second / (1 - 0.99**n)).sqrt() + 1e-3)
    assert torch.allclose(w.detach().double(), expected, atol=1e-6)


def test_the_weights_to_sample_with_follow_the_first_beta(lab):
    """Schedule-free: x = (y - (1 - beta) z) / beta, with the beta that was given."""
    pytest.importorskip("schedulefree")
    denoiser, dataset = lab.Flow(), lab.pictures()
    given = {"optimizer": "schedulefree", "schedule": "constant", "learning_rate": 1e-2, "options": "betas = 0.6 0.9"}
    state = train(lab.state(denoiser, dataset, ema=False, **given), denoiser, dataset, 3)
    for name, x in state.trained.items():
        y, z = state.optimizer[f"y/{name}"].double(), state.optimizer[f"z/{name}"].double()
        assert torch.allclose(x.double(), (y - 0.4 * z) / 0.6, atol=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "text", "message"),
    [
        ("adamw", "beta = 0.9 0.99", "adamw has no 'beta', did you mean betas?"),
        ("sgd", "eps = 1", "sgd has no 'eps', only momentum, nesterov"),
        ("adamw", "betas = 0.9", "betas is '0.9', expected two numbers"),
        ("adamw", "betas = 0.9 1", "expected two numbers"),
        ("schedulefree", "betas = 0 0.9", "expected two numbers above 0"),
        ("adamw", "eps = 0", "eps is '0', expected a number above 0"),
        ("prodigy", "d_coef = nan", "d_coef is 'nan', expected a number above 0"),
        ("prodigy", "decouple = yes, d0 = x", "decouple is 'yes', expected true or false; d0 is 'x'"),
        ("adamw", "eps = 1e-3, eps = 1e-4", "eps is given twice"),
        ("adamw", "0.9", "'0.9' cannot be read"),
        ("sgd", "momentum = 0, nesterov = true", "nesterov needs a momentum above 0"),
        ("muon", "ns_steps = 0", "ns_steps is '0', expected a whole number, 1 or more"),
        ("adafactor", "d = 0.5", "d is '0.5', expected a number from 1"),
    ],
)
def test_what_cannot_be_read_is_named(optimizer, text, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        OptimizerSettings(optimizer=optimizer, options=text)


def test_no_options_are_none():
    assert all(options.parse(optimizer, " \n") == {} for optimizer in OPTIMIZERS.names())
