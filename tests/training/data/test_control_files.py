"""Which pictures of a folder are control pictures, and of which image."""

from pathlib import Path

import pytest
from graft_nodes.training.data.control_files import find_pairs, pairs_in_folders

ROOT = Path("/data")


def _pairs(*names):
    paths = [ROOT / name for name in sorted(names)]
    pairs = find_pairs(paths, ROOT)

    def name(path):
        return path.relative_to(ROOT).as_posix()

    controls = {name(image): [name(path) for path in paths] for image, paths in pairs.controls.items()}
    return [name(path) for path in pairs.images], controls, [name(path) for path in pairs.unused]


@pytest.mark.parametrize(
    ("names", "controls"),
    [
        (["a.png", "a.control.png"], {"a.png": ["a.control.png"]}),
        (["a.png", "a.control.jpg", "a.control2.png"], {"a.png": ["a.control.jpg", "a.control2.png"]}),
        (["a.png", "control/a.webp"], {"a.png": ["control/a.webp"]}),
        (["a.png", "control/a.png", "control3/a.png"], {"a.png": ["control/a.png", "control3/a.png"]}),
        (["10_cat/a.png", "10_cat/control/a.png"], {"10_cat/a.png": ["10_cat/control/a.png"]}),
        (["target/a.png", "control/a.png"], {"target/a.png": ["control/a.png"]}),  # AI-Toolkit's folders
        (  # AI-Toolkit's three control folders
            ["images/a.png", "control_1/a.png", "control_2/a.png", "control_3/a.png"],
            {"images/a.png": ["control_1/a.png", "control_2/a.png", "control_3/a.png"]},
        ),
        (["a.png", "control/a_0.png", "control/a_1.png"], {"a.png": ["control/a_0.png", "control/a_1.png"]}),  # musubi
        (
            ["a.png", "a_1.png", "control/a.png", "control/a_1.png"],
            {"a.png": ["control/a.png"], "a_1.png": ["control/a_1.png"]},
        ),
        (["a.b.png", "a.b.control.png"], {"a.b.png": ["a.b.control.png"]}),
    ],
)
def test_partners_are_found_and_are_no_images(names, controls):
    images, found, unused = _pairs(*names)
    assert found == controls and not unused
    assert sorted([*images, *(name for partners in controls.values() for name in partners)]) == sorted(names)


@pytest.mark.parametrize(
    "names",
    [
        ["a.png", "b.png"],
        ["a.png", "control/x.png", "control/y.png"],  # a subject that is named control
        ["control/x.png", "b.control.png"],
        ["a_control.png", "a.png", "controls/a.png", "mycontrol/a.png"],
        ["a.controlled.png", "a.png"],
    ],
)
def test_folders_without_pairs_are_read_as_before(names):
    assert _pairs(*names) == (sorted(names), {}, [])


def test_the_folder_itself_may_be_named_control():
    folder = ROOT / "control"
    paths = [folder / "a.png", folder / "b.png"]
    assert find_pairs(paths, folder).images == paths


def test_a_control_picture_that_no_image_uses_is_told_apart():
    images, controls, unused = _pairs("a.png", "a.control.png", "b.control.png", "control/a.png", "control/c.png")
    assert images == ["a.png"] and controls == {"a.png": ["a.control.png"]}
    assert unused == ["b.control.png", "control/a.png", "control/c.png"]
    assert _pairs("a.png", "a.control.png", "a.control4.png")[2] == ["a.control4.png"]


def test_folders_that_a_file_names():
    images = [ROOT / "a.png", ROOT / "b.png", ROOT / "c.png"]
    first, second = [Path("/c1/a.png"), Path("/c1/b.jpg"), Path("/c1/z.png")], [Path("/c2/a.png")]
    pairs = pairs_in_folders(images, [first, second])
    assert pairs.images == images and pairs.unused == [Path("/c1/z.png")]
    assert pairs.controls == {images[0]: (Path("/c1/a.png"), Path("/c2/a.png")), images[1]: (Path("/c1/b.jpg"),)}
    many = [Path(f"/c/a_{number}.png") for number in range(4)]
    pairs = pairs_in_folders(images, [many])
    assert pairs.controls == {images[0]: tuple(many[:3])} and pairs.unused == many[3:]
