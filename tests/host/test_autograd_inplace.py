"""Changes in place under autograd, against the same formulas without them."""

import pytest
import torch
from graft_nodes.host.autograd_inplace import AvoidInplaceOps


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


def called(x, y):
    h = x.exp()  # exp's backward needs the h from before
    h.add_(y.sin())
    again = h.square()  # and so does this one
    h.addcmul_(y, x, value=0.5)
    h.mul_(y).clamp_(min=-50.0)
    for _ in range(2):
        again = again + h.tanh()
        h.sub_(again)
    return h


def called_plain(x, y):
    h = x.exp() + y.sin()
    again = h.square()
    h = torch.clamp((h + 0.5 * y * x) * y, min=-50.0)
    for _ in range(2):
        again = again + h.tanh()
        h = h - again
    return h


def under_two_names(x, y):
    h = x.exp()
    other = h
    h.add_(y)
    return h * other.sin()


def under_one_name(x, y):
    h = x.exp() + y
    return h * h.sin()


def seen_by_an_inner_function(x, y):
    h = x.exp()

    def squared():
        return h.square()

    h.add_(y)
    return squared() + h


def without_inner_function(x, y):
    h = x.exp() + y
    return h.square() + h


def returned(x, y):
    def modulate(h):
        return h.mul_(y).add_(1.0)

    return modulate(x.exp())


def returned_plain(x, y):
    return x.exp() * y + 1.0


def filled(x, y):
    h = x.exp()
    h.copy_(y.sin() * h)
    return h


def filled_plain(x, y):
    return y.sin() * x.exp()


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (added, plain),
        (reused, afresh),
        (called, called_plain),
        (under_two_names, under_one_name),
        (seen_by_an_inner_function, without_inner_function),
        (returned, returned_plain),
        (filled, filled_plain),
    ],
)
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


def test_a_result_that_is_thrown_away_is_the_change_itself():
    x, scores = _leaf(0), torch.zeros(3, 4, dtype=torch.float64)
    with AvoidInplaceOps():
        torch.exp(torch.ones(3, 4, dtype=torch.float64), out=scores)
        h = x * 2
        h.add_(1.0)
        assert torch.equal(scores, torch.full_like(scores, torch.e)) and torch.equal(h, x * 2 + 1)
        with pytest.raises(RuntimeError, match="out="):  # torch's own answer, not a value that nobody put there
            torch.exp(x, out=scores)


def on_a_part(x, y):
    h = x * 2
    h[:, :2].add_(y[:, :2])
    return h


def for_the_caller(x, y):
    def add(h):
        h.add_(y)

    h = x * 2
    add(h)
    return h


def of_a_list(x, y):
    parts = [x * 2, y * 3]
    for part in parts:
        part.add_(y)
    return parts[0] * 1 + parts[1]


def through_a_view(x, y):
    h = x * 2
    flat = h.view(-1)
    flat.add_(y.view(-1))
    return h + flat.view_as(h)


def under_a_view(x, y):
    h = x * 2
    flat = h.view(-1)
    h.add_(y)
    return h + flat.view_as(h)


def in_a_dictionary(x, y):
    state = {"h": x * 2}
    h = state["h"]
    h.add_(y)
    return state["h"] + h


def of_an_object(x, y):
    class Holder:
        h = x * 2

    Holder.h.add_(y)
    return Holder.h


def first_of_two(x, y):
    both = torch.cat([x * 2, y])
    first, second = both[:3], both[3:]
    first.add_(second)
    second.sub_(x)
    return both


@pytest.mark.parametrize(
    "forward",
    [
        on_a_part,
        for_the_caller,
        of_a_list,
        through_a_view,
        under_a_view,
        in_a_dictionary,
        of_an_object,
        first_of_two,
    ],
)
def test_a_change_that_others_see_stays_a_change(forward):
    x, y = _leaf(0), _leaf(1)
    with torch.no_grad():
        wanted = forward(x, y)
    with AvoidInplaceOps():
        assert torch.equal(forward(x, y), wanted)
        assert torch.autograd.gradcheck(forward, (x, y))


def test_a_trained_tensor_is_not_changed():
    x = _leaf(0)
    with AvoidInplaceOps(), pytest.raises(RuntimeError, match="leaf Variable"):
        x.add_(1.0)
        x.square()


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
