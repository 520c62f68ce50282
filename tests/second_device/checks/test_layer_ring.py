"""Layers in host memory on a device: order, bytes and memory of their copies, and the bytes of what is trained."""

import copy
from dataclasses import replace

import pytest
import torch
from graft_nodes.patches.core.host_memory import pinned
from graft_nodes.patches.core.slots import slot_key
from graft_nodes.tests.second_device import memory
from graft_nodes.tests.second_device.device import DEVICE, OutOfOrder, meter
from graft_nodes.tests.training.conftest import lab  # noqa: F401
from graft_nodes.tests.training.run.compiling_anew import graphs_run_as_they_are
from graft_nodes.training.memory import offload, pinning
from graft_nodes.training.memory.allocations import META
from graft_nodes.training.memory.checkpointing import checkpoint_blocks
from graft_nodes.training.memory.layer_ring import SideStream, fewest_waiting, layers_on_host, more_bytes, spread
from graft_nodes.training.memory.quantized_base import base
from graft_nodes.training.memory.quantized_base.base import quantize_base
from graft_nodes.training.memory.quantized_base.registry import FORMATS, find_format, names
from graft_nodes.training.run import compiled_blocks
from graft_nodes.training.run.loop import Callbacks, Stopped, train
from graft_nodes.training.run.memory_plan import plan
from graft_nodes.training.trainable.settings import AdapterSettings
from torch import nn

WIDTH, BLOCKS = 160, 5  # weights above SMALL


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self, x):
        return x + self.outer(torch.tanh(self.inner(x))) + self.shift


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Part() for _ in range(BLOCKS)])

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def model():
    made = Model().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for p in made.parameters():
        p.copy_(torch.randn(p.shape, generator=generator) * 0.05)
    return made


def _bytes(module):
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def _gradient(module, device):
    x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH).to(device).requires_grad_()
    module(x).square().sum().backward()
    return x.grad


def test_bytes_order_and_waits_of_a_step(model):
    with checkpoint_blocks(model):
        plain = _gradient(model, "cpu")
    block = _bytes(model.blocks[0])
    with layers_on_host(model, DEVICE), checkpoint_blocks(model):
        for _ in range(2):
            _gradient(model, DEVICE)
        before = meter.allocated
        meter.clear()
        found = _gradient(model, DEVICE)
        x = 4 * 2 * WIDTH
        # every block for the forward pass, and all but the last again for the backward pass
        assert meter.uploaded - x == (2 * BLOCKS - 1) * block
        assert not meter.synchronizations and len(meter.blocking_uploads) == 1  # x
        # the block that computes and the next one; and a few rows
        assert 2 * block < meter.peak - before < 2.1 * block
        assert meter.downloaded == 0
        del found
        assert meter.allocated <= before
        assert torch.equal(_gradient(model, DEVICE).cpu(), plain)


@pytest.mark.parametrize("waiting", range(BLOCKS + 1))
def test_blocks_that_stay_come_over_once_and_the_others_twice_a_step(model, waiting):
    with checkpoint_blocks(model):
        plain = _gradient(model, "cpu")
    block, whole = _bytes(model.blocks[0]), _bytes(model)
    before = meter.allocated
    meter.clear()
    with layers_on_host(model, DEVICE, waiting=waiting), checkpoint_blocks(model):
        stays = whole - waiting * block
        assert meter.uploaded == meter.allocated - before == stays  # straight to where it stays
        assert sum(p.is_pinned() for p in model.parameters() if p.nbytes >= offload.SMALL) == 2 * waiting
        for _ in range(2):
            _gradient(model, DEVICE)
        meter.clear()
        found = _gradient(model, DEVICE)
        assert meter.uploaded - 4 * 2 * WIDTH == max(0, 2 * waiting - 1) * block
        assert not meter.synchronizations and meter.downloaded == 0
        assert meter.peak - before - stays < (min(waiting, 2) + 0.2) * block
        assert torch.equal(found.cpu(), plain)
    assert not memory.registered and meter.allocated == before + found.nbytes


