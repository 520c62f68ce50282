"""Files that go away or change between being found and being read: what was read stays as it was, the rest is named."""

import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from graft_nodes.patches.lora_files import metadata, open_file
from graft_nodes.storage import safetensors
from graft_nodes.tests.faults import tried
from graft_nodes.tests.fuzz.damage import CORPUS
from graft_nodes.training.averages import snapshots
from graft_nodes.training.run import call
from graft_nodes.training.run.loop import Callbacks
from graft_nodes.training.state import equal
from graft_nodes.training.store import listing, saved_states, store


@pytest.fixture
def run(tmp_path):
    made = tried.Run(tmp_path)
    made.prepare()
    made.act()
    return made


def lora(path, value):
    safetensors.write_safetensors(path, {"a.lora_up.weight": torch.full((4096,), value)}, {})


def test_a_lora_file_that_is_replaced_or_removed_while_it_is_in_use_stays_as_it_was_read(tmp_path):
    path = tmp_path / "a.safetensors"
    lora(path, 1.0)
    read = open_file.load_once(str(path))[0]["a.lora_up.weight"]
    lora(path, 2.0)
    assert bool((read == 1.0).all()) and bool((open_file.load_once(str(path))[0]["a.lora_up.weight"] == 2.0).all())
    path.unlink()
    assert bool((read == 1.0).all())
    for act in (open_file.load_once, safetensors.read_header, metadata.describe):
        with pytest.raises(FileNotFoundError, match=r"a\.safetensors"):
            act(str(path))


@pytest.mark.parametrize("name", ["state.json", "state.safetensors"])
def test_a_stored_state_that_goes_away_while_it_is_read_is_named_and_made_again(run, monkeypatch, name):
    expected, read = tried.contents(run.folder), store.read_record
    state = run.folder / "run" / run.start_key

    def removing(folder):
        record = read(folder)
        (Path(folder) / name).unlink(missing_ok=True)
        return record

    monkeypatch.setattr(store, "read_record", removing)
    monkeypatch.setattr(listing, "read_record", removing)
    listed = listing.states(run.folder, "run")
    assert len(listed) == (0 if name == "state.json" else 2)
    monkeypatch.undo()
    run.prepare()
    run.act()
    assert state.is_dir() and tried.contents(run.folder) == expected


def test_whatever_file_of_a_run_is_missing_it_is_said_and_the_run_ends_in_the_same_files(run, tmp_path_factory):
    expected = tried.contents(run.folder)
    for name in expected:
        place = tmp_path_factory.mktemp("one") / "place"
        shutil.copytree(run.folder, place)
        (place / name).unlink()
        if run.older.key[:32] in name:
            continue
        outcome = call.run(
            run.start,
            tried.STEPS,
            lambda: nullcontext(run.denoiser),
            run.dataset,
            store.Store(place, "run"),
            Callbacks(validate_every=2, snapshot_every=3),
            "best",
        )
        if "averages" not in name and not name.endswith("state.json"):
            assert any(note.startswith("not used: ") and os.path.basename(name) in note for note in outcome.notes), name
        if "averages" not in name:
            assert {key: body for key, body in tried.contents(place).items() if "averages" not in key} == {
                key: body for key, body in expected.items() if "averages" not in key
            }, name


def test_a_saved_state_that_lacks_a_file_names_it(run):
    state, _ = store.load(run.folder / "run" / run.start_key, run.start)
    folder = saved_states.save(state, run.folder, "mine", 60)
    assert equal(saved_states.load(run.folder, "mine", "model"), state)
    for path in sorted(folder.iterdir()):
        body = path.read_bytes()
        path.unlink()
        with pytest.raises(
            (FileNotFoundError, store.Damaged),
            match=path.name if path.name != "state.json" else "no saved state 'mine'",
        ):
            saved_states.load(run.folder, "mine", "model")
        path.write_bytes(body)


def test_averages_that_are_missing_are_named(run):
    for one in snapshots.find_snapshots(run.folder / "run"):
        one.path.unlink()
        with pytest.raises(ValueError, match=f"{one.path.name} is missing"):
            snapshots.read(one)


def test_a_picture_that_goes_away_or_changes_between_listing_and_encoding_is_named(tmp_path):
    from graft_nodes.tests.fuzz.datasets import encode_pixels, encode_texts
    from graft_nodes.training.data.encoding import encode
    from graft_nodes.training.data.folder_reader import read_folder
    from graft_nodes.training.data.folder_settings import FolderSettings

    for name in ("rgb.png", "l.jpg"):
        shutil.copy(CORPUS / "pictures" / name, tmp_path / name)
    listed = read_folder(tmp_path, FolderSettings(filters="", resolution=64))
    shutil.copy(CORPUS / "pictures" / "rgba.png", tmp_path / "rgb.png")
    with pytest.raises(ValueError, match=r"rgb\.png changed while the folder was read"):
        encode(listed, encode_pixels, encode_texts, ("eye", "ear"))
    (tmp_path / "rgb.png").unlink()
    with pytest.raises((ValueError, FileNotFoundError), match=r"rgb\.png"):
        encode(listed, encode_pixels, encode_texts, ("eye", "ear"))
