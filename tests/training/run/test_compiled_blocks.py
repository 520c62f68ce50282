"""Blocks under torch.compile while training: the numbers of eager blocks, one compilation for alike blocks, and
none again.
"""

import contextlib
import re
import shutil
from dataclasses import replace

import pytest
import torch
from graft_nodes.host.autograd_inplace import AvoidInplaceOps, copy_where_needed
from graft_nodes.patches.adapters.rank_mask import set_timesteps
from graft_nodes.patches.adapters.registry import trainable_names
from graft_nodes.tests.training.run.compiling_anew import graphs_run_as_they_are
from graft_nodes.training.memory.quantized_base.registry import names
from graft_nodes.training.objective.settings import ObjectiveSettings
from graft_nodes.training.run import compiled_blocks
from graft_nodes.training.run.compiling import CompilationReport
from graft_nodes.training.run.loop import Callbacks, train
from graft_nodes.training.run.workspace import Workspace
from graft_nodes.training.state import change_settings, equal
from graft_nodes.training.trainable.settings import AdapterSettings
from torch import nn
from torch._dynamo.backends import registry

KINDS = [kind for kind in trainable_names() if kind != "full"]
ERROR = 1e-6  # of float32


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    with graphs_run_as_they_are(monkeypatch):
        yield


class Timed:
    """A denoiser that tells adapters the timesteps, as a host does."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def denoise(self, x, sigma, conditionings, options):
        with set_timesteps(sigma * 1000):
            return self.inner.denoise(x, sigma, conditionings, options)


def trained(lab, steps=4, compile="blocks", adapter=None, data=None, state=None, notes=None, module=None, **settings):
    denoiser = Timed(lab.Flow(module))
    data = data or lab.pictures(8)
    state = state or lab.state(denoiser, data, adapter, compile=compile, learning_rate=0.1, optimizer="sgd", **settings)
    return train(state, denoiser, data, steps, Callbacks(note=(notes if notes is not None else []).append))


def compiler():
    """What was compiled in this test; there is one kind of model and one set of sizes."""
    assert compiled_blocks.compiler_for.cache_info().currsize == 1
    return compiled_blocks.compiler_for(*_ARGUMENTS[-1])


_ARGUMENTS = []


@pytest.fixture(autouse=True)
def noted(monkeypatch):
    inner = compiled_blocks.compiler_for

    def noting(*arguments):
        _ARGUMENTS.append(arguments)
        return inner(*arguments)

    noting.cache_clear, noting.cache_info = inner.cache_clear, inner.cache_info
    monkeypatch.setattr(compiled_blocks, "compiler_for", noting)


def far(state, other):
    return max(float((tensor - other.trained[name]).abs().max()) for name, tensor in state.trained.items())


@pytest.mark.parametrize("kind", [*KINDS, "full"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_every_adapter_kind_trains_as_without(lab, monkeypatch, kind, backend):
    monkeypatch.setattr(compiled_blocks, "BACKEND", backend)
    adapter, notes = AdapterSettings(kind=kind, targets="all", rank=2), []
    compiled, plain = trained(lab, adapter=adapter, notes=notes), trained(lab, adapter=adapter, compile="off")
    assert far(compiled, plain) < ERROR and far(compiled, trained(lab, 0, adapter=adapter)) > 1000 * ERROR
    assert compiler().graphs == 2, notes  # the first block's input has no gradient
    assert not [line for line in notes if "break" in line or "more" in line]


@pytest.mark.parametrize("base_weights", names())
@pytest.mark.parametrize(
    ("backend", "kind", "settings"),
    [
        ("aot_eager", "lora", {}),
        ("eager", "dora", {}),
        ("eager", "lora", {"checkpointing": True}),
        ("eager", "lora", {"offload": "layers"}),
    ],
)
def test_a_quantized_base_is_compiled_once_for_all_blocks(lab, monkeypatch, base_weights, backend, kind, settings):
    monkeypatch.setattr(compiled_blocks, "BACKEND", backend)
    adapter, notes = AdapterSettings(kind=kind, targets="all", rank=2, base_weights=base_weights), []
    data, compiled = lab.pictures(8, (8, 6, 6)), []
    for compile in ("blocks", "off"):
        net = lab.Net(8)
        net.blocks = nn.ModuleList(Linears(8) for _ in range(5))
        compiled.append(trained(lab, 3, compile, adapter, data, notes=notes, module=net, **settings))
    assert far(*compiled) < ERROR and far(compiled[0], trained(lab, 0, adapter=adapter, data=data, module=net)) > ERROR
    assert compiler().graphs == 2, notes
    assert not [line for line in notes if "break" in line or "more" in line]


@pytest.mark.parametrize(
    "settings",
    [
        {"checkpointing": True},
        {"offload": "layers"},
        {"offload": "activations"},
        {"precision": "bf16"},
        {"precision": "full-bf16"},
        {"accumulation": 2},
        {"fused_backward": True, "clip_norm": 0.0},
    ],
    ids=str,
)
def test_with_the_settings_of_memory_and_precision(lab, settings):
    compiled, plain = trained(lab, **settings), trained(lab, compile="off", **settings)
    assert far(compiled, plain) < ERROR


def test_six_blocks_share_what_two_compile(lab):
    """All alike blocks but the first, whose input has no gradient, are one compilation."""
    net = lab.Flow().module
    width = net.norm.num_channels
    net.blocks.extend(type(net.blocks[0])(width) for _ in range(4))
    notes = []
    compiled = trained(lab, module=net, notes=notes)
    assert compiler().graphs == 2 and "2 compilations for 6 Block" in notes[0]
    assert far(compiled, trained(lab, module=net, compile="off")) < ERROR
    assert len({name.split(".")[1] for name in compiled.trained if name.startswith("blocks.")}) == 6


def test_nothing_is_compiled_again(lab):
    """Other rates, schedules, seeds, masks, losses and steps are no other code."""
    notes, data = [], lab.pictures(8)
    first = trained(lab, data=data, notes=notes)
    count = compiler().graphs
    assert notes == [
        f"compiled blocks: {count} compilations for 2 Block took {_seconds(notes[0])} s before the first step"
    ]
    with torch._dynamo.config.patch(error_on_recompile=True):
        trained(lab, state=first, data=data, notes=notes)
        other = change_settings(
            first, replace(first.settings.optimizer, learning_rate=1e-3), ObjectiveSettings("huber")
        )
        trained(lab, state=other, data=data, notes=notes)
        trained(lab, data=data, schedule="constant", warmup=0, seed=9, weight_decay=0.1)
        masks = torch.rand(8, 1, 6, 6, generator=torch.Generator().manual_seed(1))
        masked = replace(data, images=tuple(replace(i, mask=m) for i, m in zip(data.images, masks, strict=True)))
        trained(lab, data=masked)
    assert compiler().graphs == count and notes[1:] == ["compiled blocks: as compiled before"] * 2


def _seconds(line):
    return re.search(r"took (\d+\.\d) s", line)[1]


def of_sizes(lab, *shapes):
    """A dataset of pictures of several sizes, the smallest first."""
    parts = [lab.pictures(4, shape) for shape in shapes]
    return replace(parts[0], images=tuple(image for part in parts for image in part.images))


def test_buckets_share_what_is_compiled(lab):
    data, notes = of_sizes(lab, (4, 4, 8), (4, 6, 6), (4, 8, 4), (4, 10, 6)), []
    compiled, plain = trained(lab, 8, data=data, notes=notes), trained(lab, 8, data=data, compile="off")
    assert far(compiled, plain) < ERROR
    assert compiler().dynamic and compiler().graphs == 2 and len(notes) == 1


def test_the_same_bytes_and_where_a_run_goes_on(lab, monkeypatch):
    """Also in a process that has compiled nothing yet, and begins with a picture of another size."""
    monkeypatch.setattr(compiled_blocks, "BACKEND", "aot_eager")
    data = of_sizes(lab, (4, 4, 8), (4, 10, 6))
    whole = trained(lab, 6, data=data)
    for part in (1, 2, 3):
        begun = trained(lab, part, data=data)
        compiled_blocks.compiler_for.cache_clear()
        torch._dynamo.reset()
        assert equal(trained(lab, 6 - part, data=data, state=begun), whole)


def test_another_run_than_without(lab):
    data, denoiser = lab.pictures(8), lab.Flow()
    states = [lab.state(denoiser, data, compile=compile) for compile in ("off", "blocks")]
    moved = [train(state, denoiser, data, 1).key for state in states]
    assert moved[0] != moved[1]


class InPlace(nn.Module):
    """As a block of Flux: `x += y` changes what the norm needs in the backward pass."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(width, width), nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x):
        x = x.movedim(1, -1)
        x += self.first(x).tanh()
        x += self.second(self.norm(x))
        return x.movedim(-1, 1)


