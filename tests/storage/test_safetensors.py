"""Safetensors files: read whole or refused, written whole or not at all."""

import gc
import hashlib
import json
import os
import sys

import pytest
import torch
from graft_nodes.storage import safetensors
from safetensors.torch import load_file, save, save_file


@pytest.fixture
def tensors():
    g = torch.Generator().manual_seed(0)
    half = torch.randn(3, 5, generator=g).bfloat16()
    return {"b": half, "a": torch.randn(2, generator=g), "c": torch.tensor(1.5), "d": torch.zeros(0, 4)}


def test_what_is_written_is_read_by_safetensors(tmp_path, tensors):
    path = str(tmp_path / "x.safetensors")
    safetensors.write_safetensors(path, tensors, {"k": "ü", "a": "1"})
    read = load_file(path)
    assert read.keys() == tensors.keys() and all(torch.equal(read[name], tensors[name]) for name in tensors)
    again, metadata = safetensors.load_safetensors(path)
    assert metadata == {"k": "ü", "a": "1"} and all(torch.equal(again[name], tensors[name]) for name in tensors)
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_shapes_are_read_without_what_is_large(tmp_path, tensors):
    path = str(tmp_path / "x.safetensors")
    safetensors.write_safetensors(path, {**tensors, "large": torch.zeros(40, 50)}, {"k": "ü"})
    shapes, metadata = safetensors.load_shapes(path)
    assert metadata == {"k": "ü"} and all(torch.equal(shapes[name], tensors[name]) for name in tensors)
    large = shapes["large"]
    assert (large.is_meta, large.shape, large.dtype) == (True, (40, 50), torch.float32)


def test_what_safetensors_writes_is_read_in_every_type(tmp_path):
    path, bits = str(tmp_path / "x.safetensors"), torch.arange(48, dtype=torch.uint8)
    kinds = (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint64,
        torch.uint32,
        torch.uint16,
        torch.uint8,
        torch.complex64,
    )
    tensors = {str(kind): bits.clone().view(kind).view(2, -1) for kind in kinds} | {"bool": bits < 7}
    save_file(tensors, path)
    read, _ = safetensors.load_safetensors(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8))
    read["torch.uint8"].zero_()  # a private mapping: the file stays as it is
    assert torch.equal(load_file(path)["torch.uint8"], tensors["torch.uint8"])


def test_tensors_at_odd_bytes_and_types_that_pytorch_lacks(tmp_path):
    head = (
        b'{"odd":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}}'
    )
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"\1" + torch.tensor([1.5, -2.0]).numpy().tobytes())
    assert safetensors.load_safetensors(str(path))[0]["x"].mul(2).tolist() == [3.0, -4.0]
    other = head.replace(b'"F32","shape":[2]', b'"F4","shape":[16] ')
    path.write_bytes(len(other).to_bytes(8, "little") + other + bytes(9))
    with pytest.raises(ValueError, match=r"x\.safetensors: x is of type F4, expected one of F64, "):
        safetensors.load_safetensors(str(path))


def test_reading_a_file_again_and_again_keeps_nothing(tmp_path):
    path = str(tmp_path / "x.safetensors")
    save_file({str(number): torch.zeros(300) for number in range(100)}, path)
    safetensors.load_safetensors(path)
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(30):
        safetensors.load_safetensors(path)
    gc.collect()
    assert sys.getallocatedblocks() - before < 1000  # safetensors itself keeps two for each tensor: 6,000


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
def test_tensors_that_are_held_hold_no_file_open(tmp_path, tensors):
    path, before = str(tmp_path / "x.safetensors"), len(os.listdir("/proc/self/fd"))
    save_file(tensors, path)
    held = [safetensors.load_safetensors(path)[0] for _ in range(10)]
    os.remove(path)
    assert len(os.listdir("/proc/self/fd")) == before and all(torch.equal(one["a"], tensors["a"]) for one in held)


def test_a_file_renamed_over_one_that_is_held_changes_nothing_of_it(tmp_path, tensors):
    """What is mapped is the old file until it is let go, however short the new one is."""
    path, other = str(tmp_path / "x.safetensors"), str(tmp_path / "new")
    save_file(tensors | {"large": torch.arange(100_000.0)}, path)
    held = safetensors.load_safetensors(path)[0]
    save_file({"a": torch.zeros(1)}, other)
    os.replace(other, path)
    assert torch.equal(held["large"], torch.arange(100_000.0))  # pages that nobody had read before
    assert all(torch.equal(held[name], tensor) for name, tensor in tensors.items())
    assert torch.equal(safetensors.load_safetensors(path)[0]["a"], torch.zeros(1))
    safetensors.write_safetensors(path, {"a": torch.ones(1)})
    assert torch.equal(safetensors.load_safetensors(path)[0]["a"], torch.ones(1))


@pytest.mark.parametrize("size", [3, 300])
def test_a_file_that_another_replaces_while_it_is_read_is_one_of_the_two(tmp_path, monkeypatch, size):
    path, other, maps = str(tmp_path / "x.safetensors"), str(tmp_path / "other"), torch.from_file
    save_file({"x": torch.zeros(100)}, path)
    save_file({"x": torch.ones(size)}, other)

    def replaced(*arguments, **named):
        if os.path.exists(other):
            os.replace(other, path)
        return maps(*arguments, **named)

    monkeypatch.setattr(torch, "from_file", replaced)
    try:
        assert torch.equal(safetensors.load_safetensors(path)[0]["x"], torch.ones(size))
    except ValueError as error:  # too short for what the first one's header says
        assert size == 3 and "it changed while it was read" in str(error)


