"""Hashes keep their values: run keys, fingerprints and stored files depend on every one."""

import hashlib
import io

import pytest
import torch
from graft_nodes.storage import digest

JSON = {"b": [1, 2.5, None, True], "a": {"ü": "x"}}
TENSORS = {
    "b": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "a": torch.tensor([1.5, -2.0]).bfloat16(),
    "empty": torch.zeros(0, 4),
    "scalar": torch.tensor(7),
}


def test_values_are_those_of_before():
    assert digest.sha256_of_json(JSON) == "5ae6711a7b0bec9484d4312246cc2609708b040ac90d0df26f5626c4331d121c"
    assert digest.sha256_of_spaced_json(JSON) == "d61e360c05caff1a17b1b649398160e788f29c68d51b51011306b702daf4dfb8"
    assert digest.sha256_of_tensors(TENSORS) == "c7c892a1537dab7bd3ad22bc73da58ae790e157ed2496f99157340806f43598e"
    assert (
        digest.sha256(b"graft draw 1 2 noise").hexdigest()
        == "ebd6c191ab8bd1eb9a1e3462b98ba1589884959882bda38b7bb60d75e760af37"
    )


def test_tensors_are_hashed_by_name_type_shape_and_bytes_in_any_order():
    whole = digest.sha256_of_tensors(TENSORS)
    assert digest.sha256_of_tensors(dict(reversed(TENSORS.items()))) == whole
    turned = {**TENSORS, "b": TENSORS["b"].T.contiguous().T}  # the same numbers, laid out by columns
    assert digest.sha256_of_tensors(turned) == whole
    others = {
        "name": {**{k: v for k, v in TENSORS.items() if k != "a"}, "c": TENSORS["a"]},
        "type": {**TENSORS, "a": TENSORS["a"].float()},
        "shape": {**TENSORS, "b": TENSORS["b"].reshape(3, 2)},
        "bytes": {**TENSORS, "b": TENSORS["b"] + 1},
    }
    assert len({whole, *map(digest.sha256_of_tensors, others.values())}) == 5


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1])
def test_files_are_hashed_whole(tmp_path, size):
    content = bytes(range(256)) * (size // 256 + 1)
    content = content[:size]
    (tmp_path / "file").write_bytes(content)
    expected = hashlib.sha256(content).hexdigest()
    assert digest.sha256_of_file(tmp_path / "file") == expected
    file = io.BytesIO(content)
    file.read(3)
    assert digest.sha256_of_open_file(file) == expected


def test_chunks_pass_through_while_they_are_hashed():
    chunks = digest.HashedChunks(iter([b"a", b"", b"bc"]))
    assert list(chunks) == [b"a", b"", b"bc"]
    assert chunks.hexdigest == hashlib.sha256(b"abc").hexdigest()


def test_the_bytes_of_a_tensor_are_its_numbers_in_order():
    assert bytes(digest.tensor_bytes(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).T)) == b"\1\3\2\4"
    assert bytes(digest.tensor_bytes(torch.tensor(1.0, requires_grad=True))) == b"\0\0\x80\x3f"
