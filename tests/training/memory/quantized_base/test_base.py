"""A quantized base: which layers are, every kind of adapter beside it, and nothing left of it afterwards."""

import copy
from contextlib import closing

import pytest
import torch
from graft_nodes.training.memory.checkpointing import checkpoint_blocks
from graft_nodes.training.memory.quantized_base import base
from graft_nodes.training.memory.quantized_base.base import chosen_layers, quantize_base, remark, why_not_quantized
from graft_nodes.training.memory.quantized_base.registry import FORMATS, names
from graft_nodes.training.run.loop import Callbacks, train
from graft_nodes.training.run.step import advance_
from graft_nodes.training.run.validation import validate
from graft_nodes.training.run.workspace import Workspace
from graft_nodes.training.trainable.settings import AdapterSettings
from torch import nn

CPU = torch.device("cpu")
EVERY = pytest.mark.parametrize("weight_format", FORMATS, ids=names())
EVERY_NAME = pytest.mark.parametrize("base_weights", names())
NEAR = {"int8": 0.05, "int8 weight-only": 0.05, "nf4": 0.2}  # of the loss with the weights as loaded
KINDS = ("lora", "locon", "loha", "lokr", "dora", "oft", "tlora")
WIDTH = 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn1 = nn.ModuleDict({"to_q": nn.Linear(WIDTH, WIDTH), "to_out": nn.Linear(WIDTH, WIDTH, bias=False)})
        self.ff = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, 12)
        self.last = nn.Linear(12, WIDTH)
        self.conv = nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x):
        rows = self.conv(x).movedim(1, -1)
        rows = self.attn1["to_out"](torch.tanh(self.attn1["to_q"](rows)))
        return x + self.last(torch.tanh(self.narrow(self.ff(rows)))).movedim(-1, 1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x, context):
        for block in self.blocks:
            x = block(x)
        return x * (1 + context)


def test_layers_that_cannot_be_are_left_and_counted():
    net = Net()
    net.quantized = nn.Linear(8, 8)
    net.quantized.weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.int8), requires_grad=False)
    net.patched = nn.Linear(8, 8)
    net.patched.weight_function = [lambda weight: weight]
    net.replaced = nn.Linear(8, 8)
    net.replaced.forward = net.replaced.forward
    net.attention = nn.MultiheadAttention(8, 1)
    assert {why_not_quantized(layer) for layer in chosen_layers(net).values()} == {None} and len(
        chosen_layers(net)
    ) == 6
    assert remark(net, "nf4") == (
        "base weights: nf4 in 6 of 14 linear layers; as loaded: 4 a size that is not a multiple of 8, 2 patched,"
        " 1 quantized already, 1 read by another module"
    )


@EVERY
def test_the_module_is_as_before_afterwards(weight_format):
    net = Net().requires_grad_(False)
    before = {name: (part, dict(vars(part))) for name, part in net.named_modules()}
    slots = {name: dict(part._parameters) for name, part in net.named_modules()}
    numbers = copy.deepcopy(net.state_dict())
    with pytest.raises(KeyError), quantize_base(net, weight_format, CPU):
        assert "forward" in vars(net.blocks[0].ff) and net.state_dict().keys() == numbers.keys()
        raise KeyError
    for name, part in net.named_modules():
        assert part is before[name][0] and vars(part) == before[name][1] and "forward" not in vars(part)
        assert all(part._parameters[key] is value for key, value in slots[name].items())
        assert not list(part.named_buffers(recurse=False)) and not part._non_persistent_buffers_set
    assert all(torch.equal(tensor, numbers[name]) for name, tensor in net.state_dict().items())


@EVERY
def test_a_weight_in_parts_is_the_weight_in_one(monkeypatch, weight_format):
    layer = nn.Linear(24, 40).requires_grad_(False)
    whole = weight_format(CPU).quantize(layer.weight)
    monkeypatch.setattr(base, "IN_CACHE", 24 * 17)
    with quantize_base(layer, weight_format, CPU):
        assert torch.equal(layer.quantized_numbers, whole.numbers)
        assert torch.equal(layer.quantized_scales, whole.scales)


@EVERY
def test_switched_off_it_computes_with_its_own_weights(weight_format):
    net, x = Net().requires_grad_(False), torch.randn(2, WIDTH, 4, 4)
    plain = net(x, 0.0)
    with quantize_base(net, weight_format, CPU) as weights:
        inside = net(x, 0.0)
        with weights.switch_off():
            assert torch.equal(net(x, 0.0), plain)
        assert torch.equal(net(x, 0.0), inside) and not torch.equal(inside, plain)


@EVERY
def test_a_block_that_runs_again_gives_the_same_gradient(weight_format):
    net, x = Net().requires_grad_(False), torch.randn(2, WIDTH, 4, 4, requires_grad=True)
    gradients = []
    with quantize_base(net, weight_format, CPU):
        for _ in range(2):
            gradients += torch.autograd.grad(net(x, 0.5).square().sum(), [x])
        with checkpoint_blocks(net):
            gradients += torch.autograd.grad(net(x, 0.5).square().sum(), [x])
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], gradients[2])


# --- in a run ---------------------------------------------------------------------------------------------------------


