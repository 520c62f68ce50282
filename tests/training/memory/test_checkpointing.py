"""Blocks that forget their activations: the same gradients, also of hosts that change tensors in place under a mode of
theirs.
"""

import pytest
import torch
from graft_nodes.host.autograd_inplace import AvoidInplaceOps
from graft_nodes.training.memory.checkpointing import blocks, checkpoint_blocks
from torch import nn


class Block(nn.Module):
    """As a block of Flux: what the first sum overwrites is what the second branch's norm needs in the backward pass."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(width, width), nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x, options):
        x += self.first(x).tanh()
        x += self.second(self.norm(x))
        options["seen"] = options.get("seen", 0) + 1
        return x


class Called(Block):
    """As a block of Chroma in ComfyUI 0.3.64: the same, by calls whose result is thrown away."""

    def forward(self, x, options):
        x.add_(self.first(x).tanh())
        x.addcmul_(torch.ones_like(x), self.second(self.norm(x)))
        return x


class Net(nn.Module):
    def __init__(self, width=6, block=Block):
        super().__init__()
        self.blocks = nn.ModuleList([block(width), block(width)])

    def forward(self, x):
        x, options = x * 1, {}
        for block in self.blocks:
            x = block(x, options)
        return x


def plain(net, x):
    for block in net.blocks:
        x = x + block.first(x).tanh()
        x = x + block.second(block.norm(x))
    return x


def gradients(net, forward, x):
    net.zero_grad()
    forward(x).square().sum().backward()
    return [p.grad.clone() for p in net.parameters()]


@pytest.mark.parametrize("graded", [False, True])
def test_gradients_of_blocks_that_change_their_input(graded):
    draws = torch.Generator().manual_seed(0)
    net = Net().double()
    for p in net.parameters():
        p.data = torch.randn(p.shape, generator=draws, dtype=torch.float64) * 0.5
    x = torch.randn(3, 6, generator=draws, dtype=torch.float64).requires_grad_(graded)
    expected = gradients(net, lambda x: plain(net, x), x)
    with AvoidInplaceOps():
        kept = gradients(net, net, x)
        with checkpoint_blocks(net):
            forgotten = gradients(net, net, x)
            assert not torch.overrides._get_current_function_mode_stack()[1:]  # no mode stays behind
    for one, other, wanted in zip(kept, forgotten, expected, strict=True):
        assert torch.allclose(one, wanted) and torch.allclose(other, wanted)
    assert not [block for block in net.blocks if "forward" in block.__dict__]


class Level(nn.Module):
    """As a resolution of SD's VAE: a bare module, which is never called, holds the blocks."""

    def __init__(self, width=6):
        super().__init__()
        self.levels = nn.ModuleList([nn.Module()])
        self.levels[0].block = nn.ModuleList([Block(width)])
        self.levels[0].upsample = nn.Linear(width, width)

    def forward(self, x):
        return self.levels[0].upsample(self.levels[0].block[0](x * 1, {}))


def test_blocks_that_a_bare_module_holds_are_checkpointed():
    net = Level()
    assert blocks(net) == [net.levels[0].block[0]]
    x, calls = torch.randn(3, 6, generator=torch.Generator().manual_seed(3)), []
    net.levels[0].block[0].first.register_forward_hook(lambda *_: calls.append(1))
    with AvoidInplaceOps():
        kept = gradients(net, net, x)
        assert len(calls) == 1
        with checkpoint_blocks(net):
            forgotten = gradients(net, net, x)
    assert len(calls) == 3
    assert all(torch.equal(one, other) for one, other in zip(kept, forgotten, strict=True))


@pytest.mark.parametrize("graded", [False, True])
def test_a_change_that_a_block_calls_for_is_refused_and_never_silently_wrong(graded):
    net, x = Net(block=Called), torch.randn(3, 6, generator=torch.Generator().manual_seed(2)).requires_grad_(graded)
    said = r"Called changes its input in place.*Switch gradient checkpointing off"
    with pytest.raises(RuntimeError, match=said), AvoidInplaceOps(), checkpoint_blocks(net):
        gradients(net, net, x)
    said = r"^The model changes activations in place.*Graft cannot train it.*modified by an inplace operation"
    with pytest.raises(RuntimeError, match=said), AvoidInplaceOps():
        gradients(net, net, x)


def test_the_backward_pass_may_run_after_the_mode_is_left():
    draws = torch.Generator().manual_seed(1)
    net, x = Net(), torch.randn(3, 6, generator=draws)
    expected = gradients(net, lambda x: plain(net, x), x)
    net.zero_grad()
    with AvoidInplaceOps(), checkpoint_blocks(net):
        loss = net(x).square().sum()
    loss.backward()
    found = [p.grad for p in net.parameters()]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))