def net_of(lab, block):
    net = lab.Net()
    net.blocks = nn.ModuleList([block(4), block(4)])
    return net


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_blocks_that_change_their_input(lab, monkeypatch, backend, checkpointing):
    monkeypatch.setattr(compiled_blocks, "BACKEND", backend)
    found = []
    for compile in ("blocks", "off"):
        with AvoidInplaceOps():
            found.append(trained(lab, module=net_of(lab, InPlace), compile=compile, checkpointing=checkpointing))
    assert far(*found) < ERROR and compiler().graphs == 2


class OfItsOwn(nn.Module):
    """It changes by a call what it has made itself and its gradients need."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        x = x.movedim(1, -1)
        h = self.first(x).sigmoid()
        h.addcmul_(self.second(x), h)
        return (x + h).movedim(-1, 1)


class OfItsInput(OfItsOwn):
    """It changes what the block before it needs."""

    def forward(self, x):
        out = super().forward(x)
        x.mul_(out)
        return out.sigmoid()


@pytest.mark.parametrize(
    ("block", "backend", "error"),
    [(OfItsInput, "eager", RuntimeError), (OfItsOwn, "eager", RuntimeError), (OfItsOwn, "aot_eager", ValueError)],
)
def test_what_must_be_copied_first_is_refused(lab, monkeypatch, block, backend, error):
    """By torch.compile itself, or in the backward pass. Without it the network trains."""
    monkeypatch.setattr(compiled_blocks, "BACKEND", backend)
    net = net_of(lab, block)
    with copy_where_needed(net):
        trained(lab, module=net, compile="off")
    with pytest.raises(error, match=r"set compile (of Optimizer Settings )?to off"), copy_where_needed(net):
        trained(lab, module=net)


class Breaking(nn.Module):
    """Calls what torch.compile cannot see through."""

    def __init__(self, width):
        super().__init__()
        self.one, self.two = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x):
        x = x + self.one(x).tanh()
        torch._dynamo.graph_break()
        return x + self.two(x).tanh()


def test_graph_breaks_are_counted_and_said(lab):
    notes = []
    compiled = trained(lab, module=net_of(lab, Breaking), notes=notes)
    assert far(compiled, trained(lab, module=net_of(lab, Breaking), compile="off")) < ERROR
    assert [line for line in notes if line.startswith("graph breaks, ")], notes


class Placed(nn.Module):
    """It multiplies by the number that ComfyUI gives a block."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Identity(), nn.Identity()

    def forward(self, x, options):
        return self.second(self.first(x) * options["block"][1])


