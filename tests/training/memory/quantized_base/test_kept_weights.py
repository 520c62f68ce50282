"""Quantized weights on disk: those of the same model are read with the same bytes, all others are made again."""

import os

import pytest
import torch
from graft_nodes.training.memory.quantized_base import kept_weights
from graft_nodes.training.memory.quantized_base.base import quantize_base
from graft_nodes.training.memory.quantized_base.int8_weights import Int8Weights
from graft_nodes.training.memory.quantized_base.kept_weights import KeptWeights
from graft_nodes.training.memory.quantized_base.nf4 import NF4
from torch import nn

CPU = torch.device("cpu")


def model(dtype=torch.float32, seed=1):
    torch.manual_seed(seed)
    layers = nn.ModuleDict({"q": nn.Linear(64, 128, dtype=dtype), "k": nn.Linear(64, 128, dtype=dtype)})
    return layers.requires_grad_(False)


@pytest.fixture
def counted(monkeypatch):
    """How many parts of weights were quantized so far."""
    found = []
    for kind in (NF4, Int8Weights):
        own = kind.quantize
        monkeypatch.setattr(kind, "quantize", lambda self, weight, own=own: found.append(weight) or own(self, weight))
    return found


def weights(network, folder, kind=NF4):
    """The quantized weights of a network, and the notes for the report."""
    on_disk = folder and KeptWeights(folder)
    with quantize_base(network, kind, CPU, False, on_disk):
        return {name: buffer.clone() for name, buffer in network.named_buffers()}, on_disk and list(on_disk.notes)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_second_time_they_are_read_and_are_the_same(tmp_path, counted):
    made, _ = weights(model(), None)
    written, notes = weights(model(), tmp_path)
    count = len(counted)
    read, read_notes = weights(model(), tmp_path)
    assert same(made, written) and same(made, read) and len(made) == 4 and len(counted) == count and notes == []
    assert read_notes == [f"base weights: read from {tmp_path}, not quantized again"]


CHANGES = {
    "other weights": lambda: model(seed=2),
    "another type": lambda: model(torch.bfloat16),
    "another layer": lambda: nn.ModuleDict({"q": model()["q"], "v": model()["k"]}),
    "one layer fewer": lambda: nn.ModuleDict({"q": model()["q"]}),
    "layers in each other's place": lambda: nn.ModuleDict({"q": model()["k"], "k": model()["q"]}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_another_model_s_is_not_read(tmp_path, counted, change):
    weights(model(), tmp_path)
    count = len(counted)
    network = CHANGES[change]()
    found, notes = weights(network, tmp_path)
    assert len(counted) > count and same(found, weights(network, None)[0]) and notes == []


def test_weights_that_changed_in_place_are_not_read(tmp_path):
    network = model()
    weights(network, tmp_path)
    with torch.no_grad():
        network["q"].weight[0, 0] += 1
    assert same(weights(network, tmp_path)[0], weights(network, None)[0])


def test_where_reading_takes_as_long_as_quantizing_nothing_is_kept(tmp_path, counted):
    for _ in range(2):
        count = len(counted)
        weights(model(), tmp_path, kind=Int8Weights)
        assert len(counted) > count and not list(tmp_path.iterdir())


def test_a_damaged_file_is_made_again_and_named(tmp_path, counted):
    made, _ = weights(model(), tmp_path)
    [file] = tmp_path.rglob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    count = len(counted)
    found, notes = weights(model(), tmp_path)
    assert len(counted) > count and same(made, found)
    assert len(notes) == 1 and f"{file}: its contents are not what was written; made again" in notes[0]
    count = len(counted)
    assert same(made, weights(model(), tmp_path)[0]) and len(counted) == count


def test_without_room_on_the_disk_training_goes_on_and_says_so(tmp_path, counted):
    taken = tmp_path / "weights"
    taken.write_text("a file is in the way")
    found, notes = weights(model(), tmp_path)
    assert same(found, weights(model(), None)[0])
    assert len(notes) == 1 and notes[0].startswith("cache: cannot be written, what was made is kept in memory only: ")


def test_models_that_were_not_used_for_longest_go_when_there_is_too_much(tmp_path, monkeypatch, counted):
    files = []
    for number in range(2):
        weights(model(seed=number), tmp_path)
        [new] = set(tmp_path.rglob("*.safetensors")) - set(files)
        os.utime(new, (number, number))
        files.append(new)
    monkeypatch.setattr(kept_weights, "LIMIT_GB", 2.5 * files[0].stat().st_size / 2**30)
    weights(model(seed=2), tmp_path)
    assert [file.exists() for file in files] == [False, True] and len(list(tmp_path.rglob("*.safetensors"))) == 2