@pytest.mark.parametrize("count", range(1, 9))
def test_blocks_that_wait_are_evenly_spread(count):
    for chosen in range(count + 2):
        gone = spread(count, chosen)
        assert len(gone) == len(set(gone)) == min(count, chosen) and gone == sorted(gone)
        gaps = [later - earlier for earlier, later in zip([-1, *gone], gone, strict=False)]
        assert not gone or (gone[-1] == count - 1 and max(gaps) - min(gaps) <= 1)


def test_as_few_wait_as_the_room_allows():
    sizes = [5, 1, 5, 1, 5, 1]
    for room in range(20):
        fewest = fewest_waiting(sizes, room)
        # those that stay: 0 to 5, 0 to 4, (0, 1, 3, 4), (0, 2, 4), (0, 3), (0), none; at first fewer come and go
        least = (18 - 2, 17 - 1, 12, 15, 6, 5, 0)
        assert fewest == next(waiting for waiting in range(7) if room >= least[waiting])


def test_host_memory_is_pinned_where_it_lies_and_only_meanwhile(model):
    large = [p for p in model.blocks.parameters() if p.nbytes >= offload.SMALL]
    places = [p.data_ptr() for p in model.blocks.parameters()]
    with layers_on_host(model, DEVICE):
        assert large and all(p.is_pinned() for p in large) and len(memory.registered) == len(large)
        assert not pinned.note
        _gradient(model, DEVICE)
        assert [p.data_ptr() for p in model.blocks.parameters()] == places
        with layers_on_host(model, DEVICE):  # what somebody has pinned stays pinned
            assert len(memory.registered) == len(large)
        assert len(memory.registered) == len(large)
    assert not memory.registered and not any(p.is_pinned() for p in large)


def test_what_cannot_be_pinned_is_said_and_the_result_is_the_same(model, monkeypatch):
    with checkpoint_blocks(model):
        plain = _gradient(model, "cpu")
    size = model.first.weight.nbytes
    monkeypatch.setattr(memory.Runtime, "registered_limit", 3 * size)
    pinned.begin_anew()
    with layers_on_host(model, DEVICE), checkpoint_blocks(model):
        assert pinned.missing == (2 * BLOCKS - 3) * size and "GB of CPU memory could not be pinned" in pinned.note
        for _ in range(2):
            assert torch.equal(_gradient(model, DEVICE).cpu(), plain)
    assert not memory.registered


def test_nothing_is_pinned_where_the_host_says_so(lab, monkeypatch):  # noqa: F811
    dataset, seen, plain = _dataset(lab), [], None
    for limit in (None, 0):
        denoiser, found = _denoiser(lab, DEVICE), []
        monkeypatch.setattr(pinned, "limit", limit)
        watching = Callbacks(on_step=lambda *_, found=found: found.append(len(memory.registered)), note=seen.append)
        state = train(_state(lab, dataset, offload="layers"), denoiser, dataset, 2, watching)
        assert bool(found[-1]) == (limit is None)
        assert set(seen) == {"offload to CPU memory: 3 of 3 blocks wait in CPU memory"}
        assert plain is None or _same(plain, state)
        plain = state


def test_memory_that_is_pinned_stays_until_its_copies_have_ended(model):
    pins, weight = pinning.Pins(DEVICE), model.first.weight
    pins.pin([weight])
    stream = SideStream(DEVICE)
    with stream.copy():
        weight.to(DEVICE, non_blocking=True)
    with pytest.raises(OutOfOrder, match="pinned no longer"):
        pins.release()
    stream.finish()


def test_weights_are_not_used_before_they_have_come(model, monkeypatch):
    monkeypatch.setattr(SideStream, "wait", lambda self, event: None)
    with layers_on_host(model, DEVICE), pytest.raises(OutOfOrder, match="may still be writing"):
        _gradient(model, DEVICE)


