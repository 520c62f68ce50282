"""AdamW and clipping against formulas written out by hand; what is wrong with settings is said before
the first step.
"""

import math
import sys
from dataclasses import replace

import pytest
import torch
from graft_nodes.ema.decay import EMASettings
from graft_nodes.training.optimizers.block_rates import is_up
from graft_nodes.training.optimizers.checks import check_run, remarks, schedule_remarks
from graft_nodes.training.optimizers.learning_rate_schedule import rate_at
from graft_nodes.training.optimizers.record import RunFacts
from graft_nodes.training.optimizers.registry import OPTIMIZERS
from graft_nodes.training.optimizers.settings import OptimizerSettings
from graft_nodes.training.run.loop import train
from graft_nodes.training.run.step import advance_, backward_
from graft_nodes.training.run.workspace import Workspace
from graft_nodes.training.state import Settings, Start, begin, change_settings
from graft_nodes.training.trainable.settings import AdapterSettings


@pytest.mark.parametrize(
    "settings", [{}, {"clip_norm": 0.0}, {"clip_norm": 0.02, "weight_decay": 0.1}, {"lora_plus": 4.0}]
)
def test_three_steps_are_adamw_written_out(lab, settings):
    denoiser, dataset = lab.Flow(), lab.pictures()
    work = Workspace(
        lab.state(denoiser, dataset, AdapterSettings(targets="all", rank=2), **settings), denoiser, dataset
    )
    held = work.start_state.settings.optimizer
    weights = {name: t.detach().double().clone() for name, t in work.trained.items()}
    first, second = ({name: torch.zeros_like(w) for name, w in weights.items()} for _ in range(2))
    with work.install():
        for n in range(1, 4):
            backward_(work)
            grads = {name: t.grad.double().clone() for name, t in work.trained.items()}
            work.stepper.drop_gradients()
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
    with work.install():
        advance_(work)
    first = work.state()
    again = Workspace(first, denoiser, dataset).state().optimizer
    assert first.optimizer.keys() == again.keys() and all(torch.equal(first.optimizer[k], again[k]) for k in again)
    assert {key.split("/")[0] for key in again} == {"step", "exp_avg", "exp_avg_sq"}


