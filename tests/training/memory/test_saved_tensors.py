"""Changes in place of what gradients need: gradients against the same formulas without such changes, in float64, or a
refusal.
"""

import threading
from contextlib import nullcontext

import pytest
import torch
from graft_nodes.training.memory.checkpointing import checkpoint_blocks
from graft_nodes.training.memory.offload import activations_on_host
from graft_nodes.training.memory.saved_tensors import (
    CopiesWhereNeeded,
    CopyBeforeChange,
    KeptTensor,
    active_mode,
    copy_before_changes,
    leave_modes,
)
from torch import nn
from torch.nn.functional import silu
from torch.testing._internal.two_tensor import TwoTensor


def leaf(seed, *shape):
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (3, 4)), generator=draws, dtype=torch.float64).requires_grad_()


def gradients(forward, *leaves):
    for given in leaves:
        given.grad = None
    out = forward(*leaves)
    out.square().sum().backward()
    return [out.detach().clone(), *(given.grad.clone() for given in leaves)]


def slope(forward, leaves, ways):
    """The change of the sum of squares along `ways`, by central differences."""
    values = []
    for sign in (1e-6, -1e-6):
        with torch.no_grad():
            moved = [given + sign * way for given, way in zip(leaves, ways, strict=True)]
            values.append(float(forward(*moved).square().sum()))
    return (values[0] - values[1]) / 2e-6


def several(x, y):
    h = x.exp()  # exp's backward needs the h from before
    h.add_(y.sin())
    again = h.square()  # and so does this one
    h.addcmul_(y, x, value=0.5)
    h.mul_(y).clamp_(min=-50.0)
    return h * again


def several_anew(x, y):
    h = x.exp() + y.sin()
    again = h.square()
    return torch.clamp((h + 0.5 * y * x) * y, min=-50.0) * again


def slice_kept(x, y):
    h = x * 1
    kept = h[1:].square()
    h.addcmul_(y, y)
    return torch.cat([kept, h])


def slice_kept_anew(x, y):
    return torch.cat([x[1:].square(), x + y * y])


def slice_changed(x, y):
    h = x.exp()
    h[1:].addcmul_(y[1:], h[1:])
    h[:, 2] = y[:, 1]
    return h * h


def slice_changed_anew(x, y):
    h = x.exp()
    h = torch.cat([h[:1], h[1:] + y[1:] * h[1:]])
    h = torch.cat([h[:, :2], y[:, 1:2], h[:, 3:]], 1)
    return h * h


def under_a_view(x, y):
    h = x.exp()
    flat = h.view(-1)
    kept = flat.sin()
    h.add_(y)
    return h * flat.view_as(h) + kept.view_as(h)


def under_a_view_anew(x, y):
    h = x.exp()
    kept = h.sin()
    h = h + y
    return h * h + kept


def neighbors(x, y):
    both = torch.cat([x * 2, y])
    first, second = both[:3], both[3:]
    product = first * second
    first.add_(second)
    second.sub_(x)
    return both * product.repeat(2, 1)


def neighbors_anew(x, y):
    product = x * 2 * y
    first = x * 2 + y
    return torch.cat([first, y - x]) * product.repeat(2, 1)


def with_itself(x, y):
    h = x * y
    h.addcmul_(h, y)
    return h.mul_(h)


def with_itself_anew(x, y):
    h = x * y + x * y * y
    return h * h


def for_the_caller(x, y):
    def modulate(h):
        h.mul_(y).add_(1.0)

    h = x.exp()
    modulate(h)
    state = {"h": h}
    out = h.square()
    state["h"].copy_(y.sin() * out)
    return h * out


def for_the_caller_anew(x, y):
    out = (x.exp() * y + 1).square()
    return y.sin() * out * out


def activated(x, y):
    h = x * y
    kept = h.square()
    silu(h, inplace=True).mul_(y)
    h.masked_fill_(y > 0.5, 0.25)
    torch._foreach_add_([h, kept], [y, x])
    return h * kept


def activated_anew(x, y):
    h = x * y
    kept = h.square() + x
    h = (silu(h) * y).masked_fill(y > 0.5, 0.25) + y
    return h * kept


def again_and_again(x, y):
    """Many short-lived tensors, which take each other's places in memory."""
    total = x * 0
    for _ in range(50):
        h = x.sin()
        square = h.square()
        h.addcmul_(y, square)
        total = total + square * h
        del h, square
    return total


def again_and_again_anew(x, y):
    square = x.sin().square()
    return 50 * square * (x.sin() + y * square)