def test_copies_do_not_take_memory_that_a_block_still_computes_with(model, monkeypatch):
    class Hasty(SideStream):
        def copy(self):
            return self._streams.stream(self._side)

    monkeypatch.setattr("graft_nodes.training.memory.layer_ring.SideStream", Hasty)
    with layers_on_host(model, DEVICE), pytest.raises(OutOfOrder, match="may still be reading"):
        _gradient(model, DEVICE)


# --- a quantized base -------------------------------------------------------------------------------------------------

EVERY_FORMAT = pytest.mark.parametrize("weight_format", FORMATS, ids=names())


@EVERY_FORMAT
def test_quantized_weights_come_over_in_place_of_the_models_own(model, monkeypatch, weight_format):
    monkeypatch.setattr(base, "SMALL", 0)
    here = copy.deepcopy(model)
    with quantize_base(here, weight_format, torch.device("cpu")), checkpoint_blocks(here):
        expected = _gradient(here, "cpu")
    with (
        quantize_base(model, weight_format, DEVICE, on_host=True) as found,
        layers_on_host(model, DEVICE, staying=lambda: found.waiting),
        checkpoint_blocks(model),
    ):
        linear = [part for part in model.blocks.modules() if isinstance(part, nn.Linear)]
        assert all(tensor.device.type == "cpu" for part in linear for tensor in part.buffers())
        pinned = [part.quantized_numbers for part in linear if part.quantized_numbers.nbytes >= offload.SMALL]
        assert len(memory.registered) == len(pinned)
        for _ in range(2):
            _gradient(model, DEVICE)
        block_own = sum(part.weight.nbytes for part in model.blocks[0].children())
        block = _bytes(model.blocks[0]) - block_own
        before = meter.allocated
        meter.clear()
        gradient = _gradient(model, DEVICE)
        assert meter.uploaded - 4 * 2 * WIDTH == (2 * BLOCKS - 1) * block
        assert not meter.synchronizations and len(meter.blocking_uploads) == 1  # x
        gradient = gradient.cpu()
        assert meter.allocated <= before
        assert [slot_key(part, "weight") in found.waiting for part in linear] == [True] * len(linear)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)
    assert not memory.registered and not [name for name, _ in model.named_buffers() if "quantized" in name]


@EVERY_FORMAT
def test_switched_off_the_models_own_weights_come_over(model, monkeypatch, weight_format):
    monkeypatch.setattr(base, "SMALL", 0)
    x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
    with torch.no_grad():
        expected = model(x)
    with (
        quantize_base(model, weight_format, DEVICE, on_host=True) as found,
        layers_on_host(model, DEVICE, staying=lambda: found.waiting),
        torch.no_grad(),
    ):
        inside = model(x.to(DEVICE)).cpu()
        meter.clear()
        with found.switch_off():
            assert torch.equal(model(x.to(DEVICE)).cpu(), expected)
        quantized = sum(tensor.nbytes for name, tensor in model.named_buffers() if "quantized" in name)
        assert meter.uploaded - x.nbytes == _bytes(model) - quantized - model.first.bias.nbytes  # which is there
        assert not torch.equal(inside, expected) and torch.equal(model(x.to(DEVICE)).cpu(), inside)


# --- training ---------------------------------------------------------------------------------------------------------


def _denoiser(lab, device):  # noqa: F811
    class OnDevice(lab.Flow):
        def denoise(self, x, sigma, conditionings, options):
            moved = [replace(one, context=one.context.to(x.device)) for one in conditionings]
            return super().denoise(x, sigma, moved, options)

    network = lab.Net(48)
    network.blocks.append(lab.Block(48))
    denoiser = OnDevice(network)
    denoiser.device = device
    return denoiser


def _dataset(lab, **more):  # noqa: F811
    return lab.pictures(shape=(48, 6, 6), **more)


def _state(lab, dataset, base_weights="as loaded", **optimizer):  # noqa: F811
    adapter = AdapterSettings(targets="all", rank=2, base_weights=base_weights)
    return lab.state(_denoiser(lab, DEVICE), dataset, adapter, **{"precision": "float32", **optimizer})


def _with_model_on(device, denoiser):
    denoiser.module.to(device)
    return denoiser


