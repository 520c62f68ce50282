"""States under names: the same state back from shards, damage and misfits named, and nothing half-replaced."""

import errno
import json
import os

import pytest
from graft_nodes.ema.decay import EMASettings
from graft_nodes.storage.safetensors import load_safetensors
from graft_nodes.training.objective.settings import ObjectiveSettings
from graft_nodes.training.run.loop import Callbacks, train
from graft_nodes.training.state import begin, equal, plan_schedule
from graft_nodes.training.store import saved_states, store
from graft_nodes.training.store.names import saved_names
from graft_nodes.training.store.store import Damaged, NewerFormat
from graft_nodes.training.trainable.settings import AdapterSettings


@pytest.fixture
def run(lab):
    denoiser, dataset = lab.Flow(), lab.pictures(held_out=[9])
    state = lab.state(
        denoiser, dataset, AdapterSettings(targets="all", rank=2), objective=ObjectiveSettings(ip_noise=0.1)
    )
    ema = EMASettings("ramp", snapshots=2, widths=(0.05, 0.2))
    start = begin(
        denoiser.module,
        type(state.start)("model", dataset.digest, state.start.adapter, ema, 3),
        state.settings,
        "some run",
    )
    return train(start, denoiser, dataset, 4, Callbacks(validate_every=2)), denoiser, dataset


@pytest.mark.parametrize("shard", [0, 700, 2000])
def test_a_state_comes_back_and_goes_on_as_if_it_had_never_left(run, tmp_path, shard):
    state, denoiser, dataset = run
    folder = saved_states.save(state, tmp_path, "mine", shard, {"torch": "1"})
    files = sorted(path.name for path in folder.iterdir())
    assert (len(files) == 2) == (shard == 0) and all(name.endswith((".safetensors", ".json")) for name in files)
    if shard:
        for path in folder.glob("*.safetensors"):
            held = load_safetensors(str(path))[0]
            assert len(held) == 1 or sum(t.numel() * t.element_size() for t in held.values()) <= shard
        assert sum(name.endswith(".index.json") for name in files) == 1
    again = saved_states.load(tmp_path, "mine", "model", dataset.digest)
    assert equal(again, state) and again.history == state.history and again.settings == state.settings
    assert (
        again.start.digest == state.start.digest
        and again.run == "some run"
        and list(again.trained) == list(state.trained)
    )
    assert equal(train(again, denoiser, dataset, 3), train(state, denoiser, dataset, 3))
    assert saved_names(tmp_path) == ["mine"]


def test_a_schedule_that_ends_with_the_steps_asked_for_stays_one(lab, tmp_path):
    denoiser, dataset = lab.Flow(), lab.pictures()
    state = lab.state(denoiser, dataset, total_steps=0, schedule="cosine")
    state = train(plan_schedule(state, 3), denoiser, dataset, 3)
    saved_states.save(state, tmp_path, "mine")
    again = saved_states.load(tmp_path, "mine", state.start.model, dataset.digest)
    assert plan_schedule(again, 6).settings == plan_schedule(state, 6).settings
    closed = train(lab.state(denoiser, dataset, total_steps=3, schedule="cosine"), denoiser, dataset, 3)
    saved_states.save(closed, tmp_path, "closed")
    again = saved_states.load(tmp_path, "closed", closed.start.model, dataset.digest)
    assert plan_schedule(again, 6) is again


def test_a_disk_that_is_full_at_the_last_file_leaves_what_was_there(run, tmp_path, monkeypatch):
    state, denoiser, dataset = run
    write = store.write_whole

    def full(path, *given):
        if path.endswith("state.json"):
            raise OSError(errno.ENOSPC, "No space left on device", path)
        return write(path, *given)

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr(store, "write_whole", full)
        saved_states.save(state, tmp_path, "mine")
    assert not list(tmp_path.rglob("*.safetensors")) and not (tmp_path / "mine").exists()
    saved_states.save(state, tmp_path, "mine")
    before = sorted((tmp_path / "mine").iterdir())
    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr(store, "write_whole", full)
        saved_states.save(train(state, denoiser, dataset, 1), tmp_path, "mine")
    assert sorted((tmp_path / "mine").iterdir()) == before
    assert equal(saved_states.load(tmp_path, "mine", "model", dataset.digest), state)