PAIRS = [
    (several, several_anew),
    (slice_kept, slice_kept_anew),
    (slice_changed, slice_changed_anew),
    (under_a_view, under_a_view_anew),
    (neighbors, neighbors_anew),
    (with_itself, with_itself_anew),
    (for_the_caller, for_the_caller_anew),
    (activated, activated_anew),
    (again_and_again, again_and_again_anew),
]


@pytest.mark.parametrize(("forward", "anew"), PAIRS, ids=[forward.__name__ for forward, _ in PAIRS])
def test_gradients_are_those_of_new_tensors(forward, anew):
    leaves = leaf(0), leaf(1)
    wanted = gradients(anew, *leaves)
    with copy_before_changes():
        found = gradients(forward, *leaves)
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(found, wanted, strict=True))
    ways = leaf(2).detach(), leaf(3).detach()
    along = sum(float((gradient * way).sum()) for gradient, way in zip(found[1:], ways, strict=True))
    assert along == pytest.approx(slope(forward, leaves, ways), rel=1e-6)


def without_gradient(h, y):
    with torch.no_grad():
        h.mul_(y)


def detached(h, y):
    h.detach().mul_(y)


def data(h, y):
    h.data.mul_(2)


@pytest.mark.parametrize("change", [without_gradient, detached, data])
def test_changes_that_autograd_does_not_record_are_refused(change):
    x, y = leaf(0), leaf(1)
    with copy_before_changes():
        h = x.exp()
        kept = h.square()
        change(h, y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (kept * h).sum().backward()


def test_changes_after_the_context_are_refused_and_copies_stay():
    x, y = leaf(0), leaf(1)
    with copy_before_changes():
        out = several(x, y)
        late = (h := x.exp()).square()
    out.sum().backward()
    found = x.grad.clone()
    x.grad = None
    several_anew(x, y).sum().backward()
    assert torch.allclose(found, x.grad, rtol=1e-12)
    h.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.sum().backward()


def test_only_what_changes_is_copied_and_nothing_stays():
    kept = []

    def pack(tensor):
        kept.append(KeptTensor(tensor))
        return kept[-1]

    x, y = leaf(0), leaf(1)
    with CopyBeforeChange() as mode, torch.autograd.graph.saved_tensors_hooks(pack, KeptTensor.value):
        h = x.exp()
        out = h.sin() * y
        h.add_(y)
        assert sum(one.is_copy for one in kept) == 2 < len(kept)  # exp's result, which sin got too
        out.sum().backward()
        kept.clear()
        left = [mode.memory(tensor) for tensor in (x, y, h, out)]
        assert not any(memory.kept for memory in left)


# --- blocks that are checkpointed, and activations in host memory -----------------------------------------------------


class Block(nn.Module):
    """Linear layers with products between them, without changes in place."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(width, width), nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x, options):
        h = self.first(x).exp()
        h = h + (h * self.second(self.norm(x))) * h
        return x + h.tanh() * x, options[0] * h


class OfItsOwn(Block):
    """It changes what it has made itself, and computes on: to stop early helps nobody."""

    def forward(self, x, options):
        h = self.first(x).exp()
        h.addcmul_(h * self.second(self.norm(x)), h)
        return x + h.tanh() * x, options[0] * h


class OfItsInputs(Block):
    """It changes its input and one in a list."""

    def forward(self, x, options):
        h = self.first(x).exp()
        h.addcmul_(h * self.second(self.norm(x)), h)
        options[0].mul_(h)
        x.addcmul_(h.tanh(), x)
        return x, options[0]


class Net(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.blocks = nn.ModuleList([block(4), block(4)]).double()
        draws = torch.Generator().manual_seed(0)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=draws, dtype=torch.float64) * 0.5

    def forward(self, x, other):
        x, other = x * 1, other * 1
        for block in self.blocks:
            x, other = block(x, [other])
        return x * other


def trained(net, graded=True):
    x, other = leaf(1).requires_grad_(graded), leaf(2).requires_grad_(graded)
    net(x, other).sum().backward()
    found = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    return found + [given.grad for given in (x, other) if graded]


@pytest.mark.parametrize(("block", "graded"), [(OfItsOwn, False), (OfItsOwn, True), (OfItsInputs, True)])
def test_checkpointing_gives_the_same_bytes(block, graded):
    wanted, net = trained(Net(Block), graded), Net(block)
    with copy_before_changes():
        plain = trained(net, graded)
        with checkpoint_blocks(net):
            forgotten = trained(net, graded)
    assert all(torch.equal(a, b) for a, b in zip(plain, forgotten, strict=True))
    assert all(torch.allclose(a, b, rtol=1e-10) for a, b in zip(forgotten, wanted, strict=True))


def test_changes_of_an_input_without_gradient_are_refused():
    """Whether another name of its memory needs a gradient cannot be known. A block that runs again stops before."""
    net = Net(OfItsInputs)
    with copy_before_changes(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        trained(net, graded=False)
    net.zero_grad()
    with copy_before_changes(), checkpoint_blocks(net):
        found = trained(net, graded=False)
    assert all(torch.allclose(a, b, rtol=1e-10) for a, b in zip(found, trained(Net(Block), False), strict=True))


def test_without_copies_a_checkpointed_block_is_refused():
    """torch's own checkpoint() gives another gradient here, without a word."""
    with pytest.raises(RuntimeError, match="modified by an inplace operation"), checkpoint_blocks(net := Net(OfItsOwn)):
        trained(net)
    with (
        pytest.raises(RuntimeError, match="OfItsInputs changes its input in place"),
        checkpoint_blocks(net := Net(OfItsInputs)),
    ):
        trained(net)


def test_a_checkpointed_block_may_be_computed_again_in_another_thread_and_twice():
    wanted, net = trained(Net(Block)), Net(OfItsInputs)
    with copy_before_changes(), checkpoint_blocks(net):
        out = net(leaf(1), leaf(2)).sum()
    for retain in (True, False):
        net.zero_grad()
        thread = threading.Thread(target=out.backward, kwargs={"retain_graph": retain})
        thread.start()
        thread.join()
        found = [p.grad for p in net.parameters()]
        assert all(torch.allclose(a, b, rtol=1e-10) for a, b in zip(found, wanted[: len(found)], strict=True))


def test_a_block_that_computes_something_else_again_is_refused():
    class Changing(Block):
        calls = 0

        def forward(self, x, options):
            self.calls += 1
            if self.calls == 2:
                return x * 2, options[0].exp()
            return super().forward(x, options)

    net = Net(Changing)
    with (
        checkpoint_blocks(net),
        pytest.raises(RuntimeError, match="Changing computes something else when it runs again"),
    ):
        trained(net)


def test_autocast_is_that_of_the_first_run():
    net = Net(Block).float()
    x, other = leaf(1).detach().float().requires_grad_(), leaf(2).detach().float()
    found = []
    for forgetful in (False, True):
        with checkpoint_blocks(net if forgetful else nn.Module()):
            with torch.autocast("cpu", torch.bfloat16):
                out = net(x, other)
            out.sum().backward()
        found.append([p.grad.clone() for p in net.parameters()])
        net.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_activations_in_host_memory_are_refused_or_copied_too():
    """What is small or in host memory already is not copied there."""
    wanted, net = trained(Net(Block)), Net(OfItsInputs)
    with activations_on_host(net), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        trained(net)
    net.zero_grad()
    with copy_before_changes(), activations_on_host(net):
        found = trained(net)
        with checkpoint_blocks(net):
            forgotten = trained(net)
    for gradients_of_one in (found, forgotten):
        assert all(torch.allclose(a, b, rtol=1e-10) for a, b in zip(gradients_of_one, wanted, strict=True))


def test_activations_beside_quantized_weights():
    """Weights that are made of other tensors, as ComfyUI's quantized ones are, have no memory of their own."""
    layer, x = nn.Linear(4, 4), leaf(1).detach().float().requires_grad_()
    plain = gradients(layer, x)
    layer.weight = nn.Parameter(TwoTensor(layer.weight.detach(), layer.weight.detach()), requires_grad=False)
    with activations_on_host(layer):
        found = gradients(layer, x)
    for one, other in zip(found, plain, strict=True):
        assert torch.equal(one.a, other) and torch.equal(one.b, other)


# --- which networks need copies ---------------------------------------------------------------------------------------


class Watched(nn.Module):
    """A network of two blocks that notes whether its operations pass through Python."""

    def __init__(self, block):
        super().__init__()
        self.net, self.was_watched = Net(block), []

    def forward(self, x, other, step):
        self.was_watched.append(active_mode() is not None)
        return self.net(x, other)


class InAMethod(Block):
    def forward(self, x, options):
        return self.changed(self.first(x).exp(), x, options)

    def changed(self, h, x, options):
        h.addcmul_(h * self.second(self.norm(x)), h)
        return x + h.tanh() * x, options[0] * h


class ByHelper(Block):
    def forward(self, x, options):
        h = self.first(x).exp()
        scaled(h, self.second(self.norm(x)))
        return x + h.tanh() * x, options[0] * h


def scaled(h, by):
    h.mul_(1 + h * by)


class BySlices(Block):
    def forward(self, x, options):
        h = self.first(x).exp()
        h[:, :2] = (h + (h * self.second(self.norm(x))) * h)[:, :2]
        h[:, 2:] += (h * self.second(self.norm(x)) * h)[:, 2:]
        return x + h.tanh() * x, options[0] * h


def steps_of(net, count, wrap=None):
    """The gradients of some steps, each of a forward and backward pass."""
    found = []
    with CopiesWhereNeeded(net, lambda kwargs: kwargs["step"]), wrap(net) if wrap else nullcontext():
        for step in range(count):
            net(leaf(1), leaf(2), step=step).sum().backward()
            found.append([p.grad.clone() for p in net.parameters()])
            net.zero_grad()
    return found


@pytest.mark.parametrize("wrap", [None, checkpoint_blocks, activations_on_host])
@pytest.mark.parametrize("block", [OfItsOwn, OfItsInputs, InAMethod, ByHelper, BySlices])
def test_a_network_that_changes_what_it_needs_is_found_out_in_its_first_step(block, wrap):
    net = Watched(block)
    wanted = trained(Net(Block))[: len(list(net.parameters()))]
    for found in steps_of(net, 3, wrap=wrap):
        assert all(torch.allclose(a, b, rtol=1e-10) for a, b in zip(found, wanted, strict=True))
    assert net.was_watched == [True] * 3 and "forward" not in vars(net)


@pytest.mark.parametrize("wrap", [None, checkpoint_blocks, activations_on_host])
def test_other_networks_pay_in_one_step_for_each_form_of_inputs(wrap):
    net = Watched(Block)
    with CopiesWhereNeeded(net, lambda kwargs: kwargs["step"]), wrap(net) if wrap else nullcontext():
        with torch.no_grad():
            net(leaf(1), leaf(2), step=0)
        for step, rows in enumerate((3, 3, 5, 1, 1, 3)):  # two passes of one step, as of pairs
            for _ in range(2):
                net(leaf(1, rows, 4), leaf(2, rows, 4), step=step).sum().backward()
    by_step = [False], [True] * 2, [False] * 2, [False] * 2, [True] * 2, [False] * 2, [False] * 2
    assert net.was_watched == [watched for passes in by_step for watched in passes]


class OnceInAWhile(Block):
    is_changing = False

    def forward(self, x, options):
        h = self.first(x).exp()
        if self.is_changing:
            h.mul_(h)
        return x + h.tanh() * self.second(self.norm(x)), options[0] * h


def test_a_change_that_comes_later_is_refused_and_copied_in_the_next_run(monkeypatch):
    monkeypatch.setattr(OnceInAWhile, "is_changing", False)
    net = Watched(OnceInAWhile)
    with (
        pytest.raises(RuntimeError, match=r"^The model changes .* Run it again: .*modified by an inplace operation"),
        CopiesWhereNeeded(net, lambda kwargs: kwargs["step"]),
    ):
        for step in range(2):
            net(leaf(1), leaf(2), step=step).sum().backward()
            OnceInAWhile.is_changing = True
    net.was_watched.clear()
    steps_of(net, 3)
    assert net.was_watched == [True] * 3


@pytest.mark.parametrize("change", [without_gradient, detached, data])
def test_a_change_that_no_copy_can_mend_says_so(change):
    class Hidden(Block):
        def forward(self, x, options):
            h = self.first(x).exp()
            kept = h.square()
            change(h, x)
            return kept, options[0] * h

    with pytest.raises(RuntimeError, match=r"where autograd does not record it .* this version of ComfyUI cannot"):
        steps_of(Watched(Hidden), 1)


def test_what_is_compiled_outside_the_mode_serves_after_it():
    """torch.compile's guards of a tensor subclass, as ComfyUI's quantized weights are, depend on modes."""
    weight, graphs = TwoTensor(torch.ones(4, 4), torch.ones(4, 4)), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x @ weight, backend=backend)
    with copy_before_changes(), leave_modes():
        compiled(leaf(1).float())
    compiled(leaf(1).float())
    torch._dynamo.reset()
    assert len(graphs) == 1
