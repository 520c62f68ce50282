"""Pinned memory on a device that refuses it above a limit: nothing fails, nothing is rounded up, all is given back."""

import gc
from dataclasses import replace

import pytest
import torch
from graft_nodes.ema.decay import EMASettings
from graft_nodes.ema.host_offload import CudaLane
from graft_nodes.patches.core.host_memory import PAGE, empty_on_host, pin_copy, pinned
from graft_nodes.patches.core.slots import copy_to_host
from graft_nodes.tests.second_device import memory
from graft_nodes.tests.second_device.device import DEVICE, meter
from graft_nodes.tests.training.conftest import lab  # noqa: F401
from graft_nodes.training.memory.offload import to_device
from graft_nodes.training.run.loop import Callbacks, train
from graft_nodes.training.trainable.settings import AdapterSettings

ODD = 3 * 2**20 + 5  # bytes: PyTorch would take 4 MiB


@pytest.fixture(autouse=True)
def budget(monkeypatch):
    monkeypatch.setattr(pinned, "limit", None)
    yield
    gc.collect()
    assert not memory.registered and pinned.used == 0


def _on_device(size=ODD, **options):
    return torch.arange(size, dtype=torch.float32, **options).to(torch.uint8).to(DEVICE)


def test_it_takes_whole_pages_and_not_powers_of_two():
    copy = copy_to_host(_on_device())
    assert copy.is_pinned() and torch.equal(copy, _on_device().cpu())
    assert memory.pinned_bytes() == pinned.used <= ODD + PAGE
    del copy
    gc.collect()
    assert memory.pinned_bytes() == 0


def test_it_lies_as_pytorch_would_lay_it():
    for tensor in (
        torch.randn(3, 5, 4).to(DEVICE).transpose(0, 2),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last).to(DEVICE, torch.bfloat16),
        torch.randn(3, 1).to(DEVICE).expand(3, 7),
        torch.ones(()).to(DEVICE),
        torch.ones(0, 4).to(DEVICE),
    ):
        found, expected = empty_on_host(tensor), torch.empty_like(tensor, device="cpu")
        assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())
        assert torch.equal(found.copy_(tensor), tensor.cpu())


@pytest.mark.parametrize("refused_by", ["budget", "system"])
def test_after_a_refusal_it_goes_on_unpinned(monkeypatch, refused_by):
    room = 2 * (ODD + PAGE)
    if refused_by == "budget":
        monkeypatch.setattr(pinned, "limit", room)
    else:
        monkeypatch.setattr(memory.Runtime, "registered_limit", room)
    pinned.begin_anew()
    weights = {str(number): _on_device() for number in range(4)}
    lane = CudaLane(weights, DEVICE)
    assert [tensor.is_pinned() for tensor in lane.staging.values()] == [True, True, False, False]
    assert 2 * ODD <= pinned.missing < 2 * (ODD + PAGE) and "could not be pinned" in pinned.note
    lane.fetch(weights)
    lane.wait()
    assert all(torch.equal(lane.staging[name], tensor.cpu()) for name, tensor in weights.items())
    more = torch.ones(ODD)
    assert torch.equal(to_device(more, DEVICE).cpu(), more)  # PyTorch says "CUDA error: out of memory" here
    assert pin_copy(more, DEVICE) is more
    meter.clear()
    del lane
    gc.collect()
    assert copy_to_host(weights["0"]).is_pinned()  # what was given back can be pinned again


def test_nothing_is_pinned_with_a_budget_of_nothing(monkeypatch):
    monkeypatch.setattr(pinned, "limit", 0)
    assert not copy_to_host(_on_device()).is_pinned() and pinned.note == ""
    assert not pin_copy(torch.ones(4), DEVICE).is_pinned()


@pytest.mark.parametrize("offload", ["none", "optimizer", "activations", "layers"])
@pytest.mark.parametrize("room", [0, 200_000, 1 << 40])
def test_a_run_gives_the_same_bytes_whatever_is_refused_and_gives_all_back(lab, monkeypatch, offload, room):  # noqa: F811
    """A refusal never looks like too little memory of the card, and nothing is pinned when the run has ended."""

    class OnDevice(lab.Flow):
        device = DEVICE

        def denoise(self, x, sigma, conditionings, options):
            moved = [replace(one, context=one.context.to(x.device)) for one in conditionings]
            return super().denoise(x, sigma, moved, options)

    def trained(offload, noted, device):
        denoiser = OnDevice(lab.Net(48))
        denoiser.module.to(device)
        dataset = lab.pictures(shape=(48, 16, 16))
        adapter = AdapterSettings(targets="all", rank=2)
        state = lab.state(denoiser, dataset, adapter, precision="float32", offload=offload, checkpointing=True)
        state = replace(state, start=replace(state.start, ema=EMASettings("ramp", device="host")))
        most = []
        watching = Callbacks(on_step=lambda *_: most.append(memory.pinned_bytes()), note=noted.append)
        return train(state, denoiser, dataset, 3, watching).trained, most

    expected, _ = trained("none", [], DEVICE)
    monkeypatch.setattr(memory.Runtime, "registered_limit", room)
    noted = []
    found, most = trained(offload, noted, "cpu" if offload == "layers" else DEVICE)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert max(most) <= room
    gc.collect()
    assert not memory.registered and pinned.used == 0
    is_noted = any("could not be pinned" in note for note in noted)
    assert is_noted if room == 0 else not (is_noted and room == 1 << 40)


def test_the_memory_of_a_step_is_counted_from_its_beginning(lab):  # noqa: F811
    class OnDevice(lab.Flow):
        device = DEVICE

        def denoise(self, x, sigma, conditionings, options):
            moved = [replace(one, context=one.context.to(x.device)) for one in conditionings]
            return super().denoise(x, sigma, moved, options)

    denoiser = OnDevice(lab.Net(48))
    denoiser.module.to(DEVICE)
    dataset = lab.pictures(shape=(48, 16, 16))
    loading = torch.empty(200_000_000, dtype=torch.uint8, device=DEVICE)  # gone before the first step
    del loading
    assert meter.peak > 200_000_000
    state = train(lab.state(denoiser, dataset, precision="float32"), denoiser, dataset, 2)
    assert 1_000_000 < state.cost.memory < 200_000_000