def _same(one, other):
    return one.key == other.key and all(
        torch.equal(one.trained[name], other.trained[name]) and torch.equal(one.average[name], other.average[name])
        for name in one.trained
    )


@pytest.mark.parametrize(
    ("checkpointing", "base_weights"), [(False, "as loaded"), (True, "as loaded"), *((False, name) for name in names())]
)
def test_training_gives_the_bytes_of_training_without_offload(lab, monkeypatch, checkpointing, base_weights):  # noqa: F811
    monkeypatch.setattr(base, "SMALL", 0)
    dataset = _dataset(lab, held_out=[9])
    callbacks = Callbacks(validate_every=2)
    here = _with_model_on(DEVICE, _denoiser(lab, DEVICE))
    plain = train(_state(lab, dataset, base_weights, checkpointing=True), here, dataset, 5, callbacks)
    start = _state(lab, dataset, base_weights, offload="layers", checkpointing=checkpointing)
    away = train(start, _denoiser(lab, DEVICE), dataset, 5, callbacks)
    assert _same(plain, away) and plain.history == away.history
    half = train(start, _denoiser(lab, DEVICE), dataset, 2, callbacks)
    resumed = train(half, _denoiser(lab, DEVICE), dataset, 3, callbacks)
    assert _same(resumed, away)


@pytest.mark.parametrize("base_weights", ["as loaded", *names()])
def test_the_planned_peak_is_the_measured_one(lab, monkeypatch, base_weights):  # noqa: F811
    monkeypatch.setattr(base, "SMALL", 0)
    dataset = _dataset(lab, count=4)
    planned = plan(_state(lab, dataset, base_weights, offload="layers"), _denoiser(lab, META), dataset)
    denoiser, peaks = _denoiser(lab, DEVICE), []
    before = meter.allocated
    meter.clear()
    train(
        _state(lab, dataset, base_weights, offload="layers"),
        denoiser,
        dataset,
        3,
        Callbacks(on_step=lambda *_: peaks.append(meter.peak)),
    )
    assert peaks[-1] - before == pytest.approx(planned.peak, rel=0.1)


@pytest.mark.parametrize("base_weights", ["as loaded", *names()])
@pytest.mark.parametrize("waiting", [1, 2])
def test_fewer_blocks_wait_by_number_or_by_the_room_that_there_is(lab, monkeypatch, base_weights, waiting):  # noqa: F811
    monkeypatch.setattr(base, "SMALL", 0)
    dataset = _dataset(lab, count=4)
    here = _with_model_on(DEVICE, _denoiser(lab, DEVICE))
    expected = train(_state(lab, dataset, base_weights, checkpointing=True), here, dataset, 3)
    all_wait = _state(lab, dataset, base_weights, offload="layers")
    asked = _state(lab, dataset, base_weights, offload="layers", swapped_blocks=waiting)
    least = plan(all_wait, _denoiser(lab, META), dataset)
    planned = plan(asked, _denoiser(lab, META), dataset)
    room = least.blocks[0]  # 1 waits: two stay, and one fewer comes and goes; 2 wait: one stays
    assert len(least.blocks) == 3 and planned.blocks == ()
    assert planned.peak - least.peak == pytest.approx(room, rel=0.1)
    for state, free in ((asked, 0), (all_wait, room)):
        denoiser, peaks, notes = _denoiser(lab, DEVICE), [], []
        denoiser.room_for_blocks = free
        before = meter.allocated
        meter.clear()
        watching = Callbacks(on_step=lambda *_, peaks=peaks: peaks.append(meter.peak), note=notes.append)
        assert _same(train(state, denoiser, dataset, 3, watching), expected)
        assert peaks[-1] - before == pytest.approx(planned.peak, rel=0.1)
        assert free == 0 or "0 of 3 blocks wait" in notes[0]
    denoiser, notes = _denoiser(lab, DEVICE), []
    denoiser.room_for_blocks = room - 1
    train(all_wait, denoiser, dataset, 1, Callbacks(note=notes.append))
    assert "3 of 3 blocks wait" in notes[0]