@pytest.mark.parametrize(
    ("patches", "number"),
    [({}, -1), ({"patches": {}, "patches_replace": {}}, -1)]
    + [({name: {"attn1": ["a patch"]}}, 3) for name in ("patches", "patches_replace")],
)
def test_blocks_are_told_apart_for_patches_alone(monkeypatch, patches, number):
    """Else torch.compile would compile each of them."""
    monkeypatch.setattr(compiled_blocks, "BACKEND", "eager")
    net, x = nn.ModuleDict({"blocks": nn.ModuleList([Placed(), Placed()])}), torch.ones(2)
    with compiled_blocks.BlockCompiler(dynamic=False).install(net):
        out = net["blocks"][0](x, {"sigmas": torch.ones(1), "block": ("input", 3), **patches})
    assert out.tolist() == [number, number]


def test_validation_and_previews_run_as_they_are(lab):
    """Without gradients nothing is compiled, and after the steps the model is as before."""
    denoiser, data, graphs = lab.Flow(), lab.pictures(8, held_out=[0, 1]), []
    state = lab.state(denoiser, data, compile="blocks")
    before = [dict(vars(part)) for part in denoiser.module.modules()]

    def preview(denoiser, *_):
        count = compiler().graphs
        denoiser.module(torch.zeros(1, 4, 9, 9), torch.zeros(1, 1, 1, 1))
        graphs.append((count, compiler().graphs))

    train(state, denoiser, data, 2, Callbacks(preview=preview, preview_every=1, validate_every=1))
    assert [dict(vars(part)) for part in denoiser.module.modules()] == before
    assert len(graphs) == 4 and all(first == last for first, last in graphs)


