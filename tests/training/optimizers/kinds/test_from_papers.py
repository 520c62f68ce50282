"""ADOPT, CAME and Automagic: their authors' formulas in float64, number by number."""

import math

import pytest
import torch
from graft_nodes.training.optimizers.kinds.adopt import ADOPT
from graft_nodes.training.optimizers.kinds.automagic import Automagic
from graft_nodes.training.optimizers.kinds.came import CAME
from graft_nodes.training.optimizers.option_readers import THREE_BETAS
from graft_nodes.training.optimizers.options import parse
from graft_nodes.training.optimizers.settings import OptimizerSettings

SHAPES = {"matrix": (6, 4), "vector": (5,), "convolution": (4, 3, 2, 3)}
STEPS = 7


def _numbers(shape, seed, scale):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def _gradients(shape):
    """One is far larger than the others, so that clipping has to act, and one number never has a gradient."""
    gradients = []
    for step in range(STEPS):
        gradient = _numbers(shape, 10 + step, 5.0 if step == 3 else 0.05)
        gradient.view(-1)[0] = 0
        gradients.append(gradient)
    return gradients


def _mean_of(numbers):
    return math.fsum(numbers) / len(numbers)


def _size(numbers):
    return math.sqrt(_mean_of([number**2 for number in numbers.flatten().tolist()]))


class _Second:
    """The mean of squares with a beta, whole for a vector, else as Adafactor's rows and columns of each matrix."""

    def __init__(self, beta):
        self.beta, self.whole, self.rows, self.columns = beta, 0.0, 0.0, 0.0

    def root(self, square):
        if square.dim() == 1:
            self.whole = self.beta * self.whole + (1 - self.beta) * square
            return self.whole.sqrt()
        self.rows = self.beta * self.rows + (1 - self.beta) * square.mean(-1)
        self.columns = self.beta * self.columns + (1 - self.beta) * square.mean(-2)
        product = torch.einsum("...i,...j->...ij", self.rows, self.columns)
        return (product / self.rows.mean(-1)[..., None, None]).sqrt()


def _adopt(p, gradients, rate, decay, beta1=0.9, beta2=0.9999, eps=1e-6):
    """Algorithm 2 of 2411.02853: v of the step before, clipped to t^(1/4); the first step only begins v."""
    v, m = gradients[0] ** 2, torch.zeros_like(p)
    for t, g in enumerate(gradients[1:], 1):
        scaled = g / torch.maximum(v.sqrt(), torch.tensor(eps, dtype=torch.float64))
        m = beta1 * m + (1 - beta1) * torch.clamp(scaled, -(t**0.25), t**0.25)
        p = p - rate * decay * p - rate * m
        v = beta2 * v + (1 - beta2) * g**2
    return p


def _came(p, gradients, rate, decay, betas=(0.9, 0.999, 0.9999), threshold=1.0):
    """Algorithm 2 of 2307.02047, with the instability for matrices alone as in the authors' code."""
    m, second, instability = torch.zeros_like(p), _Second(betas[1]), _Second(betas[2])
    for g in gradients:
        u = g / second.root(g**2 + 1e-30)
        u = u / max(1.0, _size(u) / threshold)
        m = betas[0] * m + (1 - betas[0]) * u
        step = m
        if p.dim() > 1:
            step = m / instability.root((u - m) ** 2 + 1e-16)
        p = p - rate * decay * p - rate * step
    return p


def _automagic(p, gradients, rate, decay, least=1e-7, most=1e-3, bump=1e-6, beta2=0.999):
    """AI-Toolkit's rule: the sign of the update against that of the step before, at first as if not positive."""
    rates, positive, second = torch.full_like(p, rate), torch.zeros_like(p, dtype=torch.bool), _Second(beta2)
    for g in gradients:
        u = g / second.root(g**2 + 1e-30)
        u = u / max(1.0, _size(u))
        for at in range(p.numel()):
            same = bool(u.view(-1)[at] > 0) == bool(positive.view(-1)[at])
            moved = float(rates.view(-1)[at]) + (bump if same else -bump)
            rates.view(-1)[at] = min(max(moved, least), most)
        positive = u > 0
        p = p - decay * rates * p - rates * u
    return p


CASES = [
    (ADOPT, _adopt, 1e-2, {}, {}),
    (ADOPT, _adopt, 1e-2, {"betas": (0.5, 0.9), "eps": 1e-1}, {"beta1": 0.5, "beta2": 0.9, "eps": 1e-1}),
    (CAME, _came, 1e-2, {}, {}),
    (
        CAME,
        _came,
        1e-2,
        {"betas": (0.5, 0.9, 0.8), "clip_threshold": 0.3},
        {"betas": (0.5, 0.9, 0.8), "threshold": 0.3},
    ),
    (Automagic, _automagic, 1e-6, {}, {}),
    (
        Automagic,
        _automagic,
        5e-4,
        {"min_lr": 3e-4, "max_lr": 6e-4, "lr_bump": 1e-4, "beta2": 0.9},
        {"least": 3e-4, "most": 6e-4, "bump": 1e-4, "beta2": 0.9},
    ),
]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize(("kind", "formula", "rate", "options", "theirs"), CASES)
def test_its_steps_are_its_authors_formulas(kind, formula, rate, options, theirs, shape):
    start, gradients = _numbers(shape, 1, 0.3), _gradients(shape)
    p = torch.nn.Parameter(start.clone())
    optimizer = kind([p], lr=rate, weight_decay=0.1, **options)
    for gradient in gradients:
        p.grad = gradient.clone()
        optimizer.step()
    expected = formula(start, gradients, rate, 0.1, **theirs)
    moved = (expected - start).abs().max()
    assert (p.detach() - expected).abs().max() <= 1e-9 * moved


def test_adopts_first_step_moves_nothing():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = ADOPT([p], lr=1.0, weight_decay=0.5)
    p.grad = torch.tensor([1.0, -2.0, 0.0])
    optimizer.step()
    assert p.tolist() == [1.0, 1.0, 1.0] and optimizer.state[p]["exp_avg_sq"].tolist() == [1.0, 4.0, 0.0]


def test_automagic_raises_the_rate_of_a_steady_number_alone():
    """The first step lowers it to min_lr, 1e-7, and the 49 others raise it by 1e-6 each."""
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = Automagic([p], lr=1e-6)
    for step in range(50):
        p.grad = torch.tensor([1.0, (-1.0) ** step])
        optimizer.step()
    steady, swinging = optimizer.state[p]["rate"].tolist()
    assert steady == pytest.approx(49.1e-6, rel=1e-3) and swinging == pytest.approx(1e-7, rel=1e-3)


def test_automagic_refuses_settings_that_it_would_ignore():
    with pytest.raises(ValueError, match="automagic sets the rate of each number itself, so learning rate schedule"):
        OptimizerSettings(optimizer="automagic", schedule="cosine")
    with pytest.raises(ValueError, match=r"min_lr is 0\.01 and max_lr 0\.001"):
        parse("automagic", "min_lr = 0.01")


def test_came_takes_three_betas():
    assert parse("came", "betas = 0.9, 0.99, 0.999") == {"betas": (0.9, 0.99, 0.999)}
    with pytest.raises(ValueError, match="three numbers from 0, below 1"):
        parse("came", "betas = 0.9 0.99")
    assert THREE_BETAS.read("0 0 0") == (0, 0, 0)
