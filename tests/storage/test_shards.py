"""Shards against the size asked for, read back whole, with other libraries' index."""

import json

import pytest
import torch
from graft_nodes.storage import shards


def tensors():
    draw = torch.Generator().manual_seed(0)
    return {f"t{n}": torch.randn(n + 1, 100, generator=draw) for n in range(10)}


@pytest.mark.parametrize("most", [0, 1, 2000, 5000, 10**9])
def test_shards_come_back_and_keep_to_the_size(tmp_path, most):
    saved, whole = tensors(), {}
    files = [path for path in shards.save_shards(saved, tmp_path, "average", most) if path.suffix == ".safetensors"]
    for path in files:
        from safetensors.torch import load_file

        part = load_file(path)
        size = sum(t.numel() * 4 for t in part.values())
        assert not most or size <= most or len(part) == 1
        whole |= part
    back = shards.load_shards(tmp_path, "average")
    assert back.keys() == saved.keys() == whole.keys() and all(torch.equal(back[name], saved[name]) for name in saved)
    assert (len(files) == 1) == (most in (0, 10**9))
    if len(files) > 1:
        index = json.loads((tmp_path / "average.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in saved.values())
        assert set(index["weight_map"].values()) == {path.name for path in files}
    assert not list(tmp_path.glob("*.partial"))


def test_missing_and_damaged_shards_are_all_named(tmp_path):
    first, second, *_ = shards.save_shards(tensors(), tmp_path, "average", 5000)
    first.unlink()
    second.unlink()
    with pytest.raises(ValueError, match=f"(?s){first.name}: missing.*{second.name}: missing"):
        shards.load_shards(tmp_path, "average")
    with pytest.raises(ValueError, match=r"other\.safetensors: missing"):
        shards.load_shards(tmp_path, "other")
    whole = shards.save_shards(tensors(), tmp_path, "one")[0]
    whole.write_bytes(whole.read_bytes()[:-8])
    with pytest.raises(ValueError, match="not a whole safetensors"):
        shards.load_shards(tmp_path, "one")
    with pytest.raises(ValueError, match="-1 bytes"):
        shards.save_shards(tensors(), tmp_path, "x", -1)


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    calls = []

    def full(*args):
        calls.append(args)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return writes(*args)

    writes = shards.write_safetensors
    monkeypatch.setattr(shards, "write_safetensors", full)
    with pytest.raises(OSError, match="No space"):
        shards.save_shards(tensors(), tmp_path, "average", 5000)
    assert list(tmp_path.iterdir()) == []


def test_an_index_and_its_shards_hold_the_same_tensors(tmp_path):
    files = shards.save_shards(tensors(), tmp_path, "average", 2000)
    path = files[-1]
    whole = json.loads(path.read_text())
    listed = whole["weight_map"]
    path.write_text(json.dumps({**whole, "weight_map": {**listed, "absent": files[0].name}}))
    with pytest.raises(ValueError, match=f"absent: listed in {files[0].name}, missing there"):
        shards.load_shards(tmp_path, "average")
    path.write_text(json.dumps({**whole, "weight_map": {name: file for name, file in listed.items() if name != "t0"}}))
    with pytest.raises(ValueError, match="t0: not listed"):
        shards.load_shards(tmp_path, "average")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", "expected .*weight_map"),
        ('{"weight_map": 3}', "expected .*weight_map"),
        ('{"weight_map": {"t": ""}}', "expected .*weight_map"),
        ('{"weight_map": {"t": "a\\u0000b"}}', "expected .*weight_map"),
        ('{"weight_map": {"t": "' + "x" * 201 + '"}}', "expected .*weight_map"),
        ('{"weight_map": {"t": "../one.safetensors"}}', "leaves the folder"),
        ("{", "cannot be read as JSON"),
    ],
)
def test_an_index_that_is_none_is_refused(tmp_path, text, said):
    shards.save_shards(tensors(), tmp_path, "one")
    (tmp_path / "average.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=said):
        shards.load_shards(tmp_path, "average")


def test_a_failed_second_saving_keeps_what_was_there(tmp_path, monkeypatch):
    first = shards.save_shards(tensors(), tmp_path, "average", 5000)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards, "write_whole", full)
    with pytest.raises(OSError, match="No space"):
        shards.save_shards(tensors(), tmp_path, "average", 5000)
    assert all(path.is_file() for path in first) and shards.load_shards(tmp_path, "average").keys() == tensors().keys()