WRONG = [
    ({"optimizer": "x"}, "optimizer is 'x', expected one of adamw"),
    ({"precision": "half"}, "training precision is 'half', expected one of auto"),
    ({"offload": "disk"}, "offload to CPU memory is 'disk', expected one of none"),
    ({"learning_rate": 0.0}, "learning rate is 0, expected a number above 0"),
    ({"learning_rate": float("nan")}, "learning rate is nan"),
    ({"clip_norm": float("inf")}, "maximum gradient norm is inf"),
    ({"text_encoder_rate": -1.0}, "text encoder learning rate is -1.0"),
    ({"warmup": 2000}, "warmup steps is 2000 and total steps \\(schedule\\) only 1000"),
    ({"total_steps": -1}, "total steps \\(schedule\\) is -1, expected from 0 to"),
    ({"floor": 2.0, "batch_size": 0}, "minimum learning rate ratio is 2.0.*batch size is 0"),
    ({"floor": 0.5}, "schedule constant never falls"),
    (
        {"block_rates": "a=x, /(/=1, b=-1, =2"},
        "'a=x' cannot be read.*'/\\(/=1' cannot be read.*'b=-1' needs.*'=2' needs",
    ),
    ({"optimizer": "schedulefree", "schedule": "cosine"}, "takes the place of learning rate schedule cosine"),
    (
        {"optimizer": "adacoor", "scale_lr": True, "warmup": 1, "weight_decay": 0.5},
        "scale rate with batch size True.*warmup steps 1.*weight decay 0.5",
    ),
    (
        {"optimizer": "adacoor", "schedule": "linear", "block_rates": "a=0"},
        "block learning rates 'a=0'.*learning rate schedule 'linear'",
    ),
    (
        {"optimizer": "prodigy", "lora_plus": 4.0, "text_encoder_rate": 1.0},
        "text encoder learning rate 1.0.*LoRA\\+ ratio 4.0",
    ),
    (
        {"optimizer": "prodigy", "block_rates": "a = 0.5"},
        "one step size for all tensors, so block learning rates 'a = 0.5'",
    ),
    ({"fused_backward": True, "accumulation": 2}, "maximum gradient norm 1 needs.*gradient accumulation 2 sums"),
    (
        {"fused_backward": True, "clip_norm": 0.0, "precision": "fp16"},
        "fused backward pass.*fp16 must see every gradient",
    ),
    ({"fused_backward": True, "clip_norm": 0.0, "optimizer": "prodigy"}, "fused backward pass.*all gradients together"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG, ids=lambda v: str(v)[:50])
def test_wrong_and_excluding_settings_are_all_named(settings, message):
    with pytest.raises(ValueError, match=message):
        OptimizerSettings(**settings)


RUNS = [
    ({"lora_plus": 4.0}, {"kind": "full"}, False, "adapter type full trains none"),
    ({"text_encoder_rate": 1e-4}, {}, False, "the text encoder is not trained"),
    ({"block_rates": "blocks.*=0.5, nowhere.*=2"}, {}, False, "'nowhere.\\*' matches no trained tensor"),
    (
        {"optimizer": "schedulefree"},
        {"max_norm": 1.0},
        True,
        "disconnect EMA Settings.*maximum weight norm 1 would scale",
    ),
    ({"optimizer": "muon"}, {"kind": "full", "pattern": "norm"}, False, "muon moves matrices"),
    ({"offload": "layers"}, {"kind": "full"}, False, "one after the other in the backward pass"),
]


@pytest.mark.parametrize(("settings", "adapter", "ema", "message"), RUNS, ids=lambda v: str(v)[:40])
def test_what_does_not_fit_a_run_is_said_at_its_start_and_when_settings_change(lab, settings, adapter, ema, message):
    denoiser, dataset = lab.Flow(), lab.pictures()
    adapter = AdapterSettings(**{"targets": "all", "rank": 2, **adapter})
    start = Start("model", dataset.digest, adapter, EMASettings() if ema else None)
    with pytest.raises(ValueError, match=message):
        begin(denoiser.module, start, Settings(OptimizerSettings(**settings)))
    with pytest.raises(ValueError, match=message):
        change_settings(begin(denoiser.module, start), OptimizerSettings(**settings), None)


@pytest.mark.parametrize(
    ("optimizer", "package"),
    [
        ("adamw8bit", "bitsandbytes"),
        ("lion", "lion-pytorch"),
        ("prodigy", "prodigyopt"),
        ("schedulefree", "schedulefree"),
    ],
)
def test_a_missing_package_is_named_with_what_to_install(lab, monkeypatch, optimizer, package):
    monkeypatch.setitem(sys.modules, package.replace("-", "_"), None)
    with pytest.raises(
        ValueError, match=f"{optimizer} needs the package {package}: .*python.* -m pip install {package} .*`optimizers`"
    ):
        lab.state(lab.Flow(), lab.pictures(), ema=False, optimizer=optimizer, schedule="constant")


@pytest.mark.parametrize(("optimizer", "name", "version"), [("muon", "Muon", "2.9"), ("adafactor", "Adafactor", "2.5")])
def test_an_old_torch_is_told_which_one_is_needed(lab, monkeypatch, optimizer, name, version):
    monkeypatch.delattr(torch.optim, name)
    with pytest.raises(
        ValueError, match=f"{optimizer} needs torch {version} or later and this is {torch.__version__.split('+')[0]}"
    ):
        lab.state(lab.Flow(), lab.pictures(), optimizer=optimizer)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, ""),
        (
            {"optimizer": "prodigy"},
            "prodigy finds the rate itself and multiplies it by the learning rate, which is 0.0001",
        ),
        ({"optimizer": "prodigy", "learning_rate": 1.0}, ""),
        ({"optimizer": "adacoor"}, "adacoor ignores the learning rate (0.0001) and weight decay (0.01)"),
        ({"learning_rate": 1.0}, "learning rate 1 is so large for adamw"),
        ({"learning_rate": 1e-2}, "learning rate 0.01 is above what is usual for adamw (1e-06 to 0.005)"),
        ({"learning_rate": 1e-7}, "learning rate 1e-07 is below what is usual for adamw"),
        ({"optimizer": "sgd"}, "learning rate 0.0001 is below what is usual for sgd (0.01 to 10)"),
        ({"optimizer": "lion", "learning_rate": 1e-8}, "a tenth of AdamW's"),
        ({"optimizer": "lion", "learning_rate": 1e-3}, "a tenth of AdamW's"),
        ({"warmup": 600}, "warmup steps is 600 of 1000 steps"),
        ({"optimizer": "automagic", "learning_rate": 1e-6}, ""),
        ({"optimizer": "automagic", "learning_rate": 2e-4}, "automagic begins with it and raises it itself"),
    ],
)
def test_what_is_probably_not_meant_is_said(settings, said):
    found = remarks(OptimizerSettings(**settings))
    assert (said in found[0] and len(found) == 1) if said else not found


