"""Files that should be small are read whole, and larger ones are refused, wherever a file of somebody else is read."""

import json

import pytest
import torch
from graft_nodes.headless import workflow_file
from graft_nodes.headless.embedded import WorkflowError
from graft_nodes.patches.lora_files import open_file
from graft_nodes.storage import shards
from graft_nodes.storage.bounded_read import MB, read_bounded, read_json
from graft_nodes.storage.safetensors import write_safetensors
from graft_nodes.training.store import store
from graft_nodes.training.store.store import Damaged, read_record


def _sparse(path, size):
    """A file of that many zero bytes, which takes no space where the drive can do so."""
    with path.open("wb") as file:
        file.truncate(size)


def test_a_file_of_the_largest_size_and_one_byte_more(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 100)
    assert read_bounded(tmp_path / "a", 100) == b"x" * 100
    with pytest.raises(ValueError, match="it is larger than"):
        read_bounded(tmp_path / "a", 99)
    with pytest.raises(FileNotFoundError):
        read_bounded(tmp_path / "none", 99)


def test_a_json_file_is_read_or_refused_with_the_reason(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b"\xef\xbb\xbf" + '{"caption": "ein Bär"}'.encode())  # with the mark that Windows' editors write
    assert read_json(path, 100) == {"caption": "ein Bär"}
    for content, reason in (
        (b'{"a": "\xff"}', "is not UTF-8 text .invalid start byte at byte 7."),
        (b'{"a": 1', "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'"' + b"x" * 200_000 + b'"', "is not JSON .it is larger than 0.1"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=reason):
            read_json(path, 110_000)
    with pytest.raises(ValueError, match=r"cannot be read .No such file"):
        read_json(tmp_path / "none.json", 100)


def test_a_huge_workflow_is_not_read(tmp_path):
    path = tmp_path / "w.json"
    _sparse(path, workflow_file.MOST_BYTES + 1)
    with pytest.raises(WorkflowError, match=r"w\.json: JSON that cannot be read .it is larger than 100 MB"):
        workflow_file.read(str(path))
    path.write_text("\ufeff" + json.dumps({"1": {"class_type": "A", "inputs": {}}}), encoding="utf-8")
    assert workflow_file.read(str(path)).class_types() == {"A"}


def test_huge_settings_of_peft_are_not_read(tmp_path):
    path = tmp_path / "adapter_model.safetensors"
    write_safetensors(path, {"a.lora_A.weight": torch.zeros(1, 2)}, {})
    _sparse(tmp_path / "adapter_config.json", 16 * MB + 1)
    with pytest.raises(ValueError, match=r"adapter_config\.json: it is larger than 16 MB"):
        open_file.load(str(path))


def test_a_huge_state_json_is_not_read(tmp_path):
    _sparse(tmp_path / "state.json", store.MOST_RECORD + 1)
    with pytest.raises(Damaged, match=r"state\.json: cannot be read as JSON .it is larger than 256 MB"):
        read_record(tmp_path)


def test_a_huge_index_is_not_read(tmp_path):
    _sparse(tmp_path / "x.safetensors.index.json", 64 * MB + 1)
    with pytest.raises(ValueError, match=r"index\.json: cannot be read as JSON .it is larger than 64 MB"):
        shards.load_shards(tmp_path, "x")
