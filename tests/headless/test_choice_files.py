"""What is said of a choice that the host lacks: its folder, near names, and how to set another one."""

from types import SimpleNamespace

import pytest
from graft_nodes.headless import choice_files
from graft_nodes.headless.embedded import catalogue, workflow

from .test_command import run as run_command


class Folders:
    """Stands for folder_paths."""

    paths = {  # noqa: RUF012
        "checkpoints": ["/m/checkpoints"],
        "vae": ["/m/vae"],
        "vae_approx": ["/m/vae_approx"],
        "diffusion_models": ["/m/unet", "/m/diffusion_models"],
    }

    def __init__(self, **files):
        self.files = files

    def get_filename_list(self, kind):
        return list(self.files.get(kind, ()))

    def get_folder_paths(self, kind):
        return self.paths[kind]

    def get_input_directory(self):
        return "/in"


def advice(inputs, value, folders, name="file"):
    """The message for a value of a node with these inputs, which may ask the folders."""
    cls = type(
        "Loader",
        (),
        {"INPUT_TYPES": lambda: {"required": inputs(folders)}, "RETURN_TYPES": ("MODEL",), "OUTPUT_NODE": True},
    )
    host = SimpleNamespace(folders=folders, nodes=SimpleNamespace(NODE_CLASS_MAPPINGS=dict(Loader=cls)))
    look_up = catalogue({"Loader": cls}, {})
    graph = workflow.parse({"4": {"class_type": "Loader", "inputs": {name: value}}}).graph(look_up)
    (problem,) = choice_files.with_advice(host, graph, look_up, workflow.check(graph, look_up))
    return problem.message


def checkpoint(folders):
    return {"file": (folders.get_filename_list("checkpoints"),)}


def test_an_empty_list_names_its_folder():
    message = advice(checkpoint, "sd_xl_base_1.0.safetensors", Folders())
    assert message.startswith("'sd_xl_base_1.0.safetensors' is not in the list []; ")
    assert "put the file into /m/checkpoints, or choose another with --set 4.file=NAME" in message


def test_near_names_are_said():
    names = ["XL/SD_XL_base_1.0.safetensors", "v1-5.safetensors"]
    message = advice(checkpoint, "sd_xl_base_1.0.safetensors", Folders(checkpoints=names))
    assert "did you mean 'XL/SD_XL_base_1.0.safetensors'?" in message and "/m/checkpoints" in message


def test_of_several_folders_those_that_the_list_is_of_are_named():
    def several(folders):
        vaes = [*folders.get_filename_list("vae"), *folders.get_filename_list("vae_approx"), "pixel_space"]
        return {
            "model": (folders.get_filename_list("checkpoints"), {"default": "a.safetensors"}),
            "file": (vaes,),
            "mode": (["fast", "slow"],),
        }

    folders = Folders(checkpoints=["a.safetensors"], vae=["b.safetensors"])
    given = {"model": "a.safetensors", "mode": "fast"}

    class Loader:
        RETURN_TYPES = ()
        OUTPUT_NODE = True

        @classmethod
        def INPUT_TYPES(cls):
            return {"required": several(folders)}

    host = SimpleNamespace(folders=folders, nodes=SimpleNamespace(NODE_CLASS_MAPPINGS=dict(Loader=Loader)))
    look_up = catalogue({"Loader": Loader}, {})

    def said(**changes):
        graph = {"4": {"class_type": "Loader", "inputs": {**given, "file": "b.safetensors", **changes}}}
        graph = workflow.parse(graph).graph(look_up)
        (problem,) = choice_files.with_advice(host, graph, look_up, workflow.check(graph, look_up))
        return problem.message

    assert "put the file into /m/vae, or" in said(file="c.safetensors")
    assert "put the file into /m/checkpoints, or" in said(model="c.safetensors")
    assert "put the file" not in said(mode="fas") and "did you mean 'fast'" in said(mode="fas")
    folders.files = {"checkpoints": ["a.safetensors"]}
    look_up = catalogue({"Loader": Loader}, {})
    assert "put the file" not in said(mode="fas", file="pixel_space")


def test_a_folder_with_the_name_of_its_kind_comes_before_an_older_one():
    def unet(folders):
        return {"file": ("COMBO", {"options": folders.get_filename_list("diffusion_models")})}

    assert "put the file into /m/diffusion_models, or" in advice(unet, "flux.safetensors", Folders())


def test_a_picture_belongs_into_the_input_folder():
    message = advice(lambda folders: {"file": (["a.png"], {"image_upload": True})}, "b.png", Folders())
    assert "put the file into /in, or choose another with --set 4.file=NAME" in message


def test_a_name_with_spaces_is_one_word():
    message = advice(lambda folders: {"my file": (["a"],)}, "b", Folders(), "my file")
    assert 'choose another with --set "4.my file=NAME"' in message


def test_what_lists_the_files_is_as_before_afterwards():
    folders = Folders()
    before = folders.get_filename_list
    with pytest.raises(ZeroDivisionError), choice_files.names_asked_for(folders):
        raise ZeroDivisionError
    assert folders.get_filename_list == before


def test_a_host_s_own_loader_is_advised(tmp_path):
    (tmp_path / "in").mkdir()
    unet = {"class_type": "UNETLoader", "inputs": {"unet_name": "flux.safetensors", "weight_dtype": "default"}}
    picture = {"class_type": "LoadImage", "inputs": {"image": "gone.png"}}
    shown = {"class_type": "PreviewAny", "inputs": {"source": ["1", 0]}}
    preview = {"class_type": "PreviewImage", "inputs": {"images": ["3", 0]}}
    status, _, err = run_command(tmp_path, {"1": unet, "2": shown, "3": picture, "4": preview})
    assert status == 2 and "models" in err and "--set 1.unet_name=NAME" in err
    assert "/diffusion_models, or choose another" in err.replace("\\", "/")
    assert f"put the file into {tmp_path / 'in'}, or choose another with --set 3.image=NAME" in err