def test_adacoor_learns_slowly_with_more_than_8_images_a_step():
    for batch_size, accumulation, said in ((8, 1, False), (2, 4, False), (9, 1, True), (3, 3, True)):
        settings = OptimizerSettings(optimizer="adacoor", batch_size=batch_size, accumulation=accumulation)
        lines = [line for line in remarks(settings) if "adacoor learns slowly with more than 8: lower" in line]
        assert len(lines) == said and all(f"has {batch_size * accumulation} images" in line for line in lines)


@pytest.mark.parametrize(
    ("schedule", "first", "until", "said"),
    [
        ("linear", 0, 11, []),
        ("constant", 0, 6, []),
        ("linear", 6, 6, []),
        (
            "linear",
            2,
            6,
            [
                "the schedule (linear) is planned for 11 steps and these end at step 6, at learning rate 0.00545455:"
                " unless more steps follow, set total steps (schedule) to 6, or to 0 for the steps asked for"
            ],
        ),
        (
            "linear",
            6,
            14,
            [
                "3 of these 8 steps come after the 11 of the schedule (linear), at learning rate 0: set total steps"
                " (schedule) to 14, or to 0 for the steps asked for"
            ],
        ),
        (
            "linear",
            12,
            14,
            [
                "2 of these 2 steps come after the 11 of the schedule (linear), at learning rate 0: set total steps"
                " (schedule) to 14, or to 0 for the steps asked for"
            ],
        ),
    ],
)
def test_steps_that_do_not_end_with_the_schedule_are_said(schedule, first, until, said):
    """Eleven equal falls from 0.01 to 0, which comes after the last step: five of them before the sixth."""
    settings = OptimizerSettings(schedule=schedule, learning_rate=0.01, total_steps=11, warmup=0)
    assert schedule_remarks(settings, first, until) == said


def _rectified(betas):
    return {"options": f"use_bias_correction = true, betas = {betas}"}


@pytest.mark.parametrize(
    ("settings", "usual"),
    [
        ({"optimizer": "sgd"}, ""),  # so few weights move
        ({"optimizer": "prodigy"}, "set learning rate to 1, which is usual"),
        ({"optimizer": "prodigy", "options": "d0 = 1e-2"}, ""),
        ({"optimizer": "prodigy", "learning_rate": 1e-2}, ""),
        ({"optimizer": "adafactor"}, "set learning rate to 0.01, which is usual"),
        ({"optimizer": "adafactor", "options": "scale_parameter = false"}, ""),
        ({"optimizer": "adafactor", "options": "relative_step = true"}, ""),
        ({"optimizer": "adafactor", "learning_rate": 1e-3}, ""),
        ({"optimizer": "adamw"}, ""),
        ({"optimizer": "prodigyplus", "learning_rate": 1.0, **_rectified("0.9 0.6")}, "leave out use_bias_correction"),
        ({"optimizer": "prodigyplus", "learning_rate": 1.0, **_rectified("0.9 0.61"), "ema": False}, ""),
    ],
)
def test_a_rate_at_which_nothing_is_learned_is_refused(lab, settings, usual):
    pytest.importorskip({"prodigy": "prodigyopt"}.get(settings["optimizer"], "torch"))
    given = {"learning_rate": 1e-4, "clip_norm": 1.0, "schedule": "constant", "warmup": 0, **settings}
    if not usual:
        lab.state(lab.Flow(), lab.pictures(), **given)
        return
    with pytest.raises(ValueError, match=usual):
        lab.state(lab.Flow(), lab.pictures(), **given)


