"""Layers that wait in host memory: how fast their weights come to the device, and how much of that hides behind
computing.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator

import torch
from device_timer import Timer
from graft_nodes.patches.core.host_memory import empty_on_host, pinned
from graft_nodes.training.memory.checkpointing import checkpoint_blocks
from graft_nodes.training.memory.layer_ring import layers_on_host
from torch import Tensor, nn

from .case import CHECKED, CannotRun, Case, Row, Setting, at_least, at_most, row

WIDTH, INNER, BLOCKS, ROUNDS = 3072, 12288, 12, 5  # Flux' widths
FEW, MANY = 16, 4096  # tokens: copying takes longer than computing, and the other way around
SLOWER, HIDDEN = 1.2, 0.8  # of a pinned copy of as many bytes; of the shorter of copying and computing
HALF, LIKE_TORCHS = 0.6, 1.1  # of a step for which all blocks wait; of a copy to memory that PyTorch has pinned
BF16 = torch.bfloat16


class Block(nn.Module):
    """A feed-forward layer."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.wide, self.narrow = (
            nn.Linear(*sides, bias=False, dtype=BF16) for sides in ((width, inner), (inner, width))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Added to x."""
        return x + self.narrow(torch.tanh(self.wide(x)))


class Blocks(nn.Module):
    """Blocks one after another."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.width = WIDTH // 48 if setting.tiny else WIDTH
        inner = INNER // 24 if setting.tiny else INNER
        self.blocks = nn.ModuleList([Block(self.width, inner) for _ in range(BLOCKS)])

    def forward(self, x: Tensor) -> Tensor:
        """Through all of them."""
        for block in self.blocks:
            x = block(x)
        return x


def cases(setting: Setting) -> list[Case]:
    """The same numbers, then the time."""
    return [
        Case("gradients", functools.partial(gradients, setting)),
        Case("copies and overlap", functools.partial(speed, setting)),
        Case("pinned memory", functools.partial(pinned_memory, setting)),
    ]


def step(model: Blocks, device: torch.device, tokens: int) -> Tensor:
    """The gradient of the input."""
    x = torch.linspace(-1, 1, tokens * model.width).view(tokens, -1).to(device, BF16).requires_grad_()
    with checkpoint_blocks(model):
        model(x).float().square().mean().backward()
    assert x.grad is not None
    return x.grad


def gradients(setting: Setting) -> Iterator[Row]:
    """Those of weights that come over, several times in a row, are those of weights that are there."""
    torch.manual_seed(0)
    model = Blocks(setting).requires_grad_(False)
    with layers_on_host(model, setting.device):
        found = [step(model, setting.device, FEW).cpu() for _ in range(ROUNDS)]
    expected = step(model.to(setting.device), setting.device, FEW).cpu()
    assert all(torch.equal(one, expected) for one in found), "the gradients are others than with weights on the device"
    yield row("steps", ROUNDS, "", CHECKED, note="equal bytes to weights on the device")


def speed(setting: Setting) -> Iterator[Row]:
    """A step that copies, one that computes, and one that does both."""
    if setting.device.type == "cpu":
        raise CannotRun("weights are on the CPU already")
    model, timer = Blocks(setting).requires_grad_(False), Timer(setting.device)

    def seconds(tokens: int) -> float:
        step(model, setting.device, tokens)
        return min(timer.seconds(lambda: step(model, setting.device, tokens)) for _ in range(ROUNDS))

    weights = list(model.parameters())
    size = sum(weight.nbytes for weight in weights)
    first = weights[0].detach()
    pinned = torch.empty_like(first, pin_memory=setting.device.type == "cuda").copy_(first)
    there = pinned.to(setting.device)
    limit = min(timer.seconds(lambda: there.copy_(pinned, non_blocking=True)) for _ in range(ROUNDS)) / pinned.nbytes
    with layers_on_host(model, setting.device):
        copying, both = seconds(FEW), seconds(MANY)
    with layers_on_host(model, setting.device, waiting=BLOCKS // 2):
        fewer = seconds(FEW)
    model.to(setting.device)
    computing = seconds(MANY)
    copied = 2 * size * (1 - 0.5 / BLOCKS)  # the last block runs again at once
    note = f"of a pinned copy of as many bytes; {copied / copying / 1e9:.3g} GB/s"
    yield row("copying", copying, "s", at_most(SLOWER), copying / (copied * limit), note)
    yield row("half of the blocks stay", fewer, "s", at_most(HALF), fewer / copying, "of a step for which all wait")
    hidden = (copying + computing - both) / min(copying, computing)
    note = f"of the shorter of copying and computing ({computing:.3g} s); both took {both:.3g} s"
    yield row("hidden behind computing", hidden, "", at_least(HIDDEN), note=note)


def pinned_memory(setting: Setting) -> Iterator[Row]:
    """Memory that is pinned where it lies takes whole pages, is as fast as PyTorch's, and is given back."""
    if setting.device.type == "cpu":
        raise CannotRun("copies to the CPU need no pinned memory")
    there = torch.ones((3 if setting.tiny else 600) * 2**20 + 1, dtype=torch.uint8, device=setting.device)
    timer, before = Timer(setting.device), pinned.used
    place = empty_on_host(there)
    theirs = torch.empty_like(place, pin_memory=setting.device.type == "cuda")
    taken = pinned.used - before
    assert place.is_pinned() and taken < there.nbytes + 8192, f"{taken} bytes were pinned for {there.nbytes}"
    own, torchs = (
        min(timer.seconds(lambda to=to: to.copy_(there, non_blocking=True)) for _ in range(ROUNDS))
        for to in (place, theirs)
    )
    place.copy_(there)
    assert torch.equal(place, there.cpu())
    note = "of a copy to memory that PyTorch has pinned"
    yield row("copied to pinned memory", there.nbytes / own / 1e9, "GB/s", at_most(LIKE_TORCHS), own / torchs, note)
    del place
    gc.collect()
    assert pinned.used == before, "memory is pinned after its tensor has ended"
