"""Safetensors files: read whole or refused, written whole or not at all."""

import os

import pytest
import torch
from graft_nodes.patches import files
from safetensors.torch import load_file, save_file


@pytest.fixture
def tensors():
    g = torch.Generator().manual_seed(0)
    half = torch.randn(3, 5, generator=g).bfloat16()
    return {"b": half, "a": torch.randn(2, generator=g), "c": torch.tensor(1.5), "d": torch.zeros(0, 4)}


def test_what_is_written_is_read_by_safetensors(tmp_path, tensors):
    path = str(tmp_path / "x.safetensors")
    files.write_whole(path, files.safetensors_bytes(tensors, {"k": "ü", "a": "1"}))
    read = load_file(path)
    assert read.keys() == tensors.keys() and all(torch.equal(read[name], tensors[name]) for name in tensors)
    again, metadata = files.load_safetensors(path)
    assert metadata == {"k": "ü", "a": "1"} and all(torch.equal(again[name], tensors[name]) for name in tensors)
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_equal_input_gives_equal_bytes_in_any_order(tensors):
    turned = dict(reversed(tensors.items()))
    first = b"".join(files.safetensors_bytes(tensors, {"a": "1", "b": "2"}))
    assert first == b"".join(files.safetensors_bytes(turned, {"b": "2", "a": "1"}))


def test_a_full_disk_leaves_nothing(tmp_path, tensors):
    def chunks():
        yield next(files.safetensors_bytes(tensors, {}))
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        files.write_whole(str(tmp_path / "x.safetensors"), chunks())
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("keep", [0, 4, 60, 200])
def test_truncated(tmp_path, tensors, keep):
    path = tmp_path / "x.safetensors"
    save_file(tensors, str(path))
    path.write_bytes(path.read_bytes()[:keep] if keep < 200 else path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"x\.safetensors is not a whole safetensors file"):
        files.load_safetensors(str(path))


@pytest.mark.parametrize("name", ["x.ckpt", "x.safetensors"])
def test_pickles_are_refused_whatever_they_are_called(tmp_path, tensors, name):
    path = str(tmp_path / name)
    torch.save(tensors, path)
    with pytest.raises(ValueError, match=r"is a pickle.*To convert"):
        files.load_safetensors(path)


@pytest.mark.parametrize("first", [0x50, 0x80])
def test_a_header_length_that_begins_like_a_pickle(tmp_path, first):
    path = tmp_path / "x.safetensors"
    padding = next(n for n in range(600) if len(next(files.safetensors_bytes({}, {"a": "b" * n}))) - 8 & 0xFF == first)
    files.write_whole(str(path), files.safetensors_bytes({}, {"a": "b" * padding}))
    assert path.read_bytes()[0] == first
    assert files.load_safetensors(str(path))[1] == {"a": "b" * padding}


def test_a_file_is_read_once_until_it_changes(tmp_path, tensors):
    path = str(tmp_path / "x.safetensors")
    save_file(tensors, path)
    first = files.load_once(path)[0]
    assert files.load_once(path)[0] is first
    save_file({"z": torch.ones(9)}, path)
    assert files.load_once(path)[0].keys() == {"z"}
