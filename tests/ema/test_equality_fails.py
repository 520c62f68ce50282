"""The tests of equal weights fail when the average is wrong: each is run against averages that are broken on purpose.

diffusers' own test reads `assert ~torch.allclose(...)`: ~True is -2 and ~False is -1, both true, so that it never
fails.
"""

import ast
import importlib.util
from pathlib import Path

import pytest
import torch
from graft_nodes.ema import shadow, update
from graft_nodes.ema.decay import EMASettings, decay_at, decay_over

TESTS = Path(__file__).resolve().parents[1]


def load(name):
    spec = importlib.util.spec_from_file_location(f"graft_mutated_{name}", Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def half(kept, weights, decay):
    """A bf16 average, which never moves at a high decay."""
    for name, tensor in kept.items():
        tensor.copy_(tensor.bfloat16().lerp_(weights[name].bfloat16(), 1 - decay).float())


AVERAGES = {
    "never moves": lambda kept, weights, decay: None,
    "copies": lambda kept, weights, decay: [kept[name].copy_(weights[name]) for name in kept],
    "bf16": half,
    "decay the wrong way round": lambda kept, weights, decay: update.average_(kept, weights, 1 - decay),
    "skips a tensor": lambda kept, weights, decay: update.average_({"a": kept["a"]}, {"a": weights["a"]}, decay),
}
DECAYS = {
    "a step late": lambda settings, step, total: decay_over(settings, step + 1, total),
    "forgets the cap": lambda settings, step, total: min(0.9, decay_over(settings, step, total)),
    "a little off": lambda settings, step, total: 0.998 * decay_over(settings, step, total),
}


@pytest.mark.parametrize("mutant", [*AVERAGES, *DECAYS])
def test_equality_with_float64_and_diffusers_fails_for(mutant, monkeypatch):
    checks = load("test_equal_to_diffusers")
    monkeypatch.setattr(checks, "STEPS", 300)
    warm = EMASettings("warmup", 0.9999)
    checks.test_equal_to_float64(warm)  # the unbroken average passes
    if mutant in AVERAGES:
        monkeypatch.setattr(shadow, "average_", AVERAGES[mutant])
    else:
        monkeypatch.setattr(shadow, "decay_over", DECAYS[mutant])
    with pytest.raises(AssertionError):
        checks.test_equal_to_float64(warm)
    pytest.importorskip("diffusers")
    with pytest.raises(AssertionError):
        checks.test_equal_to_diffusers(warm, {"decay": 0.9999, "use_ema_warmup": True}, foreach=True)


def test_the_interval_test_fails_without_decay_to_the_n(monkeypatch):
    checks = load("test_equal_to_diffusers")
    monkeypatch.setattr(checks, "STEPS", 2000)
    monkeypatch.setattr(shadow, "decay_over", lambda settings, step, total: decay_at(settings, step, total))
    with pytest.raises(AssertionError):
        checks.test_an_interval_is_the_same_average_on_a_smooth_path(10)


def test_equal_weights_are_told_from_unequal_ones():
    same = load("test_equal_to_diffusers").same
    one = {"a": torch.ones(3)}
    same(one, {"a": torch.ones(3)}, 0.0)
    more = {"a": torch.ones(3), "b": torch.ones(1)}
    for other in ({"a": torch.tensor([1.0, 1.0, 1.001])}, {"a": torch.ones(4)}, {"b": torch.ones(3)}, {}, more):
        with pytest.raises(AssertionError):
            same(one, other, 1e-6)
    with pytest.raises(AssertionError):
        same(one, {"a": torch.tensor([1.0, float("nan"), 1.0])}, 1e-6)


def test_no_test_inverts_a_truth_value_bit_by_bit():
    assert ~True and ~False  # why `assert ~x` proves nothing
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            inverted = (
                isinstance(node, ast.Assert)
                and isinstance(node.test, ast.UnaryOp)
                and isinstance(node.test.op, ast.Invert)
            )
            assert not inverted, f"{path}:{node.lineno}"