@pytest.mark.parametrize(
    ("settings", "is_refused"),
    [
        ({}, True),
        ({"clip_norm": 0.0}, False),
        ({"clip_norm": 100.0}, False),
        ({"lora_plus": 16.0}, False),
        ({"block_rates": "blocks.* = 100"}, False),
        ({"scale_lr": True, "batch_size": 64}, False),
        ({"text_encoder_rate": 1e-2}, False),
        ({"options": "momentum = 0.99"}, False),
        ({"learning_rate": 1e-2}, False),
    ],
    ids=str,
)
def test_sgd_of_a_clipped_gradient_moves_many_weights_too_little(settings, is_refused):
    names = {"blocks.0.lora_up.weight": 3_000_000, "text_encoders.a.lora_down.weight": 1_000_000}
    run = RunFacts({name: torch.empty(count, device="meta") for name, count in names.items()}, "lora")
    given = OptimizerSettings(**{"optimizer": "sgd", "learning_rate": 1e-4, **settings})
    if not is_refused:
        check_run(given, run)
        return
    with pytest.raises(ValueError, match=r"each of 4,000,000 weights by at most 5e-07 .* set learning rate to 0\.1"):
        check_run(given, run)


def test_a_hundred_such_steps_are_shorter_than_one_of_adamw():
    """Along the same clipped gradient again and again, which is the furthest that they can come."""
    gradient = torch.randn(4_000_000, generator=torch.Generator().manual_seed(0))
    gradient /= gradient.norm()
    way = {}
    for name, optimizer, steps in (
        ("sgd", lambda p: torch.optim.SGD([p], 1e-4, momentum=0.9), 100),
        ("adamw", lambda p: torch.optim.AdamW([p], 1e-4), 1),
    ):
        weights = torch.nn.Parameter(torch.zeros(4_000_000))
        weights.grad = gradient
        moving = optimizer(weights)
        for _ in range(steps):
            moving.step()
        way[name] = float(weights.detach().square().mean().sqrt())
    assert way["sgd"] < way["adamw"]


def test_adafactor_moves_whole_weights_at_adamws_rate_and_goes_on_with_runs_of_before(lab):
    """Whole weights are far from 0; an adapter that has moved is trained further."""
    given = {"optimizer": "adafactor", "schedule": "constant", "warmup": 0}
    denoiser, dataset = lab.Flow(), lab.pictures()
    lab.state(denoiser, dataset, AdapterSettings("full"), learning_rate=1e-4, **given)
    moved = train(lab.state(denoiser, dataset, learning_rate=1e-2, **given), denoiser, dataset, 1)
    lower = replace(moved.settings.optimizer, learning_rate=1e-4)
    assert change_settings(moved, lower, None).settings.optimizer == lower


@pytest.mark.parametrize("optimizer", ["prodigy", "adafactor"])
def test_what_is_refused_would_not_have_learned(lab, monkeypatch, optimizer):
    """In 200 steps at 1e-4 an adapter does not come as far as in one of AdamW's."""
    pytest.importorskip({"prodigy": "prodigyopt"}.get(optimizer, "torch"))
    given = {"learning_rate": 1e-4, "clip_norm": 1.0, "schedule": "constant", "warmup": 0, "weight_decay": 0.0}
    denoiser, dataset = lab.Flow(), lab.pictures()

    def way(name, steps):
        begun = lab.state(denoiser, dataset, optimizer=name, **given)
        trained = train(begun, denoiser, dataset, steps).trained
        return max(float((t - begun.trained[key]).abs().max()) for key, t in trained.items() if is_up(key))

    one = way("adamw", 1)
    get = OPTIMIZERS.get
    allowed = replace(get(optimizer), cannot_learn=lambda *_: [])
    monkeypatch.setattr(OPTIMIZERS, "get", lambda name: {optimizer: allowed}.get(name) or get(name))
    assert way(optimizer, 200) < one