@pytest.mark.parametrize("base_weights", names())
def test_in_a_run_they_come_over_in_place_of_the_models_own_too(lab, monkeypatch, base_weights):  # noqa: F811
    monkeypatch.setattr(base, "SMALL", 0)
    dataset, uploaded = _dataset(lab), {}
    for name in ("as loaded", base_weights):

        def stepped(*_, name=name):
            uploaded[name] = meter.uploaded
            meter.clear()

        state = _state(lab, dataset, name, offload="layers")
        train(state, _denoiser(lab, DEVICE), dataset, 3, Callbacks(on_step=stepped))
    network = _denoiser(lab, DEVICE).module
    with quantize_base(network, find_format(base_weights), torch.device("cpu")):
        layers = [part for part in network.blocks[0].modules() if hasattr(part, "quantized_layer")]
        saved = sum(
            part.weight.nbytes - part.quantized_numbers.nbytes - part.quantized_scales.nbytes for part in layers
        )
    times = 2 * len(network.blocks) - 1  # every block but the last comes twice
    assert uploaded["as loaded"] - uploaded[base_weights] == times * saved > 0


def test_an_interrupted_step_leaves_no_memory(lab):  # noqa: F811
    dataset, denoiser = _dataset(lab), _denoiser(lab, DEVICE)
    denoiser.fail_at = 3
    with pytest.raises(Stopped):
        train(_state(lab, dataset, offload="layers"), denoiser, dataset, 5)
    assert not memory.registered and all(p.device.type == "cpu" for p in denoiser.module.parameters())


# --- trained layers ---------------------------------------------------------------------------------------------------

FULL = AdapterSettings("full", targets="all")


def _full(lab, dataset, **optimizer):  # noqa: F811
    given = {"precision": "full-bf16", "fused_backward": True, "clip_norm": 0.0, **optimizer}
    return lab.state(_denoiser(lab, DEVICE), dataset, FULL, **given)


def _equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def _denoiser_of(lab, device, dtype):  # noqa: F811
    denoiser = _denoiser(lab, device)
    denoiser.module.to(dtype)
    denoiser.own_type = dtype
    return denoiser


@pytest.mark.parametrize(
    ("optimizer", "precision", "dtype"),
    [
        ("adamw", "float32", torch.float32),
        ("adamw", "bf16", torch.bfloat16),
        ("adafactor", "full-bf16", torch.bfloat16),
        ("schedulefree", "full-bf16", torch.float16),
    ],
)
def test_trained_layers_have_the_bytes_of_those_on_the_device(lab, optimizer, precision, dtype):  # noqa: F811
    dataset = _dataset(lab, held_out=[9])
    callbacks = Callbacks(validate_every=2)
    here = _with_model_on(DEVICE, _denoiser_of(lab, DEVICE, dtype))
    same = {"optimizer": optimizer, "precision": precision}
    if optimizer == "schedulefree":
        same |= {"schedule": "constant", "ema": None}
    plain = train(_full(lab, dataset, checkpointing=True, **same), here, dataset, 3, callbacks)
    for waiting in (0, 1):
        away = _denoiser_of(lab, DEVICE, dtype)
        before = {name: (p, p.detach().clone()) for name, p in away.module.named_parameters()}
        start = _full(lab, dataset, offload="layers", swapped_blocks=waiting, **same)
        half = train(start, away, dataset, 1, callbacks)
        found = train(half, away, dataset, 2, callbacks)
        assert _equal(plain.trained, found.trained) and _equal(plain.average, found.average)
        assert _equal(plain.optimizer, found.optimizer) and plain.history.validation == found.history.validation
        assert plain.history.loss == found.history.loss
        assert plain.history.norm == pytest.approx(found.history.norm, rel=1e-12)  # added in another order
        for name, p in away.module.named_parameters():
            assert p is before[name][0] and torch.equal(p, before[name][1])
    assert not memory.registered


