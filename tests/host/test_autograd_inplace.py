"""Changes in place under autograd, against the same formulas without them."""

import pytest
import torch
from graft_nodes.host.autograd_inplace import AvoidInplaceOps
from graft_nodes.training.memory.allocations import AutocastOnMeta, FusedAttention


def _leaf(seed):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def _gradients(forward, *leaves):
    for leaf in leaves:
        leaf.grad = None
    out = forward(*leaves)
    out.square().sum().backward()
    return out.detach().clone(), [leaf.grad.clone() for leaf in leaves]


def added(x, y):
    h = x.exp()
    h += y.sin()  # exp's backward needs the h from before
    h *= y
    h -= x
    h /= y.square() + 1
    return h


def plain(x, y):
    return ((x.exp() + y.sin()) * y - x) / (y.square() + 1)


def reused(x, y):
    h = x.exp()
    out = h
    h = torch.add(h, y.sin(), out=out)
    return torch.mul(h, y, out=h)


def afresh(x, y):
    return (x.exp() + y.sin()) * y


@pytest.mark.parametrize(("forward", "expected"), [(added, plain), (reused, afresh)])
def test_gradients_are_those_of_new_tensors(forward, expected):
    leaves = _leaf(0), _leaf(1)
    wanted = _gradients(expected, *leaves)
    with AvoidInplaceOps():
        found = _gradients(forward, *leaves)
        assert torch.autograd.gradcheck(forward, leaves)
    assert torch.allclose(found[0], wanted[0]) and all(
        torch.allclose(a, b) for a, b in zip(found[1], wanted[1], strict=True)
    )
    with pytest.raises(RuntimeError):  # without it there is none
        _gradients(forward, *leaves)


@pytest.mark.parametrize(("forward", "expected"), [(added, plain), (reused, afresh)])
def test_other_modes_may_be_entered_inside(forward, expected):
    leaves = _leaf(0), _leaf(1)
    wanted = _gradients(expected, *leaves)
    with AvoidInplaceOps(), FusedAttention(), AutocastOnMeta(torch.bfloat16):
        found = _gradients(forward, *leaves)
        h = leaves[0] * 2
        h.add_(1.0)
        assert torch.equal(h, leaves[0] * 2 + 1)
    assert torch.allclose(found[0], wanted[0])
    assert all(torch.allclose(a, b) for a, b in zip(found[1], wanted[1], strict=True))


def test_a_result_that_is_thrown_away_is_the_change_itself():
    x, scores = _leaf(0), torch.zeros(3, 4, dtype=torch.float64)
    with AvoidInplaceOps():
        torch.exp(torch.ones(3, 4, dtype=torch.float64), out=scores)
        h = x * 2
        h.add_(1.0)
        assert torch.equal(scores, torch.full_like(scores, torch.e)) and torch.equal(h, x * 2 + 1)
        with pytest.raises(RuntimeError, match="out="):  # torch's own answer, not a value that nobody put there
            torch.exp(x, out=scores)


def test_without_gradients_nothing_is_copied():
    x = torch.ones(4)
    with AvoidInplaceOps():
        before, out = x, torch.empty(4)
        x += 1
        assert x is before and torch.add(x, 1, out=out) is out
        y = _leaf(0)
        with torch.no_grad():
            held = y.data
            held += 1
            assert torch.equal(held, y)


def test_types_stay():
    x, half = _leaf(0), torch.zeros(3, 4, dtype=torch.bfloat16)
    with AvoidInplaceOps():
        made = torch.add(x, 1, out=half)
        assert made.dtype == torch.bfloat16 and made.requires_grad
