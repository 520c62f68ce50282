"""Everything that goes on a model, on one model at once, coming and leaving in random order: the base is there again.

The numbers are held to an oracle in float64 wherever what is on has exact ones.
"""

import contextlib
import copy
import random

import pytest
import torch
from graft_nodes.patches.adapters.lora import LoRA
from graft_nodes.patches.core.calls import around, has_other_forward
from graft_nodes.patches.core.ledger import ATTRIBUTE, owners
from graft_nodes.patches.core.slots import hold_values, swap
from graft_nodes.patches.models.routed_blocks import RoutedBlocks
from graft_nodes.patches.patching import stack_ledger
from graft_nodes.patches.patching.fuse import Patch, Stack
from graft_nodes.patches.patching.switched_stack import SwitchedStack
from graft_nodes.patches.token_routing.route import RoutedPass
from graft_nodes.training.distributed import fsdp
from graft_nodes.training.memory import layer_ring, offload
from graft_nodes.training.memory.checkpointing import checkpoint_blocks
from graft_nodes.training.memory.inference_tensors import use_normal_tensors
from graft_nodes.training.memory.layer_ring import layers_on_host
from graft_nodes.training.memory.quantized_base.base import quantize_base
from graft_nodes.training.memory.quantized_base.registry import find_format
from graft_nodes.training.memory.saved_tensors import CopiesWhereNeeded
from graft_nodes.training.run.compiled_blocks import BlockCompiler
from graft_nodes.training.trainable.install import attach, init_trainable
from graft_nodes.training.trainable.settings import AdapterSettings
from torch import nn

CPU = torch.device("cpu")
WIDTH = 8
LINEARS = [f"blocks.{number}.{name}" for number in (0, 1) for name in ("to_q", "to_out")]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_q, self.to_out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.to_out(torch.tanh(self.to_q(x)))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.register_buffer("shift", torch.zeros(WIDTH))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight  # tied
        self.requires_grad_(False)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x) + self.shift


class Snapshot:
    """What a model is: bytes, objects, classes, attributes, hooks."""

    def __init__(self, of):
        self.bytes = [tensor.clone() for tensor in (*of.parameters(), *of.buffers())]
        self.parts = [(type(part), {name: id(value) for name, value in vars(part).items()}) for part in of.modules()]
        self.slots = [
            {name: id(tensor) for name, tensor in (*part._parameters.items(), *part._buffers.items())}
            for part in of.modules()
        ]
        self.flags = [parameter.requires_grad for parameter in of.parameters()]
        self.hooks = [
            len(table)
            for part in of.modules()
            for name, table in vars(part).items()
            if "hooks" in name and isinstance(table, dict)
        ]

    def check(self, of):
        now = Snapshot(of)
        assert (now.parts, now.slots, now.flags, now.hooks) == (self.parts, self.slots, self.flags, self.hooks)
        assert all(map(torch.equal, now.bytes, self.bytes))


class Uncompiled(BlockCompiler):
    """Runs what would be compiled: torch.compile itself is tested elsewhere."""

    def forward(self, kind):
        return kind.forward


def stack(seed, names, bypass):
    generator = torch.Generator().manual_seed(seed)
    patches = {
        f"{name}.weight": [
            Patch(LoRA(torch.randn(WIDTH, 2, generator=generator), torch.randn(2, WIDTH, generator=generator)), 0.1)
        ]
        for name in names
    }
    return Stack(patches, patches if bypass else ())


SETTINGS = AdapterSettings(targets="all", pattern="blocks.*", rank=2)
# These lie over weights: what stacks do beneath shows when they have left, and where they share no tied weight at the
# next change of stacks.
ALIASES = {"adapters", "normal", "quantized", "ring"}


@pytest.fixture(scope="module")
def trained():
    of = Network()
    tensors = init_trainable(of, SETTINGS, 3, dict(of.named_parameters()))
    generator = torch.Generator().manual_seed(4)
    return {
        name: tensor + 0.2 * torch.randn(tensor.shape, generator=generator) if tensor.ndim else tensor
        for name, tensor in tensors.items()
    }