def test_trained_layers_learn_from_two_sizes_and_keep_a_prior(lab):  # noqa: F811
    """Each size has a backward pass of its own, and the prior is what the model's own weights compute."""
    dataset = _dataset(lab, count=4)
    other = lab.pictures(shape=(48, 4, 6), seed=1)
    dataset = replace(dataset, regularization=other, regularization_share=0.5)
    found = []
    for device, more in ((DEVICE, {"checkpointing": True}), (DEVICE, {"offload": "layers"})):
        denoiser = _denoiser(lab, device)
        if "offload" not in more:
            _with_model_on(device, denoiser)
        start = _full(lab, dataset, batch_size=2, **more)
        objective = replace(start.settings.objective, prior="output-preservation")
        start = replace(start, settings=replace(start.settings, objective=objective))
        found.append(train(start, denoiser, dataset, 3))
    assert _same(*found) and found[0].history.loss == found[1].history.loss


@pytest.mark.parametrize(
    ("optimizer", "precision", "counts"), [("adamw", "float32", (3, 1)), ("adafactor", "full-bf16", (3,))]
)
def test_the_planned_peak_of_trained_layers_is_the_measured_one(lab, optimizer, precision, counts):  # noqa: F811
    dataset = _dataset(lab, count=4)
    state = _full(lab, dataset, offload="layers", optimizer=optimizer, precision=precision, ema=None)
    planned = plan(state, _denoiser(lab, META), dataset)
    beside = plan(state.with_optimizer(offload="none", checkpointing=True), _denoiser(lab, META), dataset)
    assert planned.peak < 0.6 * beside.peak
    for waiting in counts:
        denoiser, peaks = _denoiser(lab, DEVICE), []
        before = meter.allocated
        meter.clear()
        watching = Callbacks(on_step=lambda *_, peaks=peaks: peaks.append(meter.peak))
        train(state.with_optimizer(swapped_blocks=waiting), denoiser, dataset, 3, watching)
        expected = planned.peak + more_bytes(planned.blocks, waiting)
        assert peaks[-1] - before == pytest.approx(expected, rel=0.1)
    room = planned.blocks[0]
    numbers = sum(p.numel() for p in denoiser.module.blocks[0].parameters())
    bytes_each = 4 if precision == "float32" else 2 + 4  # bf16 beside its copy in the model's float32
    assert room == numbers * bytes_each + denoiser.module.blocks[0].shift.nbytes


def test_bytes_over_the_bus_of_a_step_with_trained_layers(lab):  # noqa: F811
    dataset, counts = _dataset(lab), []

    def stepped(*_):
        counts.append((meter.uploaded, meter.downloaded, len(meter.synchronizations)))
        meter.clear()

    denoiser = _denoiser(lab, DEVICE)
    state = _full(lab, dataset, offload="layers", optimizer="sgd", ema=None)
    train(state, denoiser, dataset, 3, Callbacks(on_step=stepped))
    numbers = sum(p.numel() for p in denoiser.module.blocks.parameters())
    uploaded, downloaded, waits = counts[1]
    # The step takes weights in bf16 and momentum in float32, and gives them back.
    assert 6 * numbers <= downloaded < 6.01 * numbers
    for_layers = uploaded - downloaded - sum(image.latent.nbytes for image in dataset.images[:4])
    assert for_layers == pytest.approx(2 * numbers * 5 / 3, rel=0.01)  # every block twice, but the last once
    assert waits == 2  # for the loss, before anything moves, and for the norm


def test_trained_layers_are_compiled(lab, monkeypatch):  # noqa: F811
    monkeypatch.setattr(compiled_blocks, "BACKEND", "eager")
    dataset, found, notes = _dataset(lab), [], []
    with graphs_run_as_they_are(monkeypatch):
        for compile in ("off", "blocks"):
            state = _full(lab, dataset, offload="layers", compile=compile)
            found.append(train(state, _denoiser(lab, DEVICE), dataset, 2, Callbacks(note=notes.append)))
    assert _equal(found[0].trained, found[1].trained) and "2 compilations for 3 Block" in notes[-2]
