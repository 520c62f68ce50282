"""Names of files: they stay in their folders, counters go on, kinds have several folders. Holds for a
real ComfyUI too.
"""

from __future__ import annotations

import os

import folder_paths
import pytest

from comfyui_api_stubs.tests.which_host import REAL


@pytest.fixture(autouse=True)
def folders_as_before():
    """Folders that a test adds are gone after it: other files of this process save into the first one."""
    known = {kind: (list(paths), suffixes) for kind, (paths, suffixes) in folder_paths.folder_names_and_paths.items()}
    yield
    folder_paths.folder_names_and_paths.clear()
    folder_paths.folder_names_and_paths.update(known)


@pytest.fixture
def output(tmp_path):
    return os.path.realpath(tmp_path)


def touch(path):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb"):
        pass
    return path


def test_save_path_counts_on(output):
    assert folder_paths.get_save_image_path("sub/name", output) == (
        os.path.join(output, "sub"),
        "name",
        1,
        "sub",
        "sub/name",
    )
    for file in ("name_00004_.png", "name_00002_.png", "name_x_.png", "namely_00009_.png", "other_00011_.png"):
        touch(os.path.join(output, "sub", file))
    assert folder_paths.get_save_image_path("sub/name", output)[2] == 5
    assert folder_paths.get_save_image_path("new", output)[2] == 1


def test_save_path_fills_in(output):
    *_, prefix = folder_paths.get_save_image_path("a_%width%x%height%_%year%", output, 640, 480)
    assert prefix.startswith("a_640x480_2") and "%" not in prefix


@pytest.mark.parametrize("prefix", ["../out", "a/../../out", "/elsewhere/out"])
def test_save_path_stays_inside(output, prefix):
    with pytest.raises(Exception, match="outside the output folder"):
        folder_paths.get_save_image_path(prefix, output)


def test_annotated_names(host):
    touch(os.path.join(host.input, "in.png"))
    touch(os.path.join(host.output, "out.png"))
    assert folder_paths.get_annotated_filepath("in.png") == os.path.join(host.input, "in.png")
    assert folder_paths.get_annotated_filepath("out.png [output]") == os.path.join(host.output, "out.png")
    assert folder_paths.get_annotated_filepath("x.png [temp]") == os.path.join(host.temp, "x.png")
    assert folder_paths.exists_annotated_filepath("in.png") and folder_paths.exists_annotated_filepath(
        "out.png [output]"
    )
    assert not folder_paths.exists_annotated_filepath("no.png")


@pytest.mark.skipif(REAL, reason="0.3.64 does not refuse it; the embedded host does as 0.33.0")
def test_annotated_names_stay_inside(host):
    touch(os.path.join(os.path.dirname(host.input), "secret.png"))
    assert not folder_paths.exists_annotated_filepath("../secret.png")
    with pytest.raises(ValueError, match="Invalid file path"):
        folder_paths.get_annotated_filepath("../secret.png")


def test_model_folders(tmp_path):
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    touch(os.path.join(first, "deep", "a.safetensors"))
    touch(os.path.join(first, "readme.txt"))
    touch(os.path.join(second, "b.safetensors"))
    touch(os.path.join(second, "deep", "a.safetensors"))
    for folder in (first, second):
        folder_paths.add_model_folder_path("loras", folder, is_default=True)
    assert folder_paths.get_folder_paths("loras")[:2] == [second, first]
    listed = folder_paths.get_filename_list("loras")
    assert "b.safetensors" in listed and os.path.join("deep", "a.safetensors") in listed and "readme.txt" not in listed
    assert listed == sorted(set(listed))
    assert folder_paths.get_full_path("loras", "deep/a.safetensors") == os.path.join(second, "deep", "a.safetensors")
    folder_paths.add_model_folder_path("loras", first)
    assert folder_paths.get_folder_paths("loras").count(first) == 1


def test_full_path_cannot_leave_the_folder(tmp_path):
    folder_paths.add_model_folder_path("loras", str(tmp_path / "loras"))
    touch(str(tmp_path / "loras" / "in.safetensors"))
    touch(str(tmp_path / "out.safetensors"))
    assert folder_paths.get_full_path("loras", "../out.safetensors") is None
    assert folder_paths.get_full_path("no such kind", "x") is None
    with pytest.raises(FileNotFoundError, match=r"loras.*out\.safetensors"):
        folder_paths.get_full_path_or_raise("loras", "../out.safetensors")


def test_new_kind_and_old_names(tmp_path):
    folder_paths.add_model_folder_path("pack_test_kind", str(tmp_path))
    touch(str(tmp_path / "anything.xyz"))
    assert folder_paths.get_filename_list("pack_test_kind") == ["anything.xyz"]
    assert folder_paths.get_folder_paths("unet") == folder_paths.get_folder_paths("diffusion_models")


def test_filters():
    assert folder_paths.filter_files_extensions(["b.PNG", "a.png", "c.txt"], [".png"]) == ["a.png", "b.PNG"]
    assert folder_paths.filter_files_content_types(["a.png", "b.txt", "c.webp", "d.mp4"], ["image"]) == [
        "a.png",
        "c.webp",
    ]


def test_folders_by_type(host):
    assert folder_paths.get_directory_by_type("output") == host.output
    assert folder_paths.get_directory_by_type("user") is None
