"""Files are read once until they change, with PEFT's settings beside them."""

import gc
import os
import weakref

import torch
from graft_nodes.patches.lora_files import open_file
from safetensors.torch import save_file


def test_a_file_is_read_once_until_it_changes(tmp_path):
    path = str(tmp_path / "x.safetensors")
    save_file({"a": torch.zeros(2)}, path)
    first = open_file.load_once(path)[0]
    assert open_file.load_once(path)[0] is first
    save_file({"z": torch.ones(9)}, path)
    assert open_file.load_once(path)[0].keys() == {"z"}


def test_a_long_stack_is_read_once_too(tmp_path, monkeypatch):
    paths, read, real = (
        [str(tmp_path / f"{number}.safetensors") for number in range(100)],
        [],
        open_file.load_safetensors,
    )
    monkeypatch.setattr(open_file, "load_safetensors", lambda path: read.append(path) or real(path))
    for path in paths:
        save_file({"a": torch.ones(1)}, path)
    for path in paths * 2:
        open_file.load_once(path)
    assert read == paths


def test_a_file_that_changed_takes_the_place_of_what_it_was(tmp_path):
    """The old contents go, though fewer files are open than are kept."""
    path = str(tmp_path / "x.safetensors")
    save_file({"a": torch.zeros(2)}, path)
    tensor = weakref.ref(open_file.load_once(path)[0]["a"])
    assert tensor() is not None
    os.replace(saved(tmp_path / "new.safetensors"), path)
    assert open_file.load_once(path)[0].keys() == {"z"}
    gc.collect()
    assert tensor() is None


def test_the_files_used_last_are_kept(tmp_path):
    paths = [saved(tmp_path / f"{number}.safetensors") for number in range(140)]
    first = open_file.load_once(paths[0])[0]
    forgotten = weakref.ref(open_file.load_once(paths[1])[0]["z"])
    for path in (*paths[2:100], paths[0], *paths[100:]):
        open_file.load_once(path)
    gc.collect()
    assert open_file.load_once(paths[0])[0] is first and forgotten() is None


def saved(path):
    save_file({"z": torch.ones(9)}, path)
    return str(path)


def test_pefts_settings_that_change_beside_a_file_are_noticed(tmp_path):
    path, config = str(tmp_path / "adapter_model.safetensors"), tmp_path / "adapter_config.json"
    save_file({"a": torch.ones(1)}, path)
    before = open_file.file_version(path)
    for text in ('{"r": 4}', '{"r": 16}'):
        config.write_text(text, encoding="utf-8")
        assert text in open_file.load_once(path)[1].values() and open_file.file_version(path) != before
        before = open_file.file_version(path)
