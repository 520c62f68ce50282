"""The demo's images and LoRA are found before they are in ComfyUI's folders, and are put there whole, once, with a
word.
"""

import os
from pathlib import Path
from types import SimpleNamespace

import folder_paths
import pytest
from graft_nodes.host import dataset_routes, demo_files, folders

DEMO = Path(__file__).resolve().parents[2] / "demo"
CONCEPT = "graft_demo/concept"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """ComfyUI's folders in `tmp_path`, empty."""
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "loras", ([str(tmp_path / "loras")], {".safetensors"}))
    for name in ("output", "input"):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(folder_paths, f"get_{name}_directory", lambda path=str(tmp_path / name): path)
    (tmp_path / "loras").mkdir()
    return tmp_path


def content(folder):
    """The bytes of every file below a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_looking_writes_nothing(place):
    for name in (CONCEPT, "graft_demo/regular", "graft_demo\\concept", " graft_demo/concept/ "):
        assert Path(folders.pictures_folder(name)).parent == DEMO
    assert folders.lora_path(demo_files.LORA) == str(DEMO / "zorp.safetensors")
    assert folders.lora_path("graft_demo/mauve.safetensors") == str(DEMO / "mauve.safetensors")
    assert folders.lora_names() == list(demo_files.LORAS) and folders.is_listed("graft_demo\\zorp.safetensors")
    assert content(place) == {}


def test_the_dataset_panel_sees_images_that_are_not_there_yet_and_writes_none(place):
    assert dataset_routes.glance({"folder": CONCEPT, "resolution": 64})[0] == 200
    query = {"folder": CONCEPT, "name": "zorp-00.png"}
    status, shown = dataset_routes.make_thumbnail(SimpleNamespace(query=query, headers={}))
    assert status == 200 and shown.body[:4] == b"RIFF"
    for name in ("../base.safetensors", "../regular/blue-circle-left-0.png", "none.png"):
        with pytest.raises((ValueError, FileNotFoundError)):
            dataset_routes.make_thumbnail(SimpleNamespace(query={"folder": CONCEPT, "name": name}, headers={}))
    before = (DEMO / "concept" / "zorp-00.txt").read_bytes()
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        dataset_routes.write_caption({**query, "text": "changed", "version": ""})
    assert (DEMO / "concept" / "zorp-00.txt").read_bytes() == before and content(place) == {}


@pytest.mark.parametrize("name", ["graft_demo", "graft_demo/other", "concept", "graft_demo/concept/x"])
def test_other_names_are_not_the_demo_s(place, name):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        folders.pictures_folder(name)
    assert demo_files.place_pictures(name) == "" and content(place) == {}


def test_images_are_put_into_the_input_folder_once_and_said(place):
    said = demo_files.place_pictures(CONCEPT)
    assert said == "put the demo's images into ComfyUI's input folder, as graft_demo/concept"
    assert content(place / "input") == {f"{CONCEPT}/{name}": data for name, data in content(DEMO / "concept").items()}
    assert folders.pictures_folder(CONCEPT) == str((place / "input" / CONCEPT).resolve())
    assert demo_files.place_pictures(CONCEPT) == "", "nothing to say the second time"
    assert os.listdir(place / "input" / "graft_demo") == ["concept"], "no draft is left"


def test_a_node_s_fingerprint_is_the_same_before_and_after(place, host):
    fingerprint = host.node("GraftDataset").fingerprint_inputs
    before = fingerprint(folder=CONCEPT)
    demo_files.place_pictures(CONCEPT)
    assert fingerprint(folder=CONCEPT) == before


def test_what_a_user_has_there_stays(place):
    own = place / "input" / "graft_demo" / "concept" / "mine.txt"
    own.parent.mkdir(parents=True)
    own.write_text("mine")
    lora = place / "loras" / "graft_demo" / "zorp.safetensors"
    lora.parent.mkdir()
    lora.write_bytes(b"mine too")
    assert demo_files.place_pictures(CONCEPT) == "" and len(demo_files.place_loras()) == len(demo_files.LORAS) - 1
    assert own.read_text() == "mine" and len(content(own.parent)) == 1 and lora.read_bytes() == b"mine too"
    assert sorted(folders.lora_names()) == sorted(demo_files.LORAS)
    assert folders.lora_path(demo_files.LORA) == str(lora)


def test_the_loras_are_put_into_the_loras_folder(place):
    files = ["graft_demo/zorp.safetensors", "graft_demo/mauve.safetensors"]
    said = [f"put the demo's LoRA into ComfyUI's loras folder, as {file}" for file in files]
    assert demo_files.place_loras() == said
    assert content(place / "loras") == {file: (DEMO / Path(file).name).read_bytes() for file in files}
    assert demo_files.place_loras() == []


def test_another_process_that_was_faster_keeps_its_copy(place, monkeypatch):
    rename = os.rename

    def late(draft, target):
        Path(target).mkdir()
        (Path(target) / "theirs.txt").write_text("theirs")
        rename(draft, target)

    monkeypatch.setattr(os, "rename", late)
    demo_files.place_pictures(CONCEPT)
    assert content(place / "input") == {f"{CONCEPT}/theirs.txt": b"theirs"}
    assert os.listdir(place / "input" / "graft_demo") == ["concept"], "no draft is left"


def test_a_folder_that_cannot_be_written_is_said_and_the_own_copy_read(place):
    (place / "input" / "graft_demo").write_text("a file where the folder would be")
    said = demo_files.place_pictures(CONCEPT)
    assert said.startswith("could not put the demo's images into ComfyUI's input folder, as graft_demo/concept (")
    assert said.endswith("Graft reads its own copy")
    assert folders.pictures_folder(CONCEPT) == str(DEMO / "concept")