def test_the_first_pass_moves_nothing(lab):
    denoiser, data = lab.Flow(), lab.pictures(8)
    state = lab.state(denoiser, data, compile="blocks")
    random = torch.random.get_rng_state()
    with contextlib.closing(Workspace(state, denoiser, data)) as work, work.install():
        CompilationReport(work).first_pass()
        assert all(tensor.grad is None for tensor in work.trained.values())
        assert equal(work.state(), replace(state, cost=work.state().cost))
    assert torch.equal(torch.random.get_rng_state(), random)


def test_without_a_compiler(lab, monkeypatch):
    monkeypatch.setattr(compiled_blocks, "BACKEND", "inductor")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match=r"there is no C\+\+ compiler .*apt install g\+\+.*set compile to off"):
        trained(lab)


def test_what_cannot_be_compiled_stops_before_the_first_step(lab, monkeypatch):
    def broken(graph, inputs):
        raise ArithmeticError("no code for this")

    monkeypatch.setattr(registry, "lookup_backend", lambda name: broken)
    with pytest.raises(ValueError, match=r"cannot compile this model .*no code for this.*set compile to off"):
        trained(lab)


@pytest.mark.parametrize("dropout", ["rank_dropout", "module_dropout", "network_dropout"])
def test_dropouts_are_refused(lab, dropout):
    adapter = AdapterSettings(targets="all", rank=2, **{dropout: 0.1})
    with pytest.raises(ValueError, match="set compile to off, or the dropouts to 0"):
        lab.state(lab.Flow(), lab.pictures(8), adapter, compile="blocks")


class Linears(nn.Module):
    """Has no convolutions, of which inductor makes code for one size on a CPU (torch 2.13; 2.15 for all)."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        x = x.movedim(1, -1)
        return (x + self.second(torch.tanh(self.first(self.norm(x))))).movedim(-1, 1)


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="inductor needs a C++ compiler")
@pytest.mark.parametrize(("block", "most"), [("convolutions", 4), ("linear", 2)])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_code_of_inductor(lab, monkeypatch, block, most, checkpointing):
    monkeypatch.setattr(compiled_blocks, "BACKEND", "inductor")
    data, settings = of_sizes(lab, (4, 4, 8), (4, 10, 6)), {"checkpointing": checkpointing}

    def run(steps, **given):
        module = net_of(lab, Linears) if block == "linear" else lab.Net()
        return trained(lab, steps, data=data, module=module, **settings, **given)

    compiled = run(4)
    assert far(compiled, run(4, compile="off")) < ERROR
    assert 2 <= compiler().graphs <= most
    begun = run(1)
    compiled_blocks.compiler_for.cache_clear()
    torch._dynamo.reset()
    assert equal(run(3, state=begun), compiled)


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("base_weights", names())
def test_code_of_inductor_for_a_quantized_base(lab, monkeypatch, base_weights):
    """Of what goes into a layer, int8 may round a number the other way that is nearly between two."""
    monkeypatch.setattr(compiled_blocks, "BACKEND", "inductor")
    adapter, data = (
        AdapterSettings(targets="all", rank=2, base_weights=base_weights),
        of_sizes(lab, (8, 5, 7), (8, 6, 9)),
    )
    found = []
    for steps, compile in ((3, "blocks"), (3, "off"), (0, "blocks")):
        net = lab.Net(8)
        net.blocks = nn.ModuleList(Linears(8) for _ in range(3))
        found.append(trained(lab, steps, compile, adapter, data, module=net))
    moved = far(found[1], found[2])
    print("FAR", far(found[0], found[1]), moved)
    assert far(found[0], found[1]) < 0.01 * moved and compiler().graphs == 2