@contextlib.contextmanager
def units(of):
    """FSDP2's units around blocks and the whole, without a second rank: nothing is divided."""
    inner = [fsdp.Unit(block, []) for block in of.blocks]
    with contextlib.ExitStack() as on:
        for block, unit in zip(of.blocks, inner, strict=True):
            on.enter_context(around(block, "sharding", unit.call))
        on.enter_context(around(of, "sharding", fsdp.Unit(of, inner).call))
        on.enter_context(around(of, "announcement", lambda _, inner, x: inner(x)))
        yield


class Politely:
    """Another pack's wrapper of a layer; off, it passes everything through if something lies on top of it."""

    def __init__(self, module):
        self.module, self.on = module, True
        found, self.had = module.forward, vars(module).get("forward")
        self.mine = module.forward = lambda x: found(x) * 1.0
        self.found = found

    def leave(self):
        if vars(self.module).get("forward") is self.mine:
            del self.module.forward
            if self.had is not None:
                self.module.forward = self.had
            around(self.module, "copies", lambda _, inner, *args: inner(*args)).leave()  # takes away what is empty


class Sequence:
    """One model with a random sequence of things on it."""

    def __init__(self, seed, trained):
        self.random, self.trained = random.Random(seed), trained
        self.of = Network()
        self.before = Snapshot(self.of)
        self.base = {name: tensor.double() for name, tensor in self.of.state_dict().items()}
        self.changes = {}  # what is on: {what: {weight: float64 change}}
        self.on = {}  # {what: how it leaves}
        self.others = []
        self.is_exact = True

    # --- what may come ------------------------------------------------------------------------------------------------

    def enter(self, name, context):
        stack = contextlib.ExitStack()
        stack.enter_context(context)
        self.on[name] = stack.close

    def stack_comes(self, bypass=None):
        name = f"stack {self.random.randrange(3)}"
        is_bypass = self.random.random() < 0.5 if bypass is None else bypass
        names = self.random.sample([*LINEARS, "first"], self.random.randint(1, 4))
        one = stack(self.random.randrange(10**6), names, is_bypass and "first" not in names)
        stack_ledger.attach(self.of, name, [one])
        self.is_exact = self.is_exact and not ALIASES & self.on.keys()
        self.changes[name] = changes_of(one)
        self.on[name] = lambda: stack_ledger.detach(self.of, name)

    def switched_comes(self):
        one = stack(self.random.randrange(10**6), self.random.sample(LINEARS, 2), True)
        switched = SwitchedStack(self.of, one.patches, (torch.float32, CPU))
        self.changes["switched"], self.on["switched"] = changes_of(one), switched.remove
        with switched.switch_off():
            self.of(INPUT)

    def adapters_come(self):
        self.changes["adapters"] = {}
        for name in LINEARS:
            rank, alpha = SETTINGS.size_of(name)
            up, down = (self.trained[f"{name}.lora_{part}.weight"].double() for part in ("up", "down"))
            self.changes["adapters"][f"{name}.weight"] = up @ down * (alpha / rank)
        self.enter("adapters", attach(self.of, SETTINGS, self.trained, lambda: (0, 0, "")))

    def checkpointing_comes(self):
        self.enter("checkpointing", checkpoint_blocks(self.of))

    def ring_comes(self):
        self.enter("ring", layers_on_host(self.of, CPU))

    def compile_comes(self):
        if not any(has_other_forward(block) for block in self.of.blocks):
            self.enter("compile", Uncompiled(dynamic=False).install(self.of))

    def copies_come(self):
        self.enter("copies", CopiesWhereNeeded(self.of, lambda _: None))

    def routing_comes(self):
        called = RoutedBlocks(blocks="blocks", image="x")
        self.enter("routing", RoutedPass([[(block, called) for block in self.of.blocks]], None, 0.5, 1).enter())

    def units_come(self):
        if "ring" not in self.on:
            self.enter("units", units(self.of))

    def quantized_comes(self):
        self.enter("quantized", quantize_base(self.of, find_format("int8"), CPU))

    def normal_comes(self):
        self.enter("normal", use_normal_tensors(self.of))

    def swap_comes(self):
        self.enter("swap", swap(self.of, "shift", torch.zeros(WIDTH)))

    def values_come(self):
        self.enter("values", hold_values(self.of.first.bias))
        self.of.first.bias.add_(1.0)

    def probe_comes(self):
        self.enter("probe", around(self.of.first, "probe", lambda _, inner, x: inner(x) + 0.0))

    def other_comes(self):
        self.others.append(Politely(self.of.get_submodule(self.random.choice([*LINEARS, "blocks.0", "first"]))))
        self.on["other"] = self.others[-1].leave

    # --- one step -----------------------------------------------------------------------------------------------------

    def step(self):
        if self.on and self.random.random() < 0.4:
            self.leave(self.random.choice(list(self.on)))
        else:
            comes = self.random.choice(COMING)
            name = comes.__name__.removesuffix("_comes").removesuffix("_come")
            if name in self.on:
                self.leave(name)
            elif not (name == "units" and "ring" in self.on) and not (name == "ring" and "units" in self.on):
                comes(self)
        self.compute()

    def leave(self, name):
        self.on.pop(name)()
        self.changes.pop(name, None)
        if name.startswith("stack"):
            self.is_exact = self.is_exact and not ALIASES & self.on.keys()
        has_stack = any(name.startswith("stack") for name in self.on)
        self.is_exact = self.is_exact or not (has_stack or ALIASES & self.on.keys())

    def compute(self):
        choice = self.random.random()
        if choice < 0.1:
            with pytest.raises(RuntimeError, match="on purpose"), around(self.of.blocks[1], "routing", failing):
                self.of(INPUT)
        elif choice < 0.2:
            copied = copy.deepcopy(self.of) if "units" not in self.on and "ring" not in self.on else self.of
            assert torch.equal(copied(INPUT), self.of(INPUT))
        elif choice < 0.5:
            x = INPUT.clone().requires_grad_()
            self.of(x).square().sum().backward()
            assert x.grad is not None and torch.isfinite(x.grad).all()
        self.compare(self.of(INPUT))

    def compare(self, found):
        assert torch.isfinite(found).all()
        if {"routing", "quantized", "values"} & self.on.keys() or not self.is_exact:
            return
        weights = dict(self.base)
        for change in self.changes.values():
            for name, tensor in change.items():
                weights[name] = weights[name] + tensor
        weights["last.weight"] = weights["first.weight"]
        x = INPUT.double() @ weights["first.weight"].T + weights["first.bias"]
        for number in (0, 1):
            hidden = torch.tanh(x @ weights[f"blocks.{number}.to_q.weight"].T + weights[f"blocks.{number}.to_q.bias"])
            x = x + hidden @ weights[f"blocks.{number}.to_out.weight"].T
        assert torch.allclose(found.double(), x @ weights["last.weight"].T, rtol=1e-3, atol=1e-3)

    def end(self):
        for name in self.random.sample(list(self.on), len(self.on)):
            self.leave(name)
        assert not owners(self.of) and ATTRIBUTE not in vars(self.of)
        for other in reversed(self.others):  # what lay on top of another pack's when that left has put it back
            other.leave()
        self.before.check(self.of)