def test_a_file_that_another_removes_while_the_library_maps_it_is_missing(tmp_path, monkeypatch, tensors):
    path, maps = str(tmp_path / "x.safetensors"), torch.UntypedStorage.from_file
    save_file(tensors, path)

    def removed(*arguments, **named):
        os.remove(path)
        return maps(*arguments, **named)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", removed)
    with pytest.raises(FileNotFoundError):
        safetensors.load_safetensors(path)


def test_equal_input_gives_equal_bytes_in_any_order(tensors):
    turned = dict(reversed(tensors.items()))
    first = b"".join(safetensors.safetensors_bytes(tensors, {"a": "1", "b": "2"}))
    assert first == b"".join(safetensors.safetensors_bytes(turned, {"b": "2", "a": "1"}))


def test_a_file_of_this_process_alone_and_a_shared_one_appear_whole_or_not_at_all(tmp_path, monkeypatch):
    weights = {"text.b": torch.ones(2), "text.a": torch.zeros(3)}
    first = safetensors.write_safetensors(tmp_path / "x.safetensors", weights)
    turned = dict(reversed(weights.items()))
    assert first == safetensors.write_safetensors(tmp_path / "y.safetensors", turned, shared=True)
    assert first == hashlib.sha256((tmp_path / "x.safetensors").read_bytes()).hexdigest()
    assert load_file(tmp_path / "x.safetensors").keys() == weights.keys()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for shared in (False, True):
        with pytest.raises(OSError, match=r"No space.*x\.safetensors"):
            safetensors.write_safetensors(tmp_path / "x.safetensors", {"text.a": torch.ones(1)}, shared=shared)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.safetensors", "y.safetensors"]
    assert load_file(tmp_path / "x.safetensors").keys() == weights.keys()


def test_bytes_are_those_of_the_library(tensors):
    assert b"".join(safetensors.safetensors_bytes(tensors)) == save(tensors)
    assert b"".join(safetensors.safetensors_bytes(tensors, {})) == save(tensors, {})  # as saved states have it
    assert safetensors.tensors_from_bytes(save(tensors))["c"] == 1.5


@pytest.mark.parametrize("keep", [0, 4, 60, 200])
def test_truncated(tmp_path, tensors, keep):
    path = tmp_path / "x.safetensors"
    save_file(tensors, str(path))
    path.write_bytes(path.read_bytes()[:keep] if keep < 200 else path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"x\.safetensors is not a whole safetensors file"):
        safetensors.load_safetensors(str(path))


@pytest.mark.parametrize("name", ["x.ckpt", "x.safetensors"])
def test_pickles_are_refused_whatever_they_are_called(tmp_path, tensors, name):
    path = str(tmp_path / name)
    torch.save(tensors, path)
    with pytest.raises(ValueError, match=r"is a pickle.*To convert"):
        safetensors.load_safetensors(path)


@pytest.mark.parametrize("first", [0x50, 0x80])
def test_a_header_length_that_begins_like_a_pickle(tmp_path, first):
    path = tmp_path / "x.safetensors"
    padding = next(
        n for n in range(600) if len(next(safetensors.safetensors_bytes({}, {"a": "b" * n}))) - 8 & 0xFF == first
    )
    safetensors.write_safetensors(path, {}, {"a": "b" * padding})
    assert path.read_bytes()[0] == first
    assert safetensors.load_safetensors(str(path))[1] == {"a": "b" * padding}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b"\x80\x04abc", "is a pickle"),
        (b"PK\x03\x04" + b"x" * 40, "is a pickle"),
        (b"\xff" * 30, "a header of"),
        ((20).to_bytes(8, "little") + b"not json at all.....", "its header cannot be read"),
        ((14).to_bytes(8, "little") + b'{"a": [1, 2]} ', "its header cannot be read"),
        (
            (62).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}       ' + b"12",
            "speaks of 86 bytes, it has 72",
        ),
    ],
)
def test_a_header_that_cannot_be_read(tmp_path, content, message):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        safetensors.read_header(str(path))


@pytest.mark.parametrize("metadata", ['["a"]', '"a"', "1", '{"a": 1}', '{"a": null}', '{"a": "b", "c": ["d"]}'])
def test_metadata_are_texts_by_name(tmp_path, metadata):
    header = f'{{"__metadata__": {metadata}}}'.encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match="its metadata are not texts by name"):
        safetensors.read_header(str(path))


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4665a5ea\nsize 1234\n"


@pytest.mark.parametrize("name", ["x.safetensors", "x.ckpt"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LFS, "a Git LFS pointer.*git lfs pull"),
        ("<!DOCTYPE html>\n<html><title>Sign in</title>", "a web page .*Sign in.*log in"),
        ("\ufeff\n  <HTML><head></head>", "a web page"),
        ('<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "a web page .*AccessDenied"),
        ('{"error": "Access to model x is restricted"}', "JSON .*is restricted.*download the file again"),
        ('[{"a": 1}]  ', "JSON"),
    ],
)
def test_what_a_server_sends_in_place_of_a_file_is_named(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_bytes(text.encode("utf-8"))
    for read in (safetensors.load_safetensors, safetensors.read_header, safetensors.load_shapes):
        with pytest.raises(ValueError, match=rf"{name} is not a safetensors file: it is {message}"):
            read(str(path))


def test_a_header_with_600_000_tensors_is_refused_before_it_is_parsed(tmp_path, monkeypatch):
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    text = json.dumps({f"tensor {number}": entry for number in range(600_000)}).encode()
    path = tmp_path / "many.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    monkeypatch.setattr(json, "loads", lambda _: pytest.fail("it was parsed"))
    for read in (safetensors.load_safetensors, safetensors.read_header):
        with pytest.raises(ValueError, match=r"many\.safetensors names 600,000 tensors, more than the 100,000"):
            read(str(path))