def run(lab, kind="lora", base_weights="int8", held_out=(), **optimizer):
    denoiser = lab.Flow(Net())
    dataset = lab.pictures(shape=(WIDTH, 4, 4), held_out=held_out)
    adapter = AdapterSettings(kind, rank=4, targets="all", base_weights=base_weights)
    return denoiser, dataset, lab.state(denoiser, dataset, adapter, **{"precision": "float32", **optimizer})


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_layers_whose_weights_the_host_casts_are_quantized_all_the_same(lab, precision):
    """As ComfyUI's are where they wait in host memory; in bf16 their inputs are cast, too."""
    denoiser, dataset, state = run(lab, precision=precision)
    for layer in denoiser.module.modules():
        layer.comfy_cast_weights = isinstance(layer, nn.Linear)
    layers = chosen_layers(denoiser.module).values()
    with closing(Workspace(state, denoiser, dataset)) as work, work.install():
        assert layers and all(hasattr(layer, "quantized_layer") for layer in layers)


def same(one, other):
    return one.trained.keys() == other.trained.keys() and all(
        torch.equal(tensor, other.trained[name]) for name, tensor in one.trained.items()
    )


@EVERY_NAME
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_trains_beside_it(lab, kind, base_weights):
    denoiser, dataset, state = run(lab, kind, base_weights)
    before = copy.deepcopy(denoiser.module.state_dict())
    whole = train(state, denoiser, dataset, 3)
    assert same(train(train(state, denoiser, dataset, 1), denoiser, dataset, 2), whole)
    assert all(torch.equal(tensor, before[name]) for name, tensor in denoiser.module.state_dict().items())
    _, _, plain_state = run(lab, kind, "as loaded")
    plain = train(plain_state, denoiser, dataset, 3)
    assert not same(whole, plain) and whole.start.digest != plain.start.digest
    assert whole.history.loss == pytest.approx(plain.history.loss, rel=NEAR[base_weights])


@EVERY_NAME
@pytest.mark.parametrize("setting", [{"checkpointing": True}, {"offload": "activations"}])
def test_what_saves_memory_changes_nothing(lab, setting, base_weights):
    denoiser, dataset, state = run(lab, base_weights=base_weights)
    _, _, saving = run(lab, base_weights=base_weights, **setting)
    assert same(train(state, denoiser, dataset, 2), train(saving, denoiser, dataset, 2))


def test_dora_reads_the_weight_that_the_layer_computes_with(lab):
    """0.6 beside 127 is 1 in int8, so a column that starts with the norm of 0.6 gives 0.6."""
    denoiser, dataset, _ = run(lab)
    line = denoiser.module.blocks[0].ff
    with torch.no_grad():
        line.weight.fill_(0.6)
        line.weight[:, 0] = 127
    state = lab.state(denoiser, dataset, AdapterSettings("dora", rank=4, targets="all", base_weights="int8"))
    work, x = Workspace(state, denoiser, dataset), torch.zeros(1, WIDTH)
    x[0, 5] = 1
    with torch.no_grad(), work.install():
        in_int8 = line(x)
        with work.use_own_weights():
            own = line(x)
    work.close()
    for found in (in_int8, own):
        torch.testing.assert_close(found[0], 0.6 + line.bias)


@EVERY_NAME
def test_validation_and_previews_see_the_weights_as_loaded(lab, base_weights):
    """At the start the LoRA changes nothing, so the held-out loss is the model's own."""
    denoiser, dataset, state = run(lab, base_weights=base_weights, held_out=(0, 1))
    _, _, plain = run(lab, base_weights="as loaded", held_out=(0, 1))
    predicted = []

    def preview(denoiser, step, average, at_strength):
        x = torch.ones(1, WIDTH, 4, 4)
        predicted.append(denoiser.module(x, 0.0))

    seen_by = Callbacks(validate_every=1, preview_every=1, preview=preview)
    found = train(state, denoiser, dataset, 1, seen_by)
    work = Workspace(plain, denoiser, dataset)
    with work.install():
        assert found.history.validation[0] == (0, validate(work).loss)
        advance_(work)
    work.close()
    trained = Workspace(plain, denoiser, dataset)
    with torch.no_grad():
        for name, tensor in trained.trained.items():
            tensor.copy_(found.trained[name])
        with trained.install():
            assert torch.equal(predicted[0], denoiser.module(torch.ones(1, WIDTH, 4, 4), 0.0))
    trained.close()


def test_what_cannot_be_with_it_is_refused(lab):
    with pytest.raises(ValueError, match="base weights int8 needs a frozen base, and adapter type full trains it"):
        AdapterSettings("full", base_weights="int8")
    with pytest.raises(
        ValueError, match="base weights is 'int4', expected one of as loaded, int8, int8 weight-only, nf4"
    ):
        AdapterSettings(base_weights="int4")
    small = lab.Flow()
    state = lab.state(small, lab.pictures(), AdapterSettings(rank=2, targets="all", base_weights="int8"))
    with pytest.raises(ValueError, match=r"no linear layer of the model can be .*in 0 of 6 linear layers"):
        train(state, small, lab.pictures(), 1)