def changes_of(one):
    return {
        name: sum(patch.strength * patch.layer.up.double() @ patch.layer.down.double() for patch in patches)
        for name, patches in one.patches.items()
    }


def failing(module, inner, *args):
    raise RuntimeError("on purpose")


INPUT = torch.linspace(-1, 1, 3 * 4 * WIDTH).view(3, 4, WIDTH)
COMING = [method for name, method in vars(Sequence).items() if name.endswith(("_comes", "_come"))]


def run(count, first, trained, monkeypatch):
    for seed in range(first, first + count):
        monkeypatch.setattr(
            stack_ledger, "is_patched_in_place", lambda base, seed=seed: seed % 3 == 0
        )  # as on a device
        sequence = Sequence(seed, trained)
        try:
            for _ in range(sequence.random.randint(3, 12)):
                sequence.step()
            sequence.end()
        except BaseException as error:
            error.add_note(f"sequence {seed}, with {', '.join(sequence.on)} on")
            raise


@pytest.fixture
def elsewhere(monkeypatch):
    """Every tensor of the CPU stands for one in host memory that comes to a device."""
    monkeypatch.setattr(offload, "is_on_other_device", lambda tensor, device: True)
    monkeypatch.setattr(layer_ring, "copies_ahead", lambda device: True)


def test_a_hundred(elsewhere, trained, monkeypatch):
    run(100, 0, trained, monkeypatch)


@pytest.mark.long
def test_ten_thousand(elsewhere, trained, monkeypatch):
    run(10_000, 1_000, trained, monkeypatch)
