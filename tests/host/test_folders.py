"""File names become paths inside ComfyUI's folders, and what is missing is named with what may have been meant."""

import os
import sys

import folder_paths
import pytest
from graft_nodes.host import demo_files, folders


@pytest.fixture
def place(tmp_path, monkeypatch):
    """ComfyUI's folders in `tmp_path`: two for LoRAs, one each for checkpoints, diffusion models, output and input."""
    kinds = {"loras": ("loras", "more"), "checkpoints": ("checkpoints",), "diffusion_models": ("diffusion_models",)}
    for kind, names in kinds.items():
        paths = [str(tmp_path / name) for name in names]
        monkeypatch.setitem(folder_paths.folder_names_and_paths, kind, (paths, {".safetensors"}))
    for name in ("output", "input"):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(folder_paths, f"get_{name}_directory", lambda path=str(tmp_path / name): path)
    return tmp_path


def touch(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    return str(path)


def test_loras_are_found_by_name_in_every_folder_and_in_the_output(place):
    expected = {
        "a.safetensors": touch(place / "loras" / "a.safetensors"),
        "style/b.safetensors": touch(place / "more" / "style" / "b.safetensors"),
        "output/loras/run/c.safetensors": touch(place / "output" / "loras" / "run" / "c.safetensors"),
    }
    touch(place / "output" / "loras" / "notes.txt")
    touch(place / "output" / "d.safetensors")
    expected_names = list(expected)
    expected_names[2:2] = demo_files.LORAS  # offered before they are in a folder
    assert folders.lora_names() == expected_names
    assert {name: folders.lora_path(name) for name in expected} == expected
    assert folders.lora_path("style\\b.safetensors") == expected["style/b.safetensors"]
    assert folders.is_listed("style\\b.safetensors") and not folders.is_listed("b.safetensors")


@pytest.mark.skipif(sys.platform == "win32", reason="a backslash is a slash there")
def test_a_file_whose_own_name_has_a_backslash_goes_before_one_in_a_folder(place):
    in_folder = touch(place / "loras" / "a" / "b.safetensors")
    assert folders.lora_path("a\\b.safetensors") == in_folder
    own_name = touch(place / "loras" / "a\\b.safetensors")
    assert folders.lora_path("a\\b.safetensors") == own_name and folders.lora_path("a/b.safetensors") == in_folder


def test_the_loras_folders_go_before_the_output_folder(place):
    name = "output/loras/a.safetensors"
    saved = touch(place / name)
    assert folders.lora_path(name) == saved
    own = touch(place / "loras" / name)
    assert folders.lora_path(name) == own


@pytest.mark.parametrize("name", ["../a", "x/../../a", "x\\..\\a", "/a", "\\a", "C:a", "a\0b", "output/loras/../a"])
def test_no_name_leads_out_of_its_folder(place, name):
    for look_up in (folders.lora_path, folders.weights_path):
        with pytest.raises(ValueError, match="is outside the loras folder"):
            look_up(name)
    with pytest.raises(ValueError, match="expected a name inside ComfyUI's output folder"):
        folders.output_file(name, ".png")


@pytest.mark.skipif(sys.platform == "win32", reason="links need a right of their own")
def test_a_folder_that_links_to_one_above_it_does_not_repeat_its_files(place):
    """ComfyUI lists each file of it some forty times, each time one folder deeper."""
    for name in ("style/cat v1.safetensors", "style/cat v2.safetensors"):
        touch(place / "loras" / name)
    (place / "loras" / "style" / "again").symlink_to(place / "loras", target_is_directory=True)
    assert len(folders.lora_names()) > 20
    assert folders.near_loras("cat.safetensors") == ["style/cat v2.safetensors", "style/cat v1.safetensors"]


def test_a_lora_that_is_not_there_is_named_with_those_it_may_have_been(place):
    with pytest.raises(FileNotFoundError, match=r"^no LoRA file 'cat.safetensors' in ComfyUI's loras folders$"):
        folders.lora_path("cat.safetensors")
    for name in (
        "old/Cat.safetensors",
        "cats.safetensors",
        "cat v1.safetensors",
        "cat v2.safetensors",
        "x.safetensors",
    ):
        touch(place / "loras" / name)
    assert folders.near_loras("new/cat.safetensors")[0] == "old/Cat.safetensors"  # the same file in another folder
    assert folders.near_loras("cat.safetensors") == ["old/Cat.safetensors", "cats.safetensors", "cat v2.safetensors"]
    assert folders.near_loras("cat.safetensors", 1) == ["old/Cat.safetensors"] and not folders.near_loras("qq")
    with pytest.raises(FileNotFoundError, match=r"did you mean old/Cat.safetensors or cats.safetensors or cat v"):
        folders.lora_path("cat.safetensors")
    with pytest.raises(FileNotFoundError, match=r"no LoRA file 'output/loras/qq.safetensors'"):
        folders.lora_path("output/loras/qq.safetensors")


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
def test_a_link_to_nothing_is_said_to_be_one(place):
    (place / "loras").mkdir()
    (place / "loras" / "gone.safetensors").symlink_to(place / "nothing")
    with pytest.raises(FileNotFoundError, match="is a link to a missing file"):
        folders.lora_path("gone.safetensors")


def test_weights_are_checkpoints_then_diffusion_models_then_loras(place):
    kinds = ("checkpoints", "diffusion_models", "loras")
    paths = [touch(place / kind / "a.safetensors") for kind in kinds]
    for path in paths:
        assert folders.weights_path("a.safetensors") == path
        os.unlink(path)
    with pytest.raises(FileNotFoundError, match=r"no LoRA file 'a\.safetensors'"):
        folders.weights_path("a.safetensors")


def test_files_in_the_output_folder_are_numbered_on(place):
    path, shown = folders.output_file("sub/name", ".png")
    assert path == str(place / "output" / "sub" / "name_00001_.png")
    assert shown == {"filename": "name_00001_.png", "subfolder": "sub", "type": "output"}
    touch(place / "output" / "sub" / "name_00007_.png")
    assert folders.output_file("sub/name", ".png")[1]["filename"] == "name_00008_.png"
    for nothing in ("", " / "):
        with pytest.raises(ValueError, match="expected a name inside ComfyUI's output folder"):
            folders.output_file(nothing, ".png")


def test_an_image_folder_is_one_inside_the_input_folder(place):
    (place / "input" / "cats" / "small").mkdir(parents=True)
    (place / "out").mkdir()
    assert folders.input_folder(" cats/small ") == os.path.realpath(place / "input" / "cats" / "small")
    assert folders.input_folder(".") == os.path.realpath(place / "input")
    with pytest.raises(FileNotFoundError, match="there is no folder 'dogs'"):
        folders.input_folder("dogs")
    for empty in ("", "  "):
        with pytest.raises(ValueError, match="image folder is empty"):
            folders.input_folder(empty)
    for outside in ("..", "../out", "cats/../../out", str(place / "out")):
        with pytest.raises(ValueError, match="is outside ComfyUI's input folder"):
            folders.input_folder(outside)
    if sys.platform != "win32":
        (place / "input" / "link").symlink_to(place / "out")
        with pytest.raises(ValueError, match="is outside ComfyUI's input folder"):
            folders.input_folder("link")


def test_only_a_file_is_kohyas_dataset_config(place):
    touch(place / "input" / "sets" / "cats.TOML")
    (place / "input" / "folder.toml").mkdir()
    assert folders.is_dataset_config(" sets/cats.TOML ") and folders.is_dataset_config("missing.toml")
    assert not folders.is_dataset_config("folder.toml") and not folders.is_dataset_config("cats.txt")


def test_a_picture_of_a_folder_is_one_that_is_there(place):
    path = touch(place / "input" / "cats" / "small" / "a.png")
    root = os.path.realpath(place / "input" / "cats")
    assert folders.input_picture("cats", "small\\a.png") == (root, os.path.join(root, "small", "a.png"))
    assert os.path.samefile(folders.input_picture("cats", "small/a.png")[1], path)
    with pytest.raises(FileNotFoundError, match=r"there is no picture 'b\.png' in the folder 'cats'"):
        folders.input_picture("cats", "b.png")
    assert folders.input_picture("cats", "b.png", exists=lambda path: path.endswith("b.png"))[0] == root
    for outside in ("../a.png", "/a.png", "C:a.png"):
        with pytest.raises(ValueError, match="is outside the folder 'cats'"):
            folders.input_picture("cats", outside)


def test_the_demos_pictures_are_read_where_they_are_until_they_are_copied(place):
    own = str(demo_files.PICTURES["graft_demo/concept"])
    assert folders.pictures_folder("graft_demo/concept") == own
    copied = place / "input" / "graft_demo" / "concept"
    copied.mkdir(parents=True)
    assert folders.pictures_folder("graft_demo/concept") == os.path.realpath(copied)
    with pytest.raises(FileNotFoundError, match="there is no folder 'cats'"):
        folders.pictures_folder("cats")


def test_new_loras_go_into_the_first_folder_that_is_there(place):
    (place / "more").mkdir()
    assert folders.loras_folder() == str(place / "more")
    (place / "loras").mkdir()
    assert folders.loras_folder() == str(place / "loras")


def test_where_no_loras_folder_is_there_the_first_is_made(place, monkeypatch):
    assert folders.loras_folder() == str(place / "loras") and (place / "loras").is_dir()
    monkeypatch.setattr(folder_paths, "get_folder_paths", lambda kind: [])
    with pytest.raises(FileNotFoundError, match=r"name one in extra_model_paths\.yaml"):
        folders.loras_folder()


def test_a_file_of_the_input_folder_is_named_in_it(place):
    path = touch(place / "input" / "sub" / "a.json")
    assert os.path.samefile(folders.input_file(" sub/a.json "), path)
    assert folders.relative_to_input(path) == "sub/a.json"
    with pytest.raises(FileNotFoundError, match="there is no file 'sub' in ComfyUI's input folder"):
        folders.input_file("sub")
    with pytest.raises(ValueError, match="is outside ComfyUI's input folder"):
        folders.input_file("../a.json")


def test_training_states_lie_in_the_output_folder(place):
    assert folders.training_folder() == str(place / "output" / "graft")
    assert folders.states_folder() == str(place / "output" / "graft_states")


@pytest.mark.parametrize(
    ("variable", "limit", "default"),
    [("GRAFT_STORE_GB", folders.store_limit, 100), ("GRAFT_UPLOAD_GB", folders.upload_limit, 4)],
)
def test_limits_are_read_from_the_environment(monkeypatch, variable, limit, default):
    monkeypatch.delenv(variable, raising=False)
    assert limit() == default * 10**9
    for text, expected in (("0", 0), ("1.5", 1_500_000_000)):
        monkeypatch.setenv(variable, text)
        assert limit() == expected
    for text in ("-1", "inf", "nan", "much"):
        monkeypatch.setenv(variable, text)
        with pytest.raises(ValueError, match=f"{variable} is '{text}', expected a number of GB"):
            limit()


def test_the_owner_of_a_comfyui_names_where_runs_and_files_go(place, monkeypatch):
    assert folders.training_folder() == str(place / "output" / "graft")
    assert folders.states_folder() == str(place / "output" / "graft_states")
    assert folders.output_file("a/b", ".safetensors")[0].startswith(str(place / "output"))
    for kind in ("graft_runs", "graft_states", "graft_files"):
        folder_paths.add_model_folder_path(kind, str(place / kind))  # as extra_model_paths.yaml does
    try:
        assert folders.training_folder() == str(place / "graft_runs")
        assert folders.states_folder() == str(place / "graft_states")
        assert folders.previews_folder() == str(place / "output" / "graft")  # ComfyUI shows pictures from there alone
        path, shown = folders.output_file("loras/b", ".safetensors")
        assert path == str(place / "graft_files" / "loras" / "b_00001_.safetensors") and shown is None
        for outside in ("../b", "/b", "C:/b", "a/../../b"):
            with pytest.raises(ValueError, match="expected a name inside"):
                folders.output_file(outside, ".safetensors")
    finally:
        for kind in ("graft_runs", "graft_states", "graft_files"):
            del folder_paths.folder_names_and_paths[kind]
