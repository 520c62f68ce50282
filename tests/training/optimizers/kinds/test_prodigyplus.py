"""Prodigy-Plus-ScheduleFree: its formulas in float64, number by number."""

import math

import pytest
import torch
from graft_nodes.training.optimizers.kinds import schedulefree
from graft_nodes.training.optimizers.kinds.prodigyplus import ProdigyPlus

SHAPES = {"tall": (40, 3), "wide": (3, 40), "vector": (25,), "convolution": (34, 2, 3, 3), "small": (6, 4)}
STEPS = 25


def _numbers(shape, seed, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def _root(v, shape, factored):
    """The root of a second moment; of a matrix with a side of 32 from its means along its two largest sides."""
    if not factored or len(shape) < 2 or max(shape) < 32:
        return v.sqrt()
    rows, columns = sorted(range(len(shape)), key=lambda at: (shape[at], at))[-2:]
    row, column = v.mean(columns, keepdim=True), v.mean(rows, keepdim=True)
    return (row * column / row.mean(rows, keepdim=True)).sqrt()


class _ByHand:
    """A group of tensors; second moments are kept whole, as means of means are means of the whole."""

    def __init__(self, tensors, rate, **options):
        self.rate, self.options = rate, {"betas": (0.9, 0.99), "eps": 1e-8, "d0": 1e-6, "d_coef": 1.0, **options}
        self.y, self.z, self.first = (dict(tensors) for _ in range(3))
        self.v, self.s = ({name: torch.zeros_like(t) for name, t in tensors.items()} for _ in range(2))
        self.d, self.numerator, self.weights, self.k = self.options["d0"], 0.0, 0.0, 0

    def step(self, gradients):
        o, (beta1, beta2) = self.options, self.options["betas"]
        beta3 = o.get("beta3", beta2**0.5)
        self.k += 1
        rate, share, ready = self.d * self.rate, 1 - beta2, True
        if o.get("use_bias_correction"):
            share = (1 - beta2) / (1 - beta2**self.k)
            longest = 2 / (1 - beta2) - 1
            length = longest - 2 * self.k * beta2**self.k / (1 - beta2**self.k)
            ready = length > 4
            rate *= ready and ((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)) ** 0.5
        self.weights += rate**2
        c = rate**2 / self.weights if self.weights else 0.0
        if o.get("schedulefree_c"):
            c = min(1.0, c * (1 - beta1) * o["schedulefree_c"])
        added = total = 0.0
        for name, g in gradients.items():
            self.v[name] = (1 - share) * self.v[name] + share * self.d**2 * g**2
            u = g
            if ready:
                u = self.d * g / (_root(self.v[name], g.shape, o.get("factored", True)) + self.d * o["eps"])
            size = math.sqrt(float((u * u).sum()) / u.numel())
            if o.get("use_stableadamw", True) and size > 1:
                u = u / size**0.5
            part, weight = slice(None, None, 11), self.d**2 / o["d0"] ** 0.5
            added += weight * float((g * (self.first[name] - self.z[name])).flatten()[part].sum())
            self.s[name] = beta3 * self.s[name] + weight * g
            total += float(self.s[name].flatten()[part].abs().sum())
            u = u + o.get("weight_decay", 0.0) * self.y[name]
            y = self.y[name] + c * (self.z[name] - self.y[name])
            self.z[name] = self.z[name] - rate * u
            self.y[name] = y - rate * (1 - beta1 * (1 - c)) * u
        self.numerator = beta3 * self.numerator + (added if self.d > o["d0"] or added > 0 else 0.0)
        found = self.numerator / total
        if o.get("d_limiter", True):
            found = min(found, self.d * 2**0.25)
        self.d = max(self.d, found * o["d_coef"])

    def sampled(self, name):
        """x, from y = beta1 x + (1 - beta1) z."""
        beta1 = self.options["betas"][0]
        return (self.y[name] - (1 - beta1) * self.z[name]) / beta1


def _group(optimizer, index, gradients):
    for p, gradient in zip(optimizer.param_groups[index]["params"], gradients.values(), strict=True):
        p.grad = gradient.clone()


OPTIONS = [
    {},
    {"weight_decay": 0.1},
    {"use_bias_correction": True},
    {"factored": False},
    {"use_stableadamw": False},
    {"d_limiter": False},
    {"d_coef": 2.0, "d0": 1e-5},
    {"betas": (0.95, 0.999)},
    {"beta3": 0.9},
    {"schedulefree_c": 8.0},
    {"eps": 1e-3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options) or "defaults")
def test_the_formulas(options):
    """Two groups with rates of their own, each with a step size of its own."""
    halves = [dict(list(SHAPES.items())[:3]), dict(list(SHAPES.items())[3:])]
    begun = [{name: _numbers(shape, len(name)) for name, shape in half.items()} for half in halves]
    hands = [_ByHand(tensors, rate, **options) for tensors, rate in zip(begun, (1.0, 0.5), strict=True)]
    groups = [{"params": [torch.nn.Parameter(t.clone()) for t in tensors.values()]} for tensors in begun]
    groups[1]["lr"] = 0.5
    optimizer = ProdigyPlus(groups, **options)
    for step in range(STEPS):
        for index, hand in enumerate(hands):
            gradients = {}
            for number, (name, y) in enumerate(hand.y.items()):
                noise = _numbers(y.shape, 100 * step + 10 * index + number, 0.1)
                gradients[name] = 0.3 * (y - _numbers(y.shape, 7)) + noise
            _group(optimizer, index, gradients)
            hand.step(gradients)
        optimizer.step()
    if "use_bias_correction" not in options:  # which finds it later
        assert all(hand.d > 5 * hand.options["d0"] for hand in hands)
    for hand, group in zip(hands, optimizer.param_groups, strict=True):
        assert group["d"] == pytest.approx(hand.d, rel=1e-9)
        for (name, y), p in zip(hand.y.items(), group["params"], strict=True):
            torch.testing.assert_close(p.detach(), y, rtol=1e-9, atol=1e-12)
            x = schedulefree.average(p, {"z": optimizer.state[p]["z"].float()}, group)
            torch.testing.assert_close(x, hand.sampled(name).float(), rtol=1e-5, atol=1e-5)


def test_a_tensor_without_gradient_stays_and_counts_for_nothing():
    first, alone = (torch.nn.Parameter(_numbers((12,), 1)) for _ in range(2))
    idle = torch.nn.Parameter(_numbers((12,), 2))
    both, one = ProdigyPlus([first, idle]), ProdigyPlus([alone])
    for step in range(5):
        first.grad, alone.grad = _numbers((12,), 10 + step), _numbers((12,), 10 + step)
        both.step()
        one.step()
    assert torch.equal(first, alone) and torch.equal(idle.detach(), _numbers((12,), 2))
    assert both.param_groups[0]["d"] == one.param_groups[0]["d"]
