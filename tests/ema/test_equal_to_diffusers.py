"""The running average against diffusers' EMAModel over 5,000 steps, against float64, and with an interval."""

import pytest
import torch
from graft_nodes.ema import shadow as shadows
from graft_nodes.ema.decay import EMASettings, decay_at

STEPS = 5000


def walk(steps, seed=0, jitter=0.01):
    """Weights of two shapes that drift along, one step after another; always the same tensors, changed in place."""
    draw = torch.Generator().manual_seed(seed)
    weights = {"a": torch.randn(7, generator=draw), "b": torch.randn(3, 2, generator=draw)}
    yield weights
    for _ in range(steps):
        for w in weights.values():
            w.mul_(0.999).add_(jitter * torch.randn(w.shape, generator=draw))
        yield weights


def graft(settings, jitter=0.01):
    """The average that Graft keeps of a walk."""
    path = walk(STEPS, jitter=jitter)
    kept = shadows.Shadow.from_weights(next(path))
    for step, weights in enumerate(path, 1):
        kept.update_(weights, settings, step, STEPS)
    return kept.tensors


def same(left, right, tolerance):
    """Equal names, shapes and values: what the tests here mean by equal weights."""
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].shape == right[name].shape
        assert float((left[name].double() - right[name].double()).abs().max()) <= tolerance


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (EMASettings("ramp", 0.9999), {"decay": 0.9999}),
        (EMASettings("ramp", 0.99), {"decay": 0.99}),
        (EMASettings("warmup", 0.9999), {"decay": 0.9999, "use_ema_warmup": True}),
        (
            EMASettings("warmup", 0.999, inv_gamma=2.0, power=0.75),
            {"decay": 0.999, "use_ema_warmup": True, "inv_gamma": 2.0, "power": 0.75},
        ),
        (
            EMASettings("ramp", 0.999, begin_after=100, min_decay=0.5),
            {"decay": 0.999, "update_after_step": 100, "min_decay": 0.5},
        ),
        (
            EMASettings("warmup", 0.999, begin_after=7, min_decay=0.3),
            {"decay": 0.999, "use_ema_warmup": True, "update_after_step": 7, "min_decay": 0.3},
        ),
    ],
)
@pytest.mark.parametrize("foreach", [False, True])
def test_equal_to_diffusers(ours, theirs, foreach):
    training_utils = pytest.importorskip("diffusers.training_utils")
    path = walk(STEPS)
    live = {
        name: torch.nn.Parameter(w) for name, w in next(path).items()
    }  # the same memory; diffusers copies what needs no gradient
    reference = training_utils.EMAModel(list(live.values()), foreach=foreach, **theirs)
    for _ in path:
        reference.step(list(live.values()))
    same(graft(ours), dict(zip(live, reference.shadow_params, strict=True)), 1e-6)


@pytest.mark.parametrize(
    "settings", [EMASettings(schedule, 0.999) for schedule in ("constant", "ramp", "warmup", "power", "target")]
)
def test_equal_to_float64(settings):
    path = walk(STEPS)
    reference = {name: w.double() for name, w in next(path).items()}
    for step, weights in enumerate(path, 1):
        decay = decay_at(settings, step, STEPS)
        reference = {name: decay * reference[name] + (1 - decay) * w.double() for name, w in weights.items()}
    same(graft(settings), reference, 1e-6)


@pytest.mark.parametrize("interval", [2, 5, 10])
def test_an_interval_is_the_same_average_on_a_smooth_path(interval):
    for schedule in ("constant", "power"):
        every = graft(EMASettings(schedule, 0.999), jitter=0.0)
        some = graft(EMASettings(schedule, 0.999, interval=interval), jitter=0.0)
        same(every, some, 1e-3)


def test_an_average_of_half_precision_weights_is_exact_and_moves():
    draw = torch.Generator().manual_seed(4)
    weights = {name: torch.randn(1200, 900, generator=draw).to(torch.bfloat16) for name in ("big", "turned")}
    weights["turned"] = weights["turned"].T
    kept = shadows.Shadow.from_weights({name: torch.zeros_like(w) for name, w in weights.items()})
    expected = {name: torch.zeros(w.shape, dtype=torch.float64) for name, w in weights.items()}
    for step in range(1, 6):
        kept.update_(weights, EMASettings("constant", 0.9999), step, 5)
        expected = {name: 0.9999 * expected[name] + 0.0001 * w.double() for name, w in weights.items()}
    same(kept.tensors, expected, 1e-6)
    assert float(kept.tensors["big"].abs().max()) > 1e-4