def test_without_a_dataset_it_comes_back_too(run, tmp_path):
    saved_states.save(run[0], tmp_path, "mine")
    assert saved_states.load(tmp_path, "mine", "model").lora_model(ema=True).keys() == run[0].lora_model().keys()


def test_another_model_or_dataset_is_refused_with_both_named(run, tmp_path):
    saved_states.save(run[0], tmp_path, "mine")
    with pytest.raises(
        ValueError, match=r"on the model model, and the model that is connected is other; .*with the dataset"
    ) as caught:
        saved_states.load(tmp_path, "mine", "other", "pictures")
    assert run[2].digest[:16] in str(caught.value) and "pictures" in str(caught.value)


def disk_full_at(monkeypatch, part):
    """The disk is full when a file with `part` in its name is to be renamed into place."""
    replace = os.replace

    def full(source, target):
        if part in os.fspath(target):
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)


@pytest.mark.parametrize("shard", [2000, 2100])
def test_a_full_disk_leaves_the_same_state_that_is_there_already(run, tmp_path, monkeypatch, shard):
    state = run[0]
    folder = saved_states.save(state, tmp_path, "mine", 2000)
    before = sorted(folder.iterdir())
    disk_full_at(monkeypatch, "-00002-of-")
    with pytest.raises(OSError, match="No space"):
        saved_states.save(state, tmp_path, "mine", shard)
    assert sorted(folder.iterdir()) == before and equal(saved_states.load(tmp_path, "mine", "model"), state)


@pytest.mark.parametrize("name", ["", "..", "a/b", "a\\b", "C:x", " x", "x.", "a\0b", "../x", "日" * 90, "a\ud800"])
def test_a_name_never_leaves_its_folder(run, tmp_path, name):
    for act in (
        lambda: saved_states.save(run[0], tmp_path / "states", name),
        lambda: saved_states.load(tmp_path / "states", name, "model"),
    ):
        with pytest.raises(ValueError, match="plain folder name"):
            act()
    assert not list(tmp_path.iterdir())


def test_a_missing_name_lists_those_that_are_there(run, tmp_path):
    saved_states.save(run[0], tmp_path, "mine")
    with pytest.raises(FileNotFoundError, match=r"no saved state 'yours'.*there are: mine"):
        saved_states.load(tmp_path, "yours", "model")


def test_damage_is_named(run, tmp_path):
    folder = saved_states.save(run[0], tmp_path, "mine", 700)
    for path in sorted(folder.glob("tensors-*")):
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(Damaged, match=path.name):
            saved_states.load(tmp_path, "mine", "model")
        path.unlink()
        with pytest.raises(Damaged, match=path.name):
            saved_states.load(tmp_path, "mine", "model")
        path.write_bytes(whole)
    saved_states.load(tmp_path, "mine", "model")
    record = folder / "state.json"
    body = json.loads(record.read_text())
    record.write_text(json.dumps({**body, "step": 9}))
    with pytest.raises(Damaged, match=r"state\.json"):
        saved_states.load(tmp_path, "mine", "model")


def test_a_name_is_replaced_whole_or_not_at_all(run, tmp_path, monkeypatch):
    state, denoiser, dataset = run
    saved_states.save(state, tmp_path, "mine", 700)
    further = train(state, denoiser, dataset, 1)
    disk_full_at(monkeypatch, "00003")
    with pytest.raises(OSError, match="No space"):
        saved_states.save(further, tmp_path, "mine", 700)
    assert equal(saved_states.load(tmp_path, "mine", "model"), state)
    monkeypatch.undo()
    saved_states.save(further, tmp_path, "mine", 0)
    assert equal(saved_states.load(tmp_path, "mine", "model"), further)
    assert len(list((tmp_path / "mine").iterdir())) == 2


def test_a_saved_state_of_a_newer_format_is_refused_with_its_version_and_kept(run, tmp_path):
    state, _, dataset = run
    folder = saved_states.save(state, tmp_path, "mine")
    path = folder / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 3, "versions": {"graft": "7.8.9"}}))
    written = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(NewerFormat, match=r"Graft 7\.8\.9 wrote it in format 3"):
        saved_states.load(tmp_path, "mine", "model", dataset.digest)
    with pytest.raises(NewerFormat, match="or give this run or state another name"):
        saved_states.save(state, tmp_path, "mine")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == written
    saved_states.save(state, tmp_path, "other")
